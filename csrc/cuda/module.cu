// The Python module of the CUDA half is empty. Its import loads this library, which registers the CUDA kernels.
// The schemas are in csrc/library.cpp, so rlft_fast._C must be loaded first.
#include <Python.h>

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
