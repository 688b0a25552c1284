// The one header of CUDA that CuPy needs and that its wheels do not bring.
#pragma once
#include <driver_types.h>
extern "C" {
cudaError_t cudaProfilerStart(void);
cudaError_t cudaProfilerStop(void);
}
