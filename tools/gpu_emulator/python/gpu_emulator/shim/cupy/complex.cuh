// Complex numbers, in place of CuPy's own, which need more of NVIDIA's headers.
#pragma once
template <class T> struct complex { T re, im; complex(T a = 0, T b = 0) : re(a), im(b) {} T real() const { return re; } T imag() const { return im; }
  complex& operator+=(complex o) { re += o.re; im += o.im; return *this; } complex& operator-=(complex o) { re -= o.re; im -= o.im; return *this; } };
template <class T> complex<T> operator+(complex<T> a, complex<T> b) { return {a.re + b.re, a.im + b.im}; }
template <class T> complex<T> operator-(complex<T> a, complex<T> b) { return {a.re - b.re, a.im - b.im}; }
template <class T> complex<T> operator*(complex<T> a, complex<T> b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
template <class T> complex<T> conj(complex<T> a) { return {a.re, -a.im}; }
template <class T> T real(complex<T> a) { return a.re; } template <class T> T imag(complex<T> a) { return a.im; }
template <class T> T norm(complex<T> a) { return a.re * a.re + a.im * a.im; }
template <class T> T abs(complex<T> a) { return std::sqrt(norm(a)); }
inline float norm(float x) { return x * x; } inline double norm(double x) { return x * x; }
template <class T> complex<T> operator/(complex<T> a, complex<T> b) { T n = norm(b); auto c = a * conj(b); return {c.re / n, c.im / n}; }
template <class T> bool operator==(complex<T> a, complex<T> b) { return a.re == b.re && a.im == b.im; }
template <class T> bool operator!=(complex<T> a, complex<T> b) { return !(a == b); }
namespace thrust { using ::complex; using ::norm; using ::conj; }
