// Mistakes of the program: reported on standard error, kept for the tests, and shown with the line of Python.
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "emulator.h"

namespace emulator {
namespace {

std::mutex& mutex = *new std::mutex;
std::string& found = *new std::string;
// Given by Python: writes the innermost line outside CuPy, or all lines, of the calling thread into the buffer.
using Locate = void (*)(char* buffer, int size, int whole);
Locate locate = nullptr;

std::string python_stack(bool whole) {
  if (!locate) return "";
  char buffer[4096] = "";
  locate(buffer, sizeof buffer, whole);
  return buffer;
}

}  // namespace

int setting(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}

std::string python_line() { return python_stack(false); }

void fault(const std::string& what) {
  static const bool stop = setting("GPU_EMULATOR_STRICT", 0);
  const std::string text = what + "\n" + python_stack(true);
  {
    std::lock_guard<std::mutex> lock(mutex);
    found += text;
  }
  fprintf(stderr, "GPU emulator: %s", text.c_str());
  fflush(stderr);
  if (stop) abort();
}

int unsupported(const char* name, int status) {
  fault(std::string(name) + " is not emulated");
  return status;
}

}  // namespace emulator

extern "C" {

void gpu_emulator_locate_by(emulator::Locate function) { emulator::locate = function; }

// Moves the faults found so far into the buffer; returns how many bytes there are.
int gpu_emulator_take_faults(char* buffer, int size) {
  std::lock_guard<std::mutex> lock(emulator::mutex);
  const int length = snprintf(buffer, size, "%s", emulator::found.c_str());
  emulator::found.clear();
  return length;
}
}
