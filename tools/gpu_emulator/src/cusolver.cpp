// cuSOLVER: what cupy.linalg calls, by LAPACK.
#include <algorithm>

#include "lapack.h"

namespace emulator {
namespace {

struct Solver {
  void* stream = nullptr;
};

template <class Function>
int later(void* handle, Function function) {
  enqueue(stream_of(static_cast<Solver*>(handle)->stream), std::move(function));
  return kSuccess;
}

bool is_complex(char x) { return x == 'c' || x == 'z'; }

std::string named(char x, const char* rest) { return std::string(1, x) + rest; }

void eigen(char x, int vectors, int uplo, int n, void* a, int lda, void* w, int* info) {
  char job = vectors ? 'V' : 'N', fill = fill_of(uplo);
  Work work(n), real(3 * n);
  if (is_complex(x)) {
    lapack(named(x, "heev"), &job, &fill, &n, a, &lda, w, work.data(), &work.length, real.data(), info, kOne, kOne);
  } else {
    lapack(named(x, "syev"), &job, &fill, &n, a, &lda, w, work.data(), &work.length, info, kOne, kOne);
  }
}

void cholesky(char x, int uplo, int n, void* a, int lda, int* info) {
  char fill = fill_of(uplo);
  lapack(named(x, "potrf"), &fill, &n, a, &lda, info, kOne);
}

void cholesky_solve(char x, int uplo, int n, int columns, const void* a, int lda, void* b, int ldb, int* info) {
  char fill = fill_of(uplo);
  lapack(named(x, "potrs"), &fill, &n, &columns, a, &lda, b, &ldb, info, kOne);
}

void singular_values(char x, char left, char right, int m, int n, void* a, int lda, void* s, void* u, int ldu, void* vt,
                     int ldvt, int* info) {
  Work work(5 * (m + n)), real(5 * (m + n));
  if (is_complex(x)) {
    lapack(named(x, "gesvd"), &left, &right, &m, &n, a, &lda, s, u, &ldu, vt, &ldvt, work.data(), &work.length,
           real.data(), info, kOne, kOne);
  } else {
    lapack(named(x, "gesvd"), &left, &right, &m, &n, a, &lda, s, u, &ldu, vt, &ldvt, work.data(), &work.length, info,
           kOne, kOne);
  }
}

// The functions below take their arguments by value, because they run later.
int lu(char x, void* handle, int m, int n, void* a, int lda, int* pivots, int* info) {
  return later(handle, [=]() mutable { lapack(named(x, "getrf"), &m, &n, a, &lda, pivots, info); });
}

int lu_solve(char x, void* handle, int trans, int n, int columns, const void* a, int lda, const int* pivots, void* b,
             int ldb, int* info) {
  return later(handle, [=]() mutable {
    char t = operation_of(trans);
    lapack(named(x, "getrs"), &t, &n, &columns, a, &lda, pivots, b, &ldb, info, kOne);
  });
}

int qr(char x, void* handle, int m, int n, void* a, int lda, void* tau, int* info) {
  return later(handle, [=]() mutable {
    Work work(n);
    lapack(named(x, "geqrf"), &m, &n, a, &lda, tau, work.data(), &work.length, info);
  });
}

int make_q(char x, void* handle, int m, int n, int k, void* a, int lda, const void* tau, int* info) {
  return later(handle, [=]() mutable {
    Work work(n);
    const char* name = is_complex(x) ? "ungqr" : "orgqr";
    lapack(named(x, name), &m, &n, &k, a, &lda, tau, work.data(), &work.length, info);
  });
}

int apply_q(char x, void* handle, int side, int trans, int m, int n, int k, const void* a, int lda, const void* tau,
            void* c, int ldc, int* info) {
  return later(handle, [=]() mutable {
    char s = "LR"[side], t = operation_of(trans);
    Work work(std::max(m, n));
    const char* name = is_complex(x) ? "unmqr" : "ormqr";
    lapack(named(x, name), &s, &t, &m, &n, &k, a, &lda, tau, c, &ldc, work.data(), &work.length, info, kOne, kOne);
  });
}

size_t real_size(char x) { return x == 's' || x == 'c' ? 4 : 8; }
size_t size_of(char x) { return is_complex(x) ? 2 * real_size(x) : real_size(x); }

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

int cusolverDnCreate(void** handle) { *handle = new Solver; return kSuccess; }
int cusolverDnDestroy(void* handle) { delete static_cast<Solver*>(handle); return kSuccess; }
int cusolverDnSetStream(void* handle, void* stream) { static_cast<Solver*>(handle)->stream = stream; return kSuccess; }
int cusolverDnGetStream(void* handle, void** stream) { *stream = static_cast<Solver*>(handle)->stream; return kSuccess; }
int cusolverDnCreateParams(void** params) { *params = new int; return kSuccess; }
int cusolverDnDestroyParams(void* params) { delete static_cast<int*>(params); return kSuccess; }
int cusolverDnCreateSyevjInfo(void** info) { *info = new int; return kSuccess; }
int cusolverDnDestroySyevjInfo(void* info) { delete static_cast<int*>(info); return kSuccess; }
int cusolverDnXsyevjSetTolerance(void*, double) { return kSuccess; }
int cusolverDnXsyevjSetMaxSweeps(void*, int) { return kSuccess; }
int cusolverDnXsyevjSetSortEig(void*, int) { return kSuccess; }
int cusolverGetProperty(int which, int* value) { *value = which == 0 ? 11 : which == 1 ? 7 : 0; return kSuccess; }

int cusolverDnXsyevd_bufferSize(void*, void*, int, int, long long, int, void*, long long, int, void*, int, size_t* device,
                                size_t* host) {
  *device = *host = 1;
  return kSuccess;
}
int cusolverDnXsyevd(void* handle, void*, int vectors, int uplo, long long n, int type, void* a, long long lda, int,
                     void* w, int, void*, size_t, void*, size_t, int* info) {
  // CUDA's numbers for float, double, and the complex numbers of both.
  char x = type == 0 ? 's' : type == 1 ? 'd' : type == 4 ? 'c' : 'z';
  return later(handle, [=] { eigen(x, vectors, uplo, static_cast<int>(n), a, static_cast<int>(lda), w, info); });
}

// LAPACK takes its work arrays itself, so the caller's need one element.
#define WORK_SIZE(name, ...) \
  int name##_bufferSize(__VA_ARGS__, int* length) { *length = 1; return kSuccess; }

#define SOLVER(X, x, o)                                                                                               \
  WORK_SIZE(cusolverDn##X##potrf, void*, int, int, void*, int)                                                        \
  int cusolverDn##X##potrf(void* handle, int uplo, int n, void* a, int lda, void*, int, int* info) {                  \
    return later(handle, [=] { cholesky(x, uplo, n, a, lda, info); });                                                \
  }                                                                                                                   \
  int cusolverDn##X##potrfBatched(void* handle, int uplo, int n, void** a, int lda, int* info, int count) {           \
    return later(handle, [=] { for (int i = 0; i < count; i++) cholesky(x, uplo, n, a[i], lda, info + i); });         \
  }                                                                                                                   \
  int cusolverDn##X##potrs(void* handle, int uplo, int n, int columns, const void* a, int lda, void* b, int ldb,      \
                           int* info) {                                                                               \
    return later(handle, [=] { cholesky_solve(x, uplo, n, columns, a, lda, b, ldb, info); });                         \
  }                                                                                                                   \
  int cusolverDn##X##potrsBatched(void* handle, int uplo, int n, int columns, void** a, int lda, void** b, int ldb,   \
                                  int* info, int count) {                                                             \
    return later(handle, [=] {                                                                                        \
      for (int i = 0; i < count; i++) cholesky_solve(x, uplo, n, columns, a[i], lda, b[i], ldb, info);                \
    });                                                                                                               \
  }                                                                                                                   \
  WORK_SIZE(cusolverDn##X##getrf, void*, int, int, void*, int)                                                        \
  int cusolverDn##X##getrf(void* handle, int m, int n, void* a, int lda, void*, int* pivots, int* info) {             \
    return lu(x, handle, m, n, a, lda, pivots, info);                                                                 \
  }                                                                                                                   \
  int cusolverDn##X##getrs(void* handle, int trans, int n, int columns, const void* a, int lda, const int* pivots,    \
                           void* b, int ldb, int* info) {                                                             \
    return lu_solve(x, handle, trans, n, columns, a, lda, pivots, b, ldb, info);                                      \
  }                                                                                                                   \
  WORK_SIZE(cusolverDn##X##geqrf, void*, int, int, void*, int)                                                        \
  int cusolverDn##X##geqrf(void* handle, int m, int n, void* a, int lda, void* tau, void*, int, int* info) {          \
    return qr(x, handle, m, n, a, lda, tau, info);                                                                    \
  }                                                                                                                   \
  WORK_SIZE(cusolverDn##X##o##gqr, void*, int, int, int, const void*, int, const void*)                               \
  int cusolverDn##X##o##gqr(void* handle, int m, int n, int k, void* a, int lda, const void* tau, void*, int,         \
                            int* info) {                                                                              \
    return make_q(x, handle, m, n, k, a, lda, tau, info);                                                             \
  }                                                                                                                   \
  WORK_SIZE(cusolverDn##X##o##mqr, void*, int, int, int, int, int, const void*, int, const void*, const void*, int)   \
  int cusolverDn##X##o##mqr(void* handle, int side, int trans, int m, int n, int k, const void* a, int lda,           \
                            const void* tau, void* c, int ldc, void*, int, int* info) {                               \
    return apply_q(x, handle, side, trans, m, n, k, a, lda, tau, c, ldc, info);                                       \
  }                                                                                                                   \
  WORK_SIZE(cusolverDn##X##gesvd, void*, int, int)                                                                    \
  int cusolverDn##X##gesvd(void* handle, signed char left, signed char right, int m, int n, void* a, int lda,         \
                           void* s, void* u, int ldu, void* vt, int ldvt, void*, int, void*, int* info) {             \
    return later(handle, [=] { singular_values(x, left, right, m, n, a, lda, s, u, ldu, vt, ldvt, info); });          \
  }

SOLVER(S, 's', or)
SOLVER(D, 'd', or)
SOLVER(C, 'c', un)
SOLVER(Z, 'z', un)

#define EIGEN(X, x, name)                                                                                             \
  WORK_SIZE(cusolverDn##X##name##evd, void*, int, int, int, const void*, int, const void*)                            \
  int cusolverDn##X##name##evd(void* handle, int vectors, int uplo, int n, void* a, int lda, void* w, void*, int,     \
                               int* info) {                                                                           \
    return later(handle, [=] { eigen(x, vectors, uplo, n, a, lda, w, info); });                                       \
  }                                                                                                                   \
  int cusolverDn##X##name##evj_bufferSize(void*, int, int, int, const void*, int, const void*, int* length, void*) {  \
    *length = 1;                                                                                                      \
    return kSuccess;                                                                                                  \
  }                                                                                                                   \
  int cusolverDn##X##name##evj(void* handle, int vectors, int uplo, int n, void* a, int lda, void* w, void*, int,     \
                               int* info, void*) {                                                                    \
    return later(handle, [=] { eigen(x, vectors, uplo, n, a, lda, w, info); });                                       \
  }                                                                                                                   \
  int cusolverDn##X##name##evjBatched_bufferSize(void*, int, int, int, const void*, int, const void*, int* length,    \
                                                 void*, int) {                                                        \
    *length = 1;                                                                                                      \
    return kSuccess;                                                                                                  \
  }                                                                                                                   \
  int cusolverDn##X##name##evjBatched(void* handle, int vectors, int uplo, int n, void* a, int lda, void* w, void*,   \
                                      int, int* info, void*, int count) {                                             \
    return later(handle, [=] {                                                                                        \
      for (int i = 0; i < count; i++) {                                                                               \
        char* matrix = static_cast<char*>(a) + size_of(x) * i * lda * n;                                              \
        eigen(x, vectors, uplo, n, matrix, lda, static_cast<char*>(w) + real_size(x) * i * n, info + i);              \
      }                                                                                                               \
    });                                                                                                               \
  }

EIGEN(S, 's', sy)
EIGEN(D, 'd', sy)
EIGEN(C, 'c', he)
EIGEN(Z, 'z', he)

}  // extern "C"
