// cuFFT, by the plain sum: transforms are short in tests.
#include <cmath>
#include <complex>
#include <map>
#include <mutex>
#include <type_traits>
#include <vector>

#include "emulator.h"

namespace emulator {
namespace {

enum TransformKind { R2C = 0x2a, C2R = 0x2c, C2C = 0x29, D2Z = 0x6a, Z2D = 0x6c, Z2Z = 0x69 };

struct Layout {
  std::vector<long long> embed;
  long long stride = 1, distance = 0;

  // The place of one element of one transform.
  long long at(const std::vector<int>& index, int batch) const {
    long long place = 0;
    for (size_t axis = 0; axis < index.size(); axis++) place = place * embed[axis] + index[axis];
    return batch * distance + place * stride;
  }
};

struct Plan {
  std::vector<int> sizes;
  Layout in, out;
  int kind = C2C, count = 1;
  void* stream = nullptr;
};

std::map<int, Plan> plans;
std::mutex lock;

typedef std::complex<double> Number;

// Transform along one axis of a packed array.
void along(std::vector<Number>& data, const std::vector<int>& sizes, size_t axis, int direction) {
  long long n = sizes[axis], inner = 1;
  for (size_t i = axis + 1; i < sizes.size(); i++) inner *= sizes[i];
  std::vector<Number> roots(n), line(n);
  for (long long i = 0; i < n; i++) roots[i] = std::polar(1.0, direction * 2 * M_PI * i / n);
  for (long long start = 0; start < (long long)data.size(); start++) {
    if (start / inner % n) continue;
    for (long long k = 0; k < n; k++) {
      line[k] = 0;
      for (long long j = 0; j < n; j++) line[k] += data[start + j * inner] * roots[j * k % n];
    }
    for (long long k = 0; k < n; k++) data[start + k * inner] = line[k];
  }
}

// The index of each element of a packed array.
std::vector<int> index_of(long long place, const std::vector<int>& sizes) {
  std::vector<int> index(sizes.size());
  for (size_t axis = sizes.size(); axis-- > 0; place /= sizes[axis]) index[axis] = place % sizes[axis];
  return index;
}

template <class In, class Out>
void transform(const Plan& plan, const In* input, Out* output, int direction, bool from_half, bool to_half) {
  long long total = 1;
  for (int size : plan.sizes) total *= size;
  int last = plan.sizes.back() / 2 + 1;
  for (int batch = 0; batch < plan.count; batch++) {
    std::vector<Number> data(total);
    for (long long i = 0; i < total; i++) {
      auto index = index_of(i, plan.sizes);
      bool mirrored = from_half && index.back() >= last;
      for (size_t axis = 0; mirrored && axis < index.size(); axis++)
        index[axis] = (plan.sizes[axis] - index[axis]) % plan.sizes[axis];
      Number value = Number(input[plan.in.at(index, batch)]);
      data[i] = mirrored ? std::conj(value) : value;
    }
    for (size_t axis = 0; axis < plan.sizes.size(); axis++) along(data, plan.sizes, axis, direction);
    for (long long i = 0; i < total; i++) {
      auto index = index_of(i, plan.sizes);
      if (to_half && index.back() >= last) continue;
      if constexpr (std::is_arithmetic_v<Out>) output[plan.out.at(index, batch)] = (Out)data[i].real();
      else output[plan.out.at(index, batch)] = Out(data[i]);
    }
  }
}

Plan& plan_of(int number) {
  std::lock_guard<std::mutex> guard(lock);
  return plans[number];
}

template <class In, class Out>
int execute(int number, const In* input, Out* output, int direction, bool from_half = false, bool to_half = false) {
  Plan plan = plan_of(number);
  enqueue(stream_of(plan.stream), [=] { transform(plan, input, output, direction, from_half, to_half); });
  return kSuccess;
}

Layout layout(const std::vector<int>& sizes, const int* embed, int stride, int distance, bool half) {
  Layout made;
  made.embed.assign(sizes.begin(), sizes.end());
  if (embed) made.embed.assign(embed, embed + sizes.size());
  else if (half) made.embed.back() = sizes.back() / 2 + 1;
  long long total = 1;
  for (auto size : made.embed) total *= size;
  made.stride = embed ? stride : 1;
  made.distance = embed ? distance : total;
  return made;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

int cufftGetVersion(int* version) { *version = 11400; return kSuccess; }
int cufftCreate(int* number) {
  static int next = 0;
  std::lock_guard<std::mutex> guard(lock);
  plans[*number = ++next] = Plan();
  return kSuccess;
}
int cufftDestroy(int number) { std::lock_guard<std::mutex> guard(lock); plans.erase(number); return kSuccess; }
int cufftSetStream(int number, void* stream) { plan_of(number).stream = stream; return kSuccess; }
int cufftSetAutoAllocation(int, int) { return kSuccess; }
int cufftSetWorkArea(int, void*) { return kSuccess; }
int cufftMakePlanMany(int number, int rank, int* sizes, int* inembed, int istride, int idist, int* onembed, int ostride,
                      int odist, int kind, int count, size_t* work) {
  Plan& plan = plan_of(number);
  plan.sizes.assign(sizes, sizes + rank);
  plan.in = layout(plan.sizes, inembed, istride, idist, kind == C2R || kind == Z2D);
  plan.out = layout(plan.sizes, onembed, ostride, odist, kind == R2C || kind == D2Z);
  plan.kind = kind;
  plan.count = count;
  *work = 1;
  return kSuccess;
}
int cufftMakePlan1d(int number, int size, int kind, int count, size_t* work) {
  return cufftMakePlanMany(number, 1, &size, nullptr, 1, 0, nullptr, 1, 0, kind, count, work);
}

#define EXECUTE_COMPLEX(name, T)                                                                 \
  int cufftExec##name(int number, std::complex<T>* in, std::complex<T>* out, int direction) { \
    return execute(number, in, out, direction);                                                  \
  }
#define EXECUTE_REAL(forward, back, T)                                    \
  int cufftExec##forward(int number, T* in, std::complex<T>* out) {       \
    return execute(number, in, out, -1, false, true);                     \
  }                                                                       \
  int cufftExec##back(int number, std::complex<T>* in, T* out) {          \
    return execute(number, in, out, 1, true);                             \
  }
EXECUTE_COMPLEX(C2C, float)
EXECUTE_COMPLEX(Z2Z, double)
EXECUTE_REAL(R2C, C2R, float)
EXECUTE_REAL(D2Z, Z2D, double)

}  // extern "C"
