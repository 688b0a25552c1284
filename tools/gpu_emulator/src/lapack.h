// SciPy's LAPACK and BLAS on the host, in the order of a stream.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "emulator.h"

namespace emulator {

// A function of SciPy's copy of OpenBLAS, whose names begin with scipy_; GPU_EMULATOR_LAPACK is the path of that library.
inline void* lapack_function(const std::string& name) {
  static const char* path = std::getenv("GPU_EMULATOR_LAPACK");
  static void* library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  void* function = library ? dlsym(library, ("scipy_" + name + "_").c_str()) : nullptr;
  if (!function) {
    fault("expected " + name + " in GPU_EMULATOR_LAPACK, got " + (path ? path : "nothing"));
    std::abort();
  }
  return function;
}

// Call it; all its arguments are pointers, but for the lengths of its strings at the end.
template <class... Arguments>
void lapack(const std::string& name, Arguments... arguments) {
  reinterpret_cast<void (*)(Arguments...)>(lapack_function(name))(arguments...);
}

constexpr size_t kOne = 1;  // the length of a string

inline char fill_of(int mode) { return mode ? 'U' : 'L'; }
inline char operation_of(int mode) { return "NTC"[mode]; }

// A work array that is long enough for any of the functions used here, in complex numbers of double precision.
struct Work {
  explicit Work(int size) : length((size + 64) * 64), memory(static_cast<size_t>(length) * 16) {}
  void* data() { return memory.data(); }
  int length;
  std::vector<char> memory;
};

}  // namespace emulator
