// What CuPy's own kernels include. Compiled in advance, it makes their compilation several times as fast.
#pragma once
#include "cuda_on_host.h"
#include <cupy/complex.cuh>
#include <cupy/carray.cuh>
#include <cupy/atomics.cuh>
