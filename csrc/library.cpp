// The schemas of all operators of the compiled extension.
//
// The kernels register themselves in csrc/cpu/*.cpp and csrc/cuda/*.cu. The fakes and the autograd formulas are in
// rlft_fast/ops/*.py. The extension is built against the LibTorch stable ABI, so one binary serves every torch from
// 2.11 on.
#include <Python.h>

#include <torch/csrc/stable/library.h>

// The module itself is empty. Its import loads this library, which runs the registrations below.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}

STABLE_TORCH_LIBRARY(rlft_fast, m) {
  // linear_logprob: the passes between the GEMMs, each over one (rows, columns) tile of raw logits. The equations are
  // in csrc/cpu/logprob_rows.cpp. A result of the tile's shape may overwrite the logits if both have the same dtype.
  m.def(
      "logprob_stats_(Tensor logits, Tensor target, int vocab_start, Tensor? bias, Tensor inv_temperature, "
      "float softcap, float scale, Tensor(a!) max, Tensor(b!) excess, Tensor(c!)? sum_exp_shift, "
      "Tensor(d!)? sum_exp_squared, Tensor(e!) target_logit, Tensor(f!)? sum_logits=None) -> ()");
  m.def(
      "logprob_grad_(Tensor logits, Tensor target, int vocab_start, Tensor? bias, Tensor inv_temperature, "
      "float softcap, float scale, Tensor max, Tensor log_sum, Tensor? entropy, Tensor grad_logprob, "
      "Tensor? grad_entropy, Tensor(a!) grad_logits) -> ()");
  m.def(
      "logprob_frozen_(Tensor logits, Tensor target, int vocab_start, Tensor? bias, Tensor inv_temperature, "
      "float softcap, float scale, Tensor(a!) max, Tensor(b!) excess, Tensor(c!) target_logit, Tensor(d!) sum_others, "
      "Tensor(e!) target_slope, Tensor(f!) accumulator, Tensor(g!) exp_logits) -> ()");
  m.def(
      "logprob_chunk_stats_(Tensor hidden, Tensor weight, Tensor(a!) logits, int tile_columns, Tensor target, "
      "Tensor? bias, Tensor inv_temperature, float softcap, float scale, Tensor(b!) max, Tensor(c!) excess, "
      "Tensor(d!)? sum_exp_shift, Tensor(e!) target_logit, ScalarType? weight_dtype=None, Tensor? adapter=None, "
      "bool rounds=False) -> ()");
  m.def(
      "logprob_chunk_grad_(Tensor hidden, Tensor weight, Tensor(a!) logits, int tile_columns, Tensor target, "
      "Tensor? bias, Tensor inv_temperature, float softcap, float scale, Tensor max, Tensor log_sum, Tensor? entropy, "
      "Tensor grad_logprob, Tensor? grad_entropy, Tensor(b!)? grad_hidden, Tensor(c!)? grad_weight, "
      "Tensor(d!)? grad_bias, bool accumulate, ScalarType? weight_dtype=None, Tensor? adapter=None, "
      "bool rounds=False) -> ()");
  // a GEMM of operands that are rounded to bfloat16, on CPUs with AVX512-BF16: out (+)= a @ b.
  m.def("multiply_rounded_(Tensor a, Tensor b, Tensor(a!) out, bool accumulate) -> ()");
  m.def("has_rounded_gemm() -> bool");
  m.def("use_huge_pages_(Tensor(a!) x) -> ()");

  // packing: padded (B, L, *) <-> packed (T, *), and tensors that are derived from cu_seqlens (B + 1) int32.
  m.def("unpad(Tensor[] padded, Tensor cu_seqlens, Tensor? columns, SymInt num_tokens, bool left) -> Tensor[]");
  m.def(
      "pad(Tensor[] packed, Tensor cu_seqlens, Tensor? columns, SymInt max_seqlen, bool left, float[] values) "
      "-> Tensor[]");
  m.def("mask_columns(Tensor mask, Tensor cu_seqlens, SymInt num_tokens) -> Tensor");
  m.def("position_ids(Tensor cu_seqlens, SymInt num_tokens) -> Tensor");
  m.def("next_token_targets(Tensor input_ids, Tensor cu_seqlens, int ignore_index) -> Tensor");
  m.def("segment_sum(Tensor values, Tensor cu_seqlens) -> Tensor");
  m.def("segment_expand(Tensor values, Tensor cu_seqlens, SymInt num_tokens) -> Tensor");
  m.def("take_rows(Tensor values, Tensor index, Tensor order, Tensor cu_uses) -> Tensor");
  m.def("sum_rows(Tensor values, Tensor index, Tensor order, Tensor cu_uses) -> Tensor");

  // Norm and clipping: one pass over all gradients of a (device, dtype) group, without a host sync. The order of the
  // additions is fixed.
  m.def("multi_tensor_norm_pow(Tensor[] tensors, int[] group_sizes, float norm_type) -> Tensor");
  m.def("multi_tensor_scale_(Tensor(a!)[] tensors, Tensor coefficient) -> ()");
  m.def("scale_(Tensor(a!) x, Tensor coefficient) -> ()");

  // adamw: one pass over all parameters of a (device, dtype, gradient dtype) group. The formula is in csrc/adamw.h.
  // Gradients are only read. lr_tensor replaces lr if it is given. Nothing changes if found_inf is not 0.
  m.def(
      "multi_tensor_adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] masters, Tensor(e!)[] steps, float lr, Tensor? lr_tensor, float beta1, float beta2, "
      "float weight_decay, float eps, Tensor? coefficient, Tensor? found_inf) -> ()");
}
