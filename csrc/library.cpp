// Every operator of the compiled extension, in one place.
//
// Schemas only: the kernels register themselves from csrc/cpu/*.cpp and csrc/cuda/*.cu, the fakes and the
// autograd formulas from rlft_fast/ops/*.py. The extension is built against the LibTorch stable ABI, so one
// binary serves every torch from 2.11 on.
#include <Python.h>

#include <torch/csrc/stable/library.h>

// The module itself is empty: importing it loads this library, which runs the registrations below.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}

STABLE_TORCH_LIBRARY(rlft_fast, m) {
  // linear_logprob: what happens between the GEMMs, on one (rows, columns) tile of raw logits.
  // The math is in csrc/cpu/logprob_rows.cpp. Results of the tile's shape may replace the logits, where dtypes allow it.
  m.def(
      "logprob_stats_(Tensor logits, Tensor target, int vocab_start, Tensor? bias, Tensor inv_temperature, "
      "float softcap, float scale, Tensor(a!) max, Tensor(b!) sum_exp, Tensor(c!)? sum_exp_shift, "
      "Tensor(d!)? sum_exp_squared, Tensor(e!) target_logit) -> ()");
  m.def(
      "logprob_grad_(Tensor logits, Tensor target, int vocab_start, Tensor? bias, Tensor inv_temperature, "
      "float softcap, float scale, Tensor max, Tensor log_sum, Tensor? entropy, Tensor grad_logprob, "
      "Tensor? grad_entropy, Tensor(a!) grad_logits) -> ()");
  m.def(
      "logprob_frozen_(Tensor logits, Tensor target, int vocab_start, Tensor? bias, Tensor inv_temperature, "
      "float softcap, float scale, Tensor(a!) max, Tensor(b!) sum_exp, Tensor(c!) target_logit, Tensor(d!) sum_others, "
      "Tensor(e!) target_slope, Tensor(f!) accumulator, Tensor(g!) exp_logits) -> ()");
  m.def(
      "logprob_chunk_stats_(Tensor hidden, Tensor weight, Tensor(a!) logits, int tile_columns, Tensor target, "
      "Tensor? bias, Tensor inv_temperature, float softcap, float scale, Tensor(b!) max, Tensor(c!) sum_exp, "
      "Tensor(d!)? sum_exp_shift, Tensor(e!)? sum_exp_squared, Tensor(f!) target_logit) -> ()");
  m.def(
      "logprob_chunk_grad_(Tensor hidden, Tensor weight, Tensor(a!) logits, int tile_columns, Tensor target, "
      "Tensor? bias, Tensor inv_temperature, float softcap, float scale, Tensor max, Tensor log_sum, Tensor? entropy, "
      "Tensor grad_logprob, Tensor? grad_entropy, Tensor(b!)? grad_hidden, Tensor(c!)? grad_weight, "
      "Tensor(d!)? grad_bias, bool accumulate) -> ()");
  m.def("use_huge_pages_(Tensor(a!) x) -> ()");

  // packing: padded (B, L, *) <-> packed (T, *), and what is derived from cu_seqlens (B + 1) int32.
  m.def("unpad(Tensor[] padded, Tensor cu_seqlens, Tensor? columns, SymInt num_tokens, bool left) -> Tensor[]");
  m.def(
      "pad(Tensor[] packed, Tensor cu_seqlens, Tensor? columns, SymInt max_seqlen, bool left, float[] values) "
      "-> Tensor[]");
  m.def("mask_columns(Tensor mask, Tensor cu_seqlens, SymInt num_tokens) -> Tensor");
  m.def("position_ids(Tensor cu_seqlens, SymInt num_tokens) -> Tensor");
  m.def("next_token_targets(Tensor input_ids, Tensor cu_seqlens, int ignore_index) -> Tensor");
  m.def("segment_sum(Tensor values, Tensor cu_seqlens) -> Tensor");
  m.def("segment_expand(Tensor values, Tensor cu_seqlens, SymInt num_tokens) -> Tensor");

  // Norm and clipping: one pass over all gradients of a (device, dtype) group; no host sync, fixed summation order.
  m.def("multi_tensor_norm_pow(Tensor[] tensors, int[] group_sizes, float norm_type) -> Tensor");
  m.def("multi_tensor_scale_(Tensor(a!)[] tensors, Tensor coefficient) -> ()");

  // adamw: one pass over all parameters of a (device, dtype, gradient dtype) group, the formula is in csrc/adamw.h.
  // Gradients are only read; lr_tensor, where given, replaces lr; nothing changes where found_inf is not 0.
  m.def(
      "multi_tensor_adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] masters, Tensor(e!)[] steps, float lr, Tensor? lr_tensor, float beta1, float beta2, "
      "float weight_decay, float eps, Tensor? coefficient, Tensor? found_inf) -> ()");
}
