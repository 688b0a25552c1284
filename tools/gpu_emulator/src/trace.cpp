// What the program asks the devices to do, in order: for tests that count copies, launches and waits.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "emulator.h"

namespace emulator {
namespace {

std::mutex& mutex = *new std::mutex;
std::string& recorded = *new std::string;
std::atomic<bool> recording{false};

}  // namespace

void trace(const char* kind, const std::string& name, size_t bytes, const Stream* stream) {
  if (!recording) return;
  char line[512];
  snprintf(line, sizeof line, "%s\t%.256s\t%zu\t%d\t%zu\t%d\n", kind, name.c_str(), bytes, (int)gettid(),
           stream ? (size_t)handle_of(stream) : 0, stream ? device_of(stream) : current_device());
  std::lock_guard<std::mutex> lock(mutex);
  recorded += line;
}

}  // namespace emulator

extern "C" {

void gpu_emulator_record(int on) {
  std::lock_guard<std::mutex> lock(emulator::mutex);
  emulator::recorded.clear();
  emulator::recording = on;
}

// Returns the length of what was recorded so far, and copies it into the buffer if that is long enough.
size_t gpu_emulator_recorded(char* buffer, size_t size) {
  std::lock_guard<std::mutex> lock(emulator::mutex);
  const size_t length = emulator::recorded.size();
  if (length < size) memcpy(buffer, emulator::recorded.c_str(), length + 1);
  return length;
}
}
