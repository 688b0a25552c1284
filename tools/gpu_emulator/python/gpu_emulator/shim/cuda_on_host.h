// What CUDA C++ has and C++ does not, for one thread of a block: built in variables, functions and types.
#pragma once
#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_RTC_FAKE__ 1
#include <cmath>
#include <cstring>
#include <cstdint>
#include <cstddef>
#include <cassert>
#include <climits>
#include <cfloat>
#include <cstdio>
#include <type_traits>
#include <utility>
#include <immintrin.h>
#define __device__
#define __host__
#define __global__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))
struct FkCtx { unsigned tid[3], bid[3], bdim[3], gdim[3]; void* dyn; };
extern "C" { extern __thread FkCtx fk_ctx; void fk_sync(); void fk_syncwarp(); int fk_lane(); void fk_block(void (*)(void*), void*, unsigned*, int); }
struct dim3 { unsigned x, y, z; dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };
struct uint3 { unsigned x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
#define threadIdx (uint3{fk_ctx.tid[0], fk_ctx.tid[1], fk_ctx.tid[2]})
#define blockIdx (uint3{fk_ctx.bid[0], fk_ctx.bid[1], fk_ctx.bid[2]})
#define blockDim (uint3{fk_ctx.bdim[0], fk_ctx.bdim[1], fk_ctx.bdim[2]})
#define gridDim (uint3{fk_ctx.gdim[0], fk_ctx.gdim[1], fk_ctx.gdim[2]})
#define warpSize 32
#define __syncthreads fk_sync
inline void __syncwarp(unsigned = 0) { fk_syncwarp(); }
extern "C" { unsigned long long* fk_slot(int); }
template <class T> inline T fk_shfl(T v, int src) { int t = fk_lane(), base = t & ~31; unsigned long long x = 0; memcpy(&x, &v, sizeof v); *fk_slot(t) = x; fk_syncwarp(); x = *fk_slot(base + (src & 31)); fk_syncwarp(); memcpy(&v, &x, sizeof v); return v; }
template <class T> inline T __shfl_xor_sync(unsigned, T v, int m, int w = 32) { return fk_shfl(v, (fk_lane() & 31) ^ m); }
template <class T> inline T __shfl_down_sync(unsigned, T v, int d, int w = 32) { int l = fk_lane() & 31; return fk_shfl(v, l + d < 32 ? l + d : l); }
template <class T> inline T __shfl_up_sync(unsigned, T v, int d, int w = 32) { int l = fk_lane() & 31; return fk_shfl(v, l - d >= 0 ? l - d : l); }
template <class T> inline T __shfl_sync(unsigned, T v, int s, int w = 32) { return fk_shfl(v, s); }
inline unsigned __ballot_sync(unsigned, int p) { int t = fk_lane(), base = t & ~31; *fk_slot(t) = p != 0; fk_syncwarp(); unsigned r = 0; for (int i = 0; i < 32; i++) r |= (unsigned)*fk_slot(base + i) << i; fk_syncwarp(); return r; }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
inline int __float_as_int(float x) { int f; memcpy(&f, &x, 4); return f; }
inline float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
inline unsigned __float_as_uint(float x) { unsigned f; memcpy(&f, &x, 4); return f; }
inline long long __double_as_longlong(double x) { long long f; memcpy(&f, &x, 8); return f; }
inline double __longlong_as_double(long long x) { double f; memcpy(&f, &x, 8); return f; }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
struct __half_raw { unsigned short x; };
struct __half;
inline float fk_h2f(unsigned short h) { return _cvtsh_ss(h); }
inline unsigned short fk_f2h(float f) { return _cvtss_sh(f, 0); }
inline float fk_odd(double d) { float f = (float)d; if ((double)f == d || d != d || f != f || std::isinf(f)) return f; unsigned u = __float_as_uint(f); if (std::fabs((double)f) > std::fabs(d)) u -= 1; return __uint_as_float(u | 1); }
struct __half { unsigned short d;
  __half() = default; __half(const __half_raw& r) : d(r.x) {}
  __half(float f) : d(fk_f2h(f)) {} __half(double f) : d(fk_f2h(fk_odd(f))) {} __half(int f) : d(fk_f2h(f)) {} __half(unsigned f) : d(fk_f2h(f)) {} __half(long long f) : d(fk_f2h(f)) {} __half(unsigned long long f) : d(fk_f2h(f)) {} __half(short f) : d(fk_f2h(f)) {} __half(unsigned short f) : d(fk_f2h(f)) {} __half(long f) : d(fk_f2h(f)) {} __half(unsigned long f) : d(fk_f2h(f)) {}
  operator float() const { return fk_h2f(d); } operator __half_raw() const { return {d}; } };
typedef __half half;
inline unsigned short __half_as_ushort(__half h) { return h.d; }
inline __half __ushort_as_half(unsigned short u) { __half h; h.d = u; return h; }
inline float __half2float(__half h) { return h; }
inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
struct __nv_bfloat16_raw { unsigned short x; };
struct __nv_bfloat16 { unsigned short d;
  static unsigned short f2b(float f) { unsigned u = __float_as_uint(f); if (f != f) return 0x7fff; u += 0x7fff + ((u >> 16) & 1); return u >> 16; }
  __nv_bfloat16() = default; __nv_bfloat16(const __nv_bfloat16_raw& r) : d(r.x) {}
  __nv_bfloat16(float f) : d(f2b(f)) {} __nv_bfloat16(double f) : d(f2b(fk_odd(f))) {} __nv_bfloat16(int f) : d(f2b(f)) {} __nv_bfloat16(unsigned f) : d(f2b(f)) {} __nv_bfloat16(long long f) : d(f2b(f)) {} __nv_bfloat16(unsigned long long f) : d(f2b(f)) {}
  operator float() const { return __uint_as_float((unsigned)d << 16); } operator __nv_bfloat16_raw() const { return {d}; } };
typedef __nv_bfloat16 nv_bfloat16;
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.d; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { __nv_bfloat16 h; h.d = u; return h; }
inline bool __hisnan(__half h) { return (h.d & 0x7fff) > 0x7c00; } inline int __hisinf(__half h) { return (h.d & 0x7fff) == 0x7c00; }
inline bool __hisnan(__nv_bfloat16 h) { return (h.d & 0x7fff) > 0x7f80; } inline int __hisinf(__nv_bfloat16 h) { return (h.d & 0x7fff) == 0x7f80; }
template <class T> inline T fk_add(T* p, T v) { T o = *p; *p = o + v; return o; }
#define FK_AT(T) inline T atomicAdd(T* p, T v) { return fk_add(p, v); } inline T atomicExch(T* p, T v) { T o = *p; *p = v; return o; }
FK_AT(int) FK_AT(unsigned) FK_AT(unsigned long long) FK_AT(float) FK_AT(double)
#define FK_AM(T) inline T atomicMax(T* p, T v) { T o = *p; if (v > o) *p = v; return o; } inline T atomicMin(T* p, T v) { T o = *p; if (v < o) *p = v; return o; } inline T atomicCAS(T* p, T c, T v) { T o = *p; if (o == c) *p = v; return o; } inline T atomicOr(T* p, T v) { T o = *p; *p |= v; return o; } inline T atomicAnd(T* p, T v) { T o = *p; *p &= v; return o; }
FK_AM(int) FK_AM(unsigned) FK_AM(unsigned long long)
inline int min(int a, int b) { return a < b ? a : b; } inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; } inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); } inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); } inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline long min(long a, long b) { return a < b ? a : b; } inline long max(long a, long b) { return a > b ? a : b; }
inline unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; } inline unsigned long max(unsigned long a, unsigned long b) { return a > b ? a : b; }
inline unsigned long min(long a, unsigned long b) { return min((unsigned long)a, b); } inline unsigned long max(long a, unsigned long b) { return max((unsigned long)a, b); }
inline unsigned long min(unsigned long a, long b) { return min(a, (unsigned long)b); } inline unsigned long max(unsigned long a, long b) { return max(a, (unsigned long)b); }
inline long long min(long long a, long long b) { return a < b ? a : b; } inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; } inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline unsigned long long min(long long a, unsigned long long b) { return min((unsigned long long)a, b); } inline unsigned long long max(long long a, unsigned long long b) { return max((unsigned long long)a, b); }
inline unsigned long long min(unsigned long long a, long long b) { return min(a, (unsigned long long)b); } inline unsigned long long max(unsigned long long a, long long b) { return max(a, (unsigned long long)b); }
inline float min(float a, float b) { return fminf(a, b); } inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); } inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); } inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); } inline double max(double a, float b) { return fmax(a, b); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); } inline double rsqrt(double x) { return 1 / ::sqrt(x); } inline float rsqrt(float x) { return 1 / sqrtf(x); }
inline float rcbrtf(float x) { return 1 / cbrtf(x); } inline double rcbrt(double x) { return 1 / ::cbrt(x); }
inline float __expf(float x) { return expf(x); } inline float __logf(float x) { return logf(x); } inline float __fdividef(float a, float b) { return a / b; } inline float __powf(float a, float b) { return powf(a, b); } inline float __sinf(float a) { return sinf(a); } inline float __cosf(float a) { return cosf(a); } inline float __frcp_rn(float a) { return 1 / a; } inline float __fsqrt_rn(float a) { return sqrtf(a); } inline float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
inline int __float2int_rd(float x) { return (int)floorf(x); } inline int __float2int_rn(float x) { return (int)rintf(x); } inline int __float2int_rz(float x) { return (int)x; }
inline unsigned __umulhi(unsigned a, unsigned b) { return ((unsigned long long)a * b) >> 32; }
inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); } inline float normcdff(float x) { return normcdf((double)x); }
inline double fk_ndtri(double p) { if (p <= 0) return -INFINITY; if (p >= 1) return INFINITY; double lo = -40, hi = 40; for (int i = 0; i < 200; i++) { double m = (lo + hi) / 2; (normcdf(m) < p ? lo : hi) = m; } return (lo + hi) / 2; }
inline double normcdfinv(double p) { return fk_ndtri(p); } inline float normcdfinvf(float p) { return fk_ndtri(p); }
inline double erfinv(double x) { return fk_ndtri((x + 1) / 2) * M_SQRT1_2; } inline float erfinvf(float x) { return erfinv((double)x); } inline float erfinv(float x) { return erfinv((double)x); }
inline double erfcinv(double x) { return -fk_ndtri(x / 2) * M_SQRT1_2; } inline float erfcinv(float x) { return erfcinv((double)x); }
inline double erfcx(double x) { return ::exp(x * x) * ::erfc(x); } inline float erfcxf(float x) { return erfcx((double)x); } inline float erfcx(float x) { return erfcx((double)x); }
inline double sinpi(double x) { return ::sin(M_PI * x); } inline double cospi(double x) { return ::cos(M_PI * x); } inline float sinpif(float x) { return sinpi(x); } inline float cospif(float x) { return cospi(x); }
inline double cyl_bessel_i0(double x) { double s = 1, t = 1; for (int k = 1; k < 200; k++) { t *= (x / 2 / k) * (x / 2 / k); s += t; } return s; }
inline double cyl_bessel_i1(double x) { double t = x / 2, s = t; for (int k = 1; k < 200; k++) { t *= (x / 2) * (x / 2) / k / (k + 1); s += t; } return s; }
using std::isnan; using std::isinf; using std::isfinite; using std::signbit; using std::exp; using std::log; using std::pow; using std::sqrt; using std::floor; using std::ceil; using std::fabs; using std::abs; using std::tanh; using std::sin; using std::cos; using std::tan; using std::log1p; using std::expm1; using std::log2; using std::log10; using std::exp2; using std::fmod; using std::rint; using std::trunc; using std::round; using std::erf; using std::erfc; using std::lgamma; using std::tgamma; using std::fmin; using std::fmax; using std::copysign; using std::nextafter; using std::atan2; using std::hypot; using std::sinh; using std::cosh; using std::asin; using std::acos; using std::atan; using std::asinh; using std::acosh; using std::atanh; using std::cbrt; using std::ldexp; using std::frexp; using std::modf; using std::nearbyint; using std::logb; using std::ilogb; using std::remainder;
// exports
template <class F> struct FkL;
template <class... A> struct FkL<void (*)(A...)> {
  static constexpr int n = sizeof...(A);
  struct Call { void (*f)(A...); char** a; };
  template <size_t... I> static void call(Call* c, std::index_sequence<I...>) { c->f(*(std::remove_cv_t<A>*)c->a[I]...); }
  static void body(void* p) { call((Call*)p, std::index_sequence_for<A...>()); }
  static void run(void (*f)(A...), char** a, unsigned* d, size_t sh, int fib) {
    char* dyn = sh ? (char*)aligned_alloc(64, (sh + 63) / 64 * 64) : nullptr; fk_ctx.dyn = dyn; Call c{f, a};
    for (int i = 0; i < 3; i++) { fk_ctx.gdim[i] = d[i]; fk_ctx.bdim[i] = d[3 + i]; }
    for (unsigned z = 0; z < d[2]; z++) for (unsigned y = 0; y < d[1]; y++) for (unsigned x = 0; x < d[0]; x++) { fk_ctx.bid[0] = x; fk_ctx.bid[1] = y; fk_ctx.bid[2] = z; fk_block(body, &c, d, fib); }
    free(dyn); }
  template <class... B> struct Sz { };
};
template <class... A> struct FkSizes { static const size_t v[sizeof...(A) + 1]; };
template <class... A> const size_t FkSizes<A...>::v[sizeof...(A) + 1] = {sizeof(A)..., 0};
template <class F> struct FkS; template <class... A> struct FkS<void (*)(A...)> : FkSizes<A...> {};
// What src/kernels.cpp looks up for a kernel: how to run it, the number of its arguments, and their sizes.
#define FK_EXPORT_POINTER(name, pointer, fib)                                         \
  extern "C" {                                                                        \
  void fkrun_##name(char** a, unsigned* d, size_t sh) {                               \
    FkL<decltype(pointer)>::run(pointer, a, d, sh, fib);                              \
  }                                                                                   \
  int fkn_##name = FkL<decltype(pointer)>::n;                                         \
  const size_t* fksizesp_##name() { return FkS<decltype(pointer)>::v; }               \
  }
#define FK_EXPORT(name, function, fib) FK_EXPORT_POINTER(name, &function, fib)
