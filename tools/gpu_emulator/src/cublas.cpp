// cuBLAS as far as CuPy calls it for real numbers: plain loops, in the order of the stream, summed in double precision.
// Complex numbers and triangular systems are in cublas_lapack.cpp.
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "emulator.h"

namespace emulator {
namespace {

constexpr int kHostPointers = 0;

struct Handle {
  void* stream = nullptr;
  int pointer_mode = kHostPointers, math_mode = 0;
  int device = current_device();
};

// Numbers of cudaDataType.
enum DataType {
  kFloat = 0,
  kDouble = 1,
  kHalf = 2,
  kInt8 = 3,
  kComplexFloat = 4,
  kComplexDouble = 5,
  kInt32 = 10,
  kBfloat16 = 14,
};

size_t size_of(int type) {
  switch (type) {
    case kDouble: return 8;
    case kFloat:
    case kInt32: return 4;
    case kInt8: return 1;
    default: return 2;
  }
}

template <class T>
T read(const void* data, long i) {
  return ((const T*)data)[i];
}

double load(const void* data, long i, int type) {
  switch (type) {
    case kFloat: return read<float>(data, i);
    case kDouble: return read<double>(data, i);
    case kHalf: return _cvtsh_ss(read<uint16_t>(data, i));
    case kInt8: return read<int8_t>(data, i);
    case kInt32: return read<int32_t>(data, i);
    case kBfloat16: {
      const uint32_t bits = (uint32_t)read<uint16_t>(data, i) << 16;
      return read<float>(&bits, 0);
    }
  }
  fault("cuBLAS: type " + std::to_string(type) + " is not emulated");
  return 0;
}

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void store(void* data, long i, int type, double value) {
  switch (type) {
    case kFloat: ((float*)data)[i] = (float)value; return;
    case kDouble: ((double*)data)[i] = value; return;
    case kHalf: ((uint16_t*)data)[i] = _cvtss_sh((float)value, 0); return;
    case kInt32: ((int32_t*)data)[i] = (int32_t)value; return;
    case kBfloat16: ((uint16_t*)data)[i] = to_bfloat16((float)value); return;
  }
  fault("cuBLAS: type " + std::to_string(type) + " is not emulated");
}

// The type of alpha and beta for a cublasComputeType_t, or for the cudaDataType that older calls pass.
int scalar_type(int compute) {
  switch (compute) {
    case 64:
    case 65: return kHalf;
    case 70:
    case 71: return kDouble;
    case 72:
    case 73: return kInt32;
    case kDouble:
    case kHalf: return compute;
    default: return kFloat;
  }
}

// A matrix in column order, or one of a batch: by a stride, or by a list of addresses.
struct Matrix {
  const void* data;
  int type, leading;
  long long stride = 0;
  bool is_list = false;
  char* of(int number) const {
    if (is_list) return (char*)((void* const*)data)[number];
    return (char*)data + number * stride * (long long)size_of(type);
  }
};

Handle* checked(void* handle) {
  auto found = (Handle*)handle;
  if (found->device != current_device()) fault("cuBLAS: the handle belongs to another device");
  return found;
}

void later(void* handle, std::function<void()> operation) {
  enqueue(stream_of(checked(handle)->stream), std::move(operation));
}

// A number that is read now, if it is in host memory, or by the operation.
class Scalar {
 public:
  Scalar(void* handle, const void* address, int type) : address_(address), type_(type) {
    is_here_ = ((Handle*)handle)->pointer_mode == kHostPointers;
    if (is_here_) value_ = load(address, 0, type);
  }
  double value() const { return is_here_ ? value_ : load(address_, 0, type_); }

 private:
  const void* address_;
  int type_;
  bool is_here_;
  double value_ = 0;
};

int gemm(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha, Matrix a, Matrix b,
         const void* beta, Matrix c, int batch, int scalars) {
  const Scalar scale(handle, alpha, scalars), keep(handle, beta, scalars);
  later(handle, [=] {
    const double factor = scale.value(), kept = keep.value();
    for (int number = 0; number < batch; number++) {
      const char *left = a.of(number), *right = b.of(number);
      char* result = c.of(number);
      for (long column = 0; column < n; column++)
        for (long row = 0; row < m; row++) {
          double sum = 0;
          for (long i = 0; i < k; i++)
            sum += load(left, transpose_a ? i + row * a.leading : row + i * a.leading, a.type) *
                   load(right, transpose_b ? column + i * b.leading : i + column * b.leading, b.type);
          const long place = row + column * c.leading;
          store(result, place, c.type, factor * sum + (kept ? kept * load(result, place, c.type) : 0));
        }
    }
  });
  return kSuccess;
}

template <class T>
constexpr int type_of = sizeof(T) == sizeof(double) ? kDouble : kFloat;

template <class T>
int gemv(void* handle, int transpose, int m, int n, const T* alpha, const T* a, int leading, const T* x, int step_x,
         const T* beta, T* y, int step_y) {
  const Scalar scale(handle, alpha, type_of<T>), keep(handle, beta, type_of<T>);
  later(handle, [=] {
    const double factor = scale.value(), kept = keep.value();
    const long rows = transpose ? n : m, columns = transpose ? m : n;
    for (long row = 0; row < rows; row++) {
      double sum = 0;
      for (long i = 0; i < columns; i++)
        sum += (double)(transpose ? a[i + row * leading] : a[row + i * leading]) * x[i * step_x];
      T& target = y[row * step_y];
      target = (T)(factor * sum + (kept ? kept * target : 0));
    }
  });
  return kSuccess;
}

template <class T>
int ger(void* handle, int m, int n, const T* alpha, const T* x, int step_x, const T* y, int step_y, T* a,
        int leading) {
  const Scalar scale(handle, alpha, type_of<T>);
  later(handle, [=] {
    for (long column = 0; column < n; column++)
      for (long row = 0; row < m; row++)
        a[row + column * leading] += (T)(scale.value() * x[row * step_x] * y[column * step_y]);
  });
  return kSuccess;
}

template <class T>
int dot(void* handle, int n, const T* x, int step_x, const T* y, int step_y, T* result) {
  later(handle, [=] {
    double sum = 0;
    for (long i = 0; i < n; i++) sum += (double)x[i * step_x] * y[i * step_y];
    *result = (T)sum;
  });
  if (((Handle*)handle)->pointer_mode == kHostPointers) synchronize(stream_of(((Handle*)handle)->stream));
  return kSuccess;
}

template <class T>
int geam(void* handle, int transpose_a, int transpose_b, int m, int n, const T* alpha, const T* a, int leading_a,
         const T* beta, const T* b, int leading_b, T* c, int leading_c) {
  const Scalar scale_a(handle, alpha, type_of<T>), scale_b(handle, beta, type_of<T>);
  later(handle, [=] {
    const double factor_a = scale_a.value(), factor_b = scale_b.value();
    for (long column = 0; column < n; column++)
      for (long row = 0; row < m; row++) {
        const double left = factor_a ? factor_a * a[transpose_a ? column + row * leading_a : row + column * leading_a]
                                     : 0;
        const double right = factor_b ? factor_b * b[transpose_b ? column + row * leading_b : row + column * leading_b]
                                      : 0;
        c[row + column * leading_c] = (T)(left + right);
      }
  });
  return kSuccess;
}

// LU factors with partial pivoting; returns the number of the first zero pivot, or 0.
template <class T>
int factorize(int n, T* a, int leading, int* pivots) {
  int zero = 0;
  for (int column = 0; column < n; column++) {
    int pivot = column;
    if (pivots) {
      for (int row = column; row < n; row++)
        if (std::abs(a[row + (long)column * leading]) > std::abs(a[pivot + (long)column * leading])) pivot = row;
      pivots[column] = pivot + 1;
      for (int j = 0; j < n && pivot != column; j++)
        std::swap(a[pivot + (long)j * leading], a[column + (long)j * leading]);
    }
    const T divisor = a[column + (long)column * leading];
    if (divisor == 0) {
      if (!zero) zero = column + 1;
      continue;
    }
    for (int row = column + 1; row < n; row++) {
      T& factor = a[row + (long)column * leading];
      factor /= divisor;
      for (int j = column + 1; j < n; j++) a[row + (long)j * leading] -= factor * a[column + (long)j * leading];
    }
  }
  return zero;
}

// Column `column` of the inverse, from the factors.
template <class T>
void solve_unit(int n, const T* a, int leading, const int* pivots, int column, T* target) {
  std::vector<double> x(n, 0.0);
  x[column] = 1;
  for (int row = 0; pivots && row < n; row++) std::swap(x[row], x[pivots[row] - 1]);
  for (int row = 0; row < n; row++)
    for (int i = 0; i < row; i++) x[row] -= a[row + (long)i * leading] * x[i];
  for (int row = n - 1; row >= 0; row--) {
    for (int i = row + 1; i < n; i++) x[row] -= a[row + (long)i * leading] * x[i];
    x[row] /= a[row + (long)row * leading];
  }
  for (int row = 0; row < n; row++) target[row] = (T)x[row];
}

template <class T>
int getrf(void* handle, int n, T* const* a, int leading, int* pivots, int* info, int batch) {
  later(handle, [=] {
    for (int i = 0; i < batch; i++) info[i] = factorize(n, a[i], leading, pivots ? pivots + (long)i * n : nullptr);
  });
  return kSuccess;
}

template <class T>
int getri(void* handle, int n, const T* const* a, int leading, const int* pivots, T* const* c, int leading_c,
          int* info, int batch) {
  later(handle, [=] {
    for (int i = 0; i < batch; i++) {
      info[i] = 0;
      for (int j = 0; j < n; j++)
        solve_unit(n, a[i], leading, pivots ? pivots + (long)i * n : nullptr, j, c[i] + (long)j * leading_c);
    }
  });
  return kSuccess;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

int cublasCreate_v2(void** handle) {
  *handle = new Handle;
  return kSuccess;
}
int cublasDestroy_v2(void*) { return kSuccess; }  // operations may still need it
int cublasGetVersion_v2(void*, int* version) {
  *version = 120902;
  return kSuccess;
}
int cublasSetStream_v2(void* handle, void* stream) {
  ((Handle*)handle)->stream = stream;
  return kSuccess;
}
int cublasGetStream_v2(void* handle, void** stream) {
  *stream = ((Handle*)handle)->stream;
  return kSuccess;
}
int cublasSetPointerMode_v2(void* handle, int mode) {
  ((Handle*)handle)->pointer_mode = mode;
  return kSuccess;
}
int cublasGetPointerMode_v2(void* handle, int* mode) {
  *mode = ((Handle*)handle)->pointer_mode;
  return kSuccess;
}
int cublasSetMathMode(void* handle, int mode) {
  ((Handle*)handle)->math_mode = mode;
  return kSuccess;
}
int cublasGetMathMode(void* handle, int* mode) {
  *mode = ((Handle*)handle)->math_mode;
  return kSuccess;
}

// The functions that exist for each of the two types: X is the letter in their names.
#define FOR_TYPE(X, T)                                                                                                \
  int cublas##X##gemm_v2(void* h, int ta, int tb, int m, int n, int k, const T* al, const T* a, int la, const T* b,   \
                         int lb, const T* be, T* c, int lc) {                                                         \
    const int t = type_of<T>;                                                                                         \
    return gemm(h, ta, tb, m, n, k, al, {a, t, la}, {b, t, lb}, be, {c, t, lc}, 1, t);                                \
  }                                                                                                                   \
  int cublas##X##gemmStridedBatched(void* h, int ta, int tb, int m, int n, int k, const T* al, const T* a, int la,    \
                                    long long sa, const T* b, int lb, long long sb, const T* be, T* c, int lc,        \
                                    long long sc, int batch) {                                                        \
    const int t = type_of<T>;                                                                                         \
    return gemm(h, ta, tb, m, n, k, al, {a, t, la, sa}, {b, t, lb, sb}, be, {c, t, lc, sc}, batch, t);                \
  }                                                                                                                   \
  int cublas##X##gemmBatched(void* h, int ta, int tb, int m, int n, int k, const T* al, const T* const* a, int la,    \
                             const T* const* b, int lb, const T* be, T* const* c, int lc, int batch) {                \
    const int t = type_of<T>;                                                                                         \
    return gemm(h, ta, tb, m, n, k, al, {a, t, la, 0, true}, {b, t, lb, 0, true}, be, {c, t, lc, 0, true}, batch, t); \
  }                                                                                                                   \
  int cublas##X##gemv_v2(void* h, int tr, int m, int n, const T* al, const T* a, int la, const T* x, int sx,          \
                         const T* be, T* y, int sy) {                                                                 \
    return gemv(h, tr, m, n, al, a, la, x, sx, be, y, sy);                                                            \
  }                                                                                                                   \
  int cublas##X##ger_v2(void* h, int m, int n, const T* al, const T* x, int sx, const T* y, int sy, T* a, int la) {   \
    return ger(h, m, n, al, x, sx, y, sy, a, la);                                                                     \
  }                                                                                                                   \
  int cublas##X##dot_v2(void* h, int n, const T* x, int sx, const T* y, int sy, T* result) {                          \
    return dot(h, n, x, sx, y, sy, result);                                                                           \
  }                                                                                                                   \
  int cublas##X##geam(void* h, int ta, int tb, int m, int n, const T* al, const T* a, int la, const T* be,            \
                      const T* b, int lb, T* c, int lc) {                                                             \
    return geam(h, ta, tb, m, n, al, a, la, be, b, lb, c, lc);                                                        \
  }                                                                                                                   \
  int cublas##X##getrfBatched(void* h, int n, T* const* a, int la, int* pivots, int* info, int batch) {               \
    return getrf(h, n, a, la, pivots, info, batch);                                                                   \
  }                                                                                                                   \
  int cublas##X##getriBatched(void* h, int n, const T* const* a, int la, const int* pivots, T* const* c, int lc,      \
                              int* info, int batch) {                                                                 \
    return getri(h, n, a, la, pivots, c, lc, info, batch);                                                            \
  }
FOR_TYPE(S, float)
FOR_TYPE(D, double)

// Complex numbers are in cublas_lapack.cpp.
using ComplexGemm = int(void*, int, int, int, int, int, const void*, const void*, int, long long, const void*, int,
                        long long, const void*, void*, int, long long, int);
ComplexGemm cublasCgemmStridedBatched, cublasZgemmStridedBatched;
static ComplexGemm* complex_gemm(int type) {
  switch (type) {
    case kComplexFloat: return cublasCgemmStridedBatched;
    case kComplexDouble: return cublasZgemmStridedBatched;
    default: return nullptr;
  }
}


int cublasSgemmEx(void* h, int ta, int tb, int m, int n, int k, const float* alpha, const void* a, int type_a, int la,
                  const void* b, int type_b, int lb, const float* beta, void* c, int type_c, int lc) {
  return gemm(h, ta, tb, m, n, k, alpha, {a, type_a, la}, {b, type_b, lb}, beta, {c, type_c, lc}, 1, kFloat);
}
int cublasGemmEx(void* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int type_a, int la,
                 const void* b, int type_b, int lb, const void* beta, void* c, int type_c, int lc, int compute, int) {
  if (auto product = complex_gemm(type_a))
    return product(h, ta, tb, m, n, k, alpha, a, la, 0, b, lb, 0, beta, c, lc, 0, 1);
  return gemm(h, ta, tb, m, n, k, alpha, {a, type_a, la}, {b, type_b, lb}, beta, {c, type_c, lc}, 1,
              scalar_type(compute));
}
int cublasGemmStridedBatchedEx(void* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a,
                               int type_a, int la, long long sa, const void* b, int type_b, int lb, long long sb,
                               const void* beta, void* c, int type_c, int lc, long long sc, int batch, int compute,
                               int) {
  if (auto product = complex_gemm(type_a))
    return product(h, ta, tb, m, n, k, alpha, a, la, sa, b, lb, sb, beta, c, lc, sc, batch);
  return gemm(h, ta, tb, m, n, k, alpha, {a, type_a, la, sa}, {b, type_b, lb, sb}, beta, {c, type_c, lc, sc}, batch,
              scalar_type(compute));
}
}
