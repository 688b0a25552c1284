// What the parts of the emulator share: devices, memory, streams, and the faults that they find.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace emulator {

// The numbers of CUDA's errors that are returned.
enum Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotSupported = 801,
};

// A setting: an integer in an environment variable.
int setting(const char* name, int otherwise);

// faults.cpp: a mistake of the program. It is kept, with the line of Python that made it, for the tests to fail on.
void fault(const std::string& what);
// The line of Python that the calling thread is in; empty if Python has not registered itself.
std::string python_line();
// Says that a function exists only by name.
int unsupported(const char* name, int status);

// trace.cpp: an operation, with its kind: kernel, copy, nccl, wait_event, or wait if the host waits for the device.
struct Stream;
void trace(const char* kind, const std::string& name, size_t bytes, const Stream* stream);

// device.cpp: the current device of the calling thread.
int current_device();
void set_current_device(int device);
int devices();

// streams.cpp
using Ticket = uint64_t;
// The stream that a handle means on the current device; 0 is the null stream.
Stream* stream_of(void* handle);
int device_of(const Stream* stream);
// The handle of a stream; 0 for a null stream.
void* handle_of(const Stream* stream);
Ticket enqueue(Stream* stream, std::function<void()> operation);
void wait_for(Stream* stream, Ticket ticket);
// Lets the next operation of a stream wait for an operation of another one.
void let_wait(Stream* stream, Stream* other, Ticket ticket);
void synchronize(Stream* stream);
void synchronize_device(int device);
void synchronize_all();

// memory.cpp
enum class Kind { kPinned = 1, kDevice = 2, kManaged = 3, kRegistered = 4 };
struct Allocation {
  char* begin;
  size_t size;
  int device;
  Kind kind;
  bool on_device() const { return kind == Kind::kDevice || kind == Kind::kManaged; }
};
// The allocation, if any, that holds this address.
std::optional<Allocation> find(const void* address);
bool is_freed(const void* address);
// False, and a fault, if a range leaves its allocation or has been freed.
bool check_range(const void* begin, size_t size, const std::string& what);

}  // namespace emulator
