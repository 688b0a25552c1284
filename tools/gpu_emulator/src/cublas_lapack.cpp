// The rest of cuBLAS that cupy.linalg calls: triangular systems, and products of complex numbers, by BLAS and LAPACK.
#include <algorithm>
#include <complex>

#include "lapack.h"

extern "C" int cublasGetStream_v2(void* handle, void** stream);
extern "C" int cublasGetPointerMode_v2(void* handle, int* mode);

namespace emulator {
namespace {

template <class Function>
int later(void* handle, Function function) {
  void* stream = nullptr;
  cublasGetStream_v2(handle, &stream);
  enqueue(stream_of(stream), std::move(function));
  return kSuccess;
}

// A factor that is read now if it is in host memory, and in the stream if it is on the device.
template <class T>
struct Factor {
  Factor(void* handle, const T* address) : address(address) {
    int mode = 0;
    cublasGetPointerMode_v2(handle, &mode);
    on_device = mode != 0;
    if (!on_device) known = *address;
  }
  T value() const { return on_device ? *address : known; }
  const T* address;
  T known{};
  bool on_device;
};

template <class T>
void triangular(const char* name, int side, int uplo, int trans, int diagonal, int m, int n, T alpha, const T* a, int lda,
                T* b, int ldb) {
  char s = "LR"[side], f = fill_of(uplo), t = operation_of(trans), d = "NU"[diagonal];
  lapack(name, &s, &f, &t, &d, &m, &n, &alpha, a, &lda, b, &ldb, kOne, kOne, kOne, kOne);
}

template <class T>
void product(const char* name, int ta, int tb, int m, int n, int k, T alpha, const T* a, int lda, const T* b, int ldb,
             T beta, T* c, int ldc) {
  char p = operation_of(ta), q = operation_of(tb);
  lapack(name, &p, &q, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc, kOne, kOne);
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

#define TRIANGULAR(X, x, T)                                                                                           \
  int cublas##X##trsm_v2(void* handle, int side, int uplo, int trans, int diagonal, int m, int n, const T* alpha,     \
                         const T* a, int lda, T* b, int ldb) {                                                        \
    Factor<T> factor(handle, alpha);                                                                                  \
    return later(handle, [=] {                                                                                        \
      triangular(x "trsm", side, uplo, trans, diagonal, m, n, factor.value(), a, lda, b, ldb);                        \
    });                                                                                                               \
  }                                                                                                                   \
  int cublas##X##trsmBatched(void* handle, int side, int uplo, int trans, int diagonal, int m, int n, const T* alpha, \
                             const T* const* a, int lda, T* const* b, int ldb, int count) {                           \
    Factor<T> factor(handle, alpha);                                                                                  \
    return later(handle, [=] {                                                                                        \
      for (int i = 0; i < count; i++)                                                                                 \
        triangular(x "trsm", side, uplo, trans, diagonal, m, n, factor.value(), a[i], lda, b[i], ldb);                \
    });                                                                                                               \
  }                                                                                                                   \
  int cublas##X##getrsBatched(void* handle, int trans, int n, int columns, const T* const* a, int lda,                \
                              const int* pivots, T* const* b, int ldb, int* info, int count) {                        \
    *info = 0;                                                                                                        \
    return later(handle, [=]() mutable {                                                                              \
      char t = operation_of(trans);                                                                                   \
      int ignored = 0;                                                                                                \
      for (int i = 0; i < count; i++)                                                                                 \
        lapack(x "getrs", &t, &n, &columns, a[i], &lda, pivots + i * n, b[i], &ldb, &ignored, kOne);                  \
    });                                                                                                               \
  }

TRIANGULAR(S, "s", float)
TRIANGULAR(D, "d", double)
TRIANGULAR(C, "c", std::complex<float>)
TRIANGULAR(Z, "z", std::complex<double>)

// cublasGemmEx and cublasGemmStridedBatchedEx come here, too, if the type of A is complex (4 or 5).
#define FACTORS(X, x, T)                                                                                              \
  int cublas##X##getrfBatched(void* handle, int n, T* const* a, int lda, int* pivots, int* info, int count) {         \
    if (!pivots) return kNotSupported;                                                                                \
    return later(handle, [=]() mutable {                                                                              \
      for (int i = 0; i < count; i++) lapack(x "getrf", &n, &n, a[i], &lda, pivots + i * n, info + i);                \
    });                                                                                                               \
  }                                                                                                                   \
  int cublas##X##getriBatched(void* handle, int n, const T* const* a, int lda, const int* pivots, T* const* c,        \
                              int ldc, int* info, int count) {                                                        \
    return later(handle, [=]() mutable {                                                                              \
      Work work(n);                                                                                                   \
      for (int i = 0; i < count; i++) {                                                                               \
        for (int column = 0; column < n; column++)                                                                    \
          std::copy(a[i] + column * lda, a[i] + column * lda + n, c[i] + column * ldc);                               \
        lapack(x "getri", &n, c[i], &ldc, pivots + i * n, work.data(), &work.length, info + i);                       \
      }                                                                                                               \
    });                                                                                                               \
  }

// Those of real numbers are with the rest of cuBLAS.
FACTORS(C, "c", std::complex<float>)
FACTORS(Z, "z", std::complex<double>)

#define PRODUCT(X, x, T)                                                                                              \
  int cublas##X##gemmStridedBatched(void* handle, int ta, int tb, int m, int n, int k, const T* alpha, const T* a,    \
                                    int lda, long long sa, const T* b, int ldb, long long sb, const T* beta, T* c,    \
                                    int ldc, long long sc, int count) {                                               \
    Factor<T> first(handle, alpha), second(handle, beta);                                                             \
    return later(handle, [=] {                                                                                        \
      for (int i = 0; i < count; i++)                                                                                 \
        product(x "gemm", ta, tb, m, n, k, first.value(), a + i * sa, lda, b + i * sb, ldb, second.value(),           \
                c + i * sc, ldc);                                                                                     \
    });                                                                                                               \
  }                                                                                                                   \
  int cublas##X##gemm_v2(void* handle, int ta, int tb, int m, int n, int k, const T* alpha, const T* a, int lda,      \
                         const T* b, int ldb, const T* beta, T* c, int ldc) {                                         \
    return cublas##X##gemmStridedBatched(handle, ta, tb, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1);   \
  }

PRODUCT(C, "c", std::complex<float>)
PRODUCT(Z, "z", std::complex<double>)

}  // extern "C"
