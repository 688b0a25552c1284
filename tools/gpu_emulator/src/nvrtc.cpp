// NVRTC, which CuPy asks for its version only: kernels are compiled by g++, see python/gpu_emulator/compiler.py.
#include "emulator.h"

extern "C" int nvrtcVersion(int* major, int* minor) {
  *major = GPU_EMULATOR_CUDA_VERSION / 1000;
  *minor = GPU_EMULATOR_CUDA_VERSION % 1000 / 10;
  return emulator::kSuccess;
}
