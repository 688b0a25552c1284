// Streams and events. Each stream is a thread that executes its operations in order, each after a random delay, so that
// an operation that does not wait for another one is soon seen to come too early.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "emulator.h"

namespace emulator {

using Dependency = std::pair<Stream*, Ticket>;

struct Operation {
  std::function<void()> run;
  std::vector<Dependency> dependencies;
};

struct Stream {
  int device;
  bool blocking;  // it waits for the null stream, and the null stream for it
  bool is_null;
  unsigned flags;
  unsigned number;
  std::deque<Operation> queue;
  Ticket enqueued = 0, done = 0;
  std::vector<Dependency> waiting;  // for the next operation
  bool started = false, destroyed = false;
  // Its own: with a common one, every operation would wake the threads of all streams.
  std::condition_variable_any has_more{}, has_ended{};
};

struct Event {
  int device;
  Stream* stream = nullptr;
  Ticket ticket = 0;
  std::chrono::steady_clock::time_point time;
};

namespace {

// Never destroyed: threads use them until the process ends.
std::recursive_mutex& mutex = *new std::recursive_mutex;
std::map<int, Stream*>& null_streams = *new std::map<int, Stream*>;
std::vector<Stream*>& streams = *new std::vector<Stream*>;
using Lock = std::unique_lock<std::recursive_mutex>;

Stream* make(bool blocking, bool is_null, unsigned flags) {
  Lock lock(mutex);
  static unsigned count = 0;
  auto made = new Stream{current_device(), blocking, is_null, flags, count++};
  streams.push_back(made);
  return made;
}

void delay(const Stream* stream, bool was_idle, std::mt19937& random) {
  static const int most_of_all = 2 * setting("GPU_EMULATOR_DELAY_US", 100);
  // Other streams, and the host, have much to do until then. In a sequence, it would only take time.
  static const int most_of_first = 2 * setting("GPU_EMULATOR_IDLE_US", 1500);
  const int most = was_idle ? most_of_first : most_of_all;
  static const int of_null = setting("GPU_EMULATOR_NULL_US", 0), of_side = setting("GPU_EMULATOR_SIDE_US", 0);
  const int fixed = stream->is_null ? of_null : stream->blocking ? 0 : of_side;
  // Usually none: what is late must be late by more than the others take.
  const int added = most && random() % 4 == 0 ? random() % most : 0;
  if (fixed + added) std::this_thread::sleep_for(std::chrono::microseconds(fixed + added));
}

bool is_destroyed(const Stream* stream) {
  Lock lock(mutex);
  return stream->destroyed;
}

void forget(Stream* stream) { streams.erase(std::find(streams.begin(), streams.end(), stream)); }

void wait_until(Lock& lock, Stream* stream, Ticket ticket) {
  stream->has_ended.wait(lock, [=] { return stream->done >= ticket; });
}

void work(Stream* stream) {
  set_current_device(stream->device);
  std::mt19937 random(setting("GPU_EMULATOR_SEED", 1) + 1000 * stream->number);
  Lock lock(mutex);
  for (;;) {
    const bool was_idle = stream->queue.empty();
    stream->has_more.wait(lock, [=] { return !stream->queue.empty() || stream->destroyed; });
    if (stream->queue.empty()) return forget(stream);
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    for (auto& [other, ticket] : operation.dependencies) wait_until(lock, other, ticket);
    lock.unlock();
    delay(stream, was_idle, random);
    operation.run();
    operation.run = nullptr;
    lock.lock();
    stream->done++;
    stream->has_ended.notify_all();
  }
}

// The streams of a device that the null stream waits for.
std::vector<Dependency> blocking_streams(const Stream* null) {
  std::vector<Dependency> found;
  for (auto other : streams)
    if (other != null && other->device == null->device && other->blocking) found.push_back({other, other->enqueued});
  return found;
}

void wait_for_all(const std::vector<Dependency>& dependencies) {
  for (auto& [stream, ticket] : dependencies) wait_for(stream, ticket);
}

}  // namespace

Stream* stream_of(void* handle) {
  Lock lock(mutex);
  const auto number = (uintptr_t)handle;
  if (number <= 1) {  // the null stream
    auto& found = null_streams[current_device()];
    if (!found) found = make(true, true, 0);
    return found;
  }
  if (number == 2) {  // the null stream of each thread
    static thread_local std::map<int, Stream*> mine;
    auto& found = mine[current_device()];
    if (!found) found = make(true, false, 0);
    return found;
  }
  return (Stream*)handle;
}

int device_of(const Stream* stream) { return stream->device; }
void* handle_of(const Stream* stream) { return stream->is_null ? nullptr : (void*)stream; }

Ticket enqueue(Stream* stream, std::function<void()> operation) {
  static const bool at_once = setting("GPU_EMULATOR_SYNC", 0);
  if (is_destroyed(stream)) fault("a stream is used after it was destroyed");
  Lock lock(mutex);
  std::vector<Dependency> dependencies = std::exchange(stream->waiting, {});
  if (stream->is_null) {
    for (auto& each : blocking_streams(stream)) dependencies.push_back(each);
  } else if (auto null = null_streams.find(stream->device); stream->blocking && null != null_streams.end()) {
    dependencies.push_back({null->second, null->second->enqueued});
  }
  const Ticket ticket = ++stream->enqueued;
  if (at_once) {
    lock.unlock();
    const int before = current_device();
    set_current_device(stream->device);
    operation();
    set_current_device(before);
    lock.lock();
    stream->done = ticket;
    stream->has_ended.notify_all();
  } else {
    stream->queue.push_back({std::move(operation), std::move(dependencies)});
    if (!std::exchange(stream->started, true)) std::thread(work, stream).detach();
    stream->has_more.notify_one();
  }
  return ticket;
}

void let_wait(Stream* stream, Stream* other, Ticket ticket) {
  Lock lock(mutex);
  stream->waiting.push_back({other, ticket});
}

void wait_for(Stream* stream, Ticket ticket) {
  Lock lock(mutex);
  wait_until(lock, stream, ticket);
}

void synchronize(Stream* stream) {
  std::vector<Dependency> dependencies;
  {
    Lock lock(mutex);
    dependencies = stream->waiting;
    dependencies.push_back({stream, stream->enqueued});
    if (stream->is_null)
      for (auto& each : blocking_streams(stream)) dependencies.push_back(each);
  }
  wait_for_all(dependencies);
}

void synchronize_device(int device) {
  std::vector<Dependency> dependencies;
  {
    Lock lock(mutex);
    for (auto each : streams)
      if (each->device == device) dependencies.push_back({each, each->enqueued});
  }
  wait_for_all(dependencies);
}

void synchronize_all() {
  for (int device = 0; device < devices(); device++) synchronize_device(device);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

int cudaStreamCreateWithPriority(void** stream, unsigned flags, int) {
  *stream = make(!(flags & 1), false, flags);
  return kSuccess;
}
int cudaStreamCreateWithFlags(void** stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
int cudaStreamCreate(void** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
int cudaStreamGetFlags(void* stream, unsigned* flags) {
  *flags = stream_of(stream)->flags;
  return kSuccess;
}
int cudaStreamGetPriority(void*, int* priority) {
  *priority = 0;
  return kSuccess;
}
// Its thread ends after the operations that are still in the queue. Others may wait for these, so it is not freed.
int cudaStreamDestroy(void* handle) {
  Lock lock(mutex);
  auto stream = (Stream*)handle;
  stream->destroyed = true;
  if (stream->started) stream->has_more.notify_one();
  else forget(stream);
  return kSuccess;
}
int cudaStreamSynchronize(void* stream) {
  trace("wait", "for a stream", 0, stream_of(stream));
  synchronize(stream_of(stream));
  return kSuccess;
}
int cudaStreamQuery(void* stream) {
  Lock lock(mutex);
  auto found = stream_of(stream);
  return found->done >= found->enqueued ? kSuccess : kNotReady;
}
int cudaStreamAddCallback(void* stream, void (*callback)(void*, int, void*), void* argument, unsigned) {
  enqueue(stream_of(stream), [=] { callback(stream, kSuccess, argument); });
  return kSuccess;
}
int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  enqueue(stream_of(stream), [=] { function(argument); });
  return kSuccess;
}
int cudaStreamIsCapturing(void*, int* is_capturing) {
  *is_capturing = 0;
  return kSuccess;
}
int cuStreamGetCtx(void* stream, void** context) {
  *context = (void*)(uintptr_t)(stream_of(stream)->device + 1);
  return kSuccess;
}

int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = new Event{current_device()};
  return kSuccess;
}
int cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }
// Not freed: streams may still have to record it.
int cudaEventDestroy(void*) { return kSuccess; }
int cudaEventRecord(void* handle, void* stream_handle) {
  Lock lock(mutex);
  auto event = (Event*)handle;
  auto stream = stream_of(stream_handle);
  if (event->device != stream->device) {
    fault("an event of device " + std::to_string(event->device) + " is recorded on a stream of device " +
          std::to_string(stream->device));
    return kInvalidHandle;
  }
  event->stream = stream;
  event->ticket = enqueue(stream, [=] { event->time = std::chrono::steady_clock::now(); });
  return kSuccess;
}
int cudaEventQuery(void* handle) {
  Lock lock(mutex);
  auto event = (Event*)handle;
  return !event->stream || event->stream->done >= event->ticket ? kSuccess : kNotReady;
}
int cudaEventSynchronize(void* handle) {
  auto event = (Event*)handle;
  trace("wait", "for an event", 0, event->stream);
  if (event->stream) wait_for(event->stream, event->ticket);
  return kSuccess;
}
int cudaEventElapsedTime(float* milliseconds, void* from, void* to) {
  *milliseconds = std::chrono::duration<float, std::milli>(((Event*)to)->time - ((Event*)from)->time).count();
  return kSuccess;
}
int cudaStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  Lock lock(mutex);
  auto event = (Event*)event_handle;
  if (!event->stream) return kSuccess;  // never recorded
  auto stream = stream_of(handle);
  trace("wait_event", "", 0, stream);
  stream->waiting.push_back({event->stream, event->ticket});
  enqueue(stream, [] {});
  return kSuccess;
}

// For the tests of the emulator, and for other libraries that put operations on streams.
void gpu_emulator_enqueue(void* stream, void (*function)(void*), void* argument) {
  enqueue(stream_of(stream), [=] { function(argument); });
}
}
