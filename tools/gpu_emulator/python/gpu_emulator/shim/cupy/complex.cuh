// CuPy's complex numbers, on the host: std::complex, with operators that take numbers of two types, as Thrust's do.
#pragma once
#include <complex>
#include <type_traits>

template <class T>
struct complex : std::complex<T> {
  typedef T value_type;
  complex(T real = T(), T imaginary = T()) : std::complex<T>(real, imaginary) {}
  complex(const std::complex<T>& other) : std::complex<T>(other) {}
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>
  complex(const std::complex<U>& other) : std::complex<T>((T)other.real(), (T)other.imag()) {}
  // float16 and bfloat16 are classes that convert to float.
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U> && std::is_convertible_v<U, float>>, class = void>
  complex(U real) : std::complex<T>((T)real, T()) {}
};

namespace complex_numbers {
template <class T, class U>
using wider = std::conditional_t<(sizeof(T) >= sizeof(U)), T, U>;
template <class U>
inline constexpr bool is_number = std::is_convertible_v<U, float>;
}  // namespace complex_numbers

#define COMPLEX_OPERATOR(op)                                                                                    \
  template <class T, class U>                                                                                   \
  auto operator op(const complex<T>& a, const complex<U>& b) {                                                  \
    typedef complex_numbers::wider<T, U> W;                                                                     \
    return complex<W>(std::complex<W>(a.real(), a.imag()) op std::complex<W>(b.real(), b.imag()));              \
  }                                                                                                             \
  template <class T, class U, class = std::enable_if_t<complex_numbers::is_number<U>>>                          \
  complex<T> operator op(const complex<T>& a, const U& b) { return a op complex<T>((T)b); }                     \
  template <class T, class U, class = std::enable_if_t<complex_numbers::is_number<U>>, class = void>            \
  complex<T> operator op(const U& a, const complex<T>& b) { return complex<T>((T)a) op b; }
COMPLEX_OPERATOR(+)
COMPLEX_OPERATOR(-)
COMPLEX_OPERATOR(*)
COMPLEX_OPERATOR(/)
#undef COMPLEX_OPERATOR

#define COMPLEX_COMPARISON(op, expression)                                                                      \
  template <class T, class U>                                                                                   \
  bool operator op(const complex<T>& a, const complex<U>& b) { return expression; }                             \
  template <class T, class U, class = std::enable_if_t<complex_numbers::is_number<U>>>                          \
  bool operator op(const complex<T>& a, const U& b) { return a op complex<T>((T)b); }                           \
  template <class T, class U, class = std::enable_if_t<complex_numbers::is_number<U>>, class = void>            \
  bool operator op(const U& a, const complex<T>& b) { return complex<T>((T)a) op b; }
COMPLEX_COMPARISON(==, a.real() == b.real() && a.imag() == b.imag())
COMPLEX_COMPARISON(!=, !(a == b))
COMPLEX_COMPARISON(<, a.real() < b.real() || (a.real() == b.real() && a.imag() < b.imag()))
COMPLEX_COMPARISON(>, b < a)
COMPLEX_COMPARISON(<=, !(b < a))
COMPLEX_COMPARISON(>=, !(a < b))
#undef COMPLEX_COMPARISON

template <class T> complex<T> operator-(const complex<T>& a) { return complex<T>(-a.real(), -a.imag()); }
template <class T> complex<T> operator+(const complex<T>& a) { return a; }

#define COMPLEX_FUNCTION(name) \
  template <class T> complex<T> name(const complex<T>& a) { return std::name(static_cast<const std::complex<T>&>(a)); }
COMPLEX_FUNCTION(exp) COMPLEX_FUNCTION(log) COMPLEX_FUNCTION(log10) COMPLEX_FUNCTION(sqrt) COMPLEX_FUNCTION(conj)
COMPLEX_FUNCTION(sin) COMPLEX_FUNCTION(cos) COMPLEX_FUNCTION(tan) COMPLEX_FUNCTION(sinh) COMPLEX_FUNCTION(cosh)
COMPLEX_FUNCTION(tanh) COMPLEX_FUNCTION(asin) COMPLEX_FUNCTION(acos) COMPLEX_FUNCTION(atan) COMPLEX_FUNCTION(asinh)
COMPLEX_FUNCTION(acosh) COMPLEX_FUNCTION(atanh) COMPLEX_FUNCTION(proj)
#undef COMPLEX_FUNCTION
#define COMPLEX_PART(name) \
  template <class T> T name(const complex<T>& a) { return std::name(static_cast<const std::complex<T>&>(a)); }
COMPLEX_PART(abs) COMPLEX_PART(arg) COMPLEX_PART(norm) COMPLEX_PART(real) COMPLEX_PART(imag)
#undef COMPLEX_PART
template <class T> complex<T> pow(const complex<T>& a, const complex<T>& b) {
  return std::pow(static_cast<const std::complex<T>&>(a), static_cast<const std::complex<T>&>(b));
}
template <class T> complex<T> pow(const complex<T>& a, const T& b) { return pow(a, complex<T>(b)); }
template <class T> complex<T> polar(const T& length, const T& angle) { return std::polar(length, angle); }
template <class T> bool isnan(const complex<T>& a) { return std::isnan(a.real()) || std::isnan(a.imag()); }
template <class T> bool isinf(const complex<T>& a) { return std::isinf(a.real()) || std::isinf(a.imag()); }
template <class T> bool isfinite(const complex<T>& a) { return std::isfinite(a.real()) && std::isfinite(a.imag()); }
inline float norm(float a) { return a * a; }
inline double norm(double a) { return a * a; }

namespace thrust {
using ::complex; using ::norm; using ::conj; using ::abs; using ::arg; using ::exp; using ::log; using ::sqrt; using ::pow; using ::polar;
}
