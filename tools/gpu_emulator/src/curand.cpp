// cuRAND: the distributions, from a generator of the C++ library; the numbers differ from those of a GPU.
#include <cmath>
#include <random>

#include "emulator.h"

namespace emulator {
namespace {

constexpr int kLengthNotMultiple = 105;

struct Generator {
  std::mt19937_64 random{0};
  void* stream = nullptr;
};

template <class T, class Draw>
int fill(void* handle, T* target, size_t count, Draw draw) {
  auto generator = (Generator*)handle;
  enqueue(stream_of(generator->stream), [=]() mutable {
    for (size_t i = 0; i < count; i++) target[i] = (T)draw(generator->random);
  });
  return kSuccess;
}

// Numbers above 0, up to 1 inclusive, as CUDA has them.
template <class T>
int fill_uniform(void* generator, T* target, size_t count) {
  constexpr int bits = sizeof(T) == 4 ? 24 : 53;
  return fill(generator, target, count,
              [](auto& random) { return 1 - std::ldexp((double)(random() >> (64 - bits)), -bits); });
}

template <class T>
int fill_normal(void* generator, T* target, size_t count, T mean, T deviation, bool is_log) {
  if (count % 2) return kLengthNotMultiple;
  std::normal_distribution<double> normal(mean, deviation);
  return fill(generator, target, count, [=](auto& random) mutable {
    const double drawn = normal(random);
    return is_log ? std::exp(drawn) : drawn;
  });
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

int curandCreateGenerator(void** generator, int) {
  *generator = new Generator;
  return kSuccess;
}
int curandDestroyGenerator(void*) { return kSuccess; }  // operations may still need it
int curandGetVersion(int* version) {
  *version = 10310;
  return kSuccess;
}
int curandSetStream(void* generator, void* stream) {
  ((Generator*)generator)->stream = stream;
  return kSuccess;
}
int curandSetPseudoRandomGeneratorSeed(void* generator, unsigned long long seed) {
  ((Generator*)generator)->random.seed(seed);
  return kSuccess;
}
int curandSetGeneratorOffset(void*, unsigned long long) { return kSuccess; }
int curandSetGeneratorOrdering(void*, int) { return kSuccess; }
int curandGenerate(void* generator, unsigned* target, size_t count) {
  return fill(generator, target, count, [](auto& random) { return (unsigned)random(); });
}
int curandGenerateLongLong(void* generator, unsigned long long* target, size_t count) {
  return fill(generator, target, count, [](auto& random) { return random(); });
}
int curandGenerateUniform(void* generator, float* target, size_t count) {
  return fill_uniform(generator, target, count);
}
int curandGenerateUniformDouble(void* generator, double* target, size_t count) {
  return fill_uniform(generator, target, count);
}
int curandGenerateNormal(void* generator, float* target, size_t count, float mean, float deviation) {
  return fill_normal(generator, target, count, mean, deviation, false);
}
int curandGenerateNormalDouble(void* generator, double* target, size_t count, double mean, double deviation) {
  return fill_normal(generator, target, count, mean, deviation, false);
}
int curandGenerateLogNormal(void* generator, float* target, size_t count, float mean, float deviation) {
  return fill_normal(generator, target, count, mean, deviation, true);
}
int curandGenerateLogNormalDouble(void* generator, double* target, size_t count, double mean, double deviation) {
  return fill_normal(generator, target, count, mean, deviation, true);
}
int curandGeneratePoisson(void* generator, unsigned* target, size_t count, double mean) {
  std::poisson_distribution<unsigned> poisson(mean);
  return fill(generator, target, count, [=](auto& random) mutable { return poisson(random); });
}
}
