// The Python module of the CUDA half. It is empty: importing it loads this library, whose registrations then run.
// The schemas are those of csrc/library.cpp, so rlft_fast._C must be loaded first.
#include <Python.h>

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
