// Memory of devices, which is memory of the host, pinned memory, and copies.
//
// New memory holds no plausible numbers (0xFF in each byte is not a number), and memory that was freed or is about to be
// overwritten by a copy is filled with others, so that reading it too early or too late shows. Pinned memory from which
// a copy will read must still hold the same bytes when the copy starts.
#include <driver_types.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>

#include "emulator.h"

namespace emulator {
namespace {

constexpr size_t kAlignment = 512;
constexpr int kFresh = 0xFF, kOverdue = 0xFB, kFreed = 0xFE;
constexpr size_t kMostKept = 64 << 20;  // bytes of freed memory that are not given back yet, to recognize their use

std::recursive_mutex& mutex = *new std::recursive_mutex;
using Lock = std::unique_lock<std::recursive_mutex>;
std::map<const char*, Allocation>& live = *new std::map<const char*, Allocation>;
std::map<const char*, Allocation>& freed = *new std::map<const char*, Allocation>;
std::deque<char*>& freed_in_order = *new std::deque<char*>;
size_t kept = 0;

// Copies from or to pinned memory that have not ended.
struct Pending {
  char* begin;
  size_t size;
  bool writes;
};
std::list<Pending>& pending = *new std::list<Pending>;

std::optional<Allocation> look_up(const std::map<const char*, Allocation>& where, const void* address) {
  Lock lock(mutex);
  auto next = where.upper_bound((const char*)address);
  if (next == where.begin()) return std::nullopt;
  const Allocation& found = std::prev(next)->second;
  if ((const char*)address >= found.begin + std::max<size_t>(found.size, 1)) return std::nullopt;
  return found;
}

int allocate(void** address, size_t size, Kind kind) {
  const size_t rounded = std::max(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
  auto begin = (char*)aligned_alloc(kAlignment, rounded);
  memset(begin, kFresh, rounded);
  Lock lock(mutex);
  live[begin] = {begin, size, current_device(), kind};
  *address = begin;
  return kSuccess;
}

int release(void* address) {
  if (!address) return kSuccess;
  Lock lock(mutex);
  auto found = live.find((char*)address);
  if (found == live.end()) {
    fault(is_freed(address) ? "memory is freed twice" : "memory is freed that was not allocated");
    return kInvalidValue;
  }
  const Allocation allocation = found->second;
  live.erase(found);
  memset(allocation.begin, kFreed, allocation.size);
  freed[allocation.begin] = allocation;
  freed_in_order.push_back(allocation.begin);
  kept += allocation.size;
  while (kept > kMostKept) {
    char* oldest = freed_in_order.front();
    freed_in_order.pop_front();
    kept -= freed[oldest].size;
    freed.erase(oldest);
    free(oldest);
  }
  return kSuccess;
}

bool overlaps(const Pending& copy, const void* begin, size_t size) {
  return copy.begin < (const char*)begin + size && (const char*)begin < copy.begin + copy.size;
}

bool has_pending(const void* begin, size_t size) {
  Lock lock(mutex);
  return std::any_of(pending.begin(), pending.end(), [&](auto& copy) { return overlaps(copy, begin, size); });
}

std::list<Pending>::iterator begin_pending(const void* begin, size_t size, bool writes) {
  Lock lock(mutex);
  return pending.insert(pending.end(), {(char*)begin, size, writes});
}

void end_pending(std::list<Pending>::iterator copy) {
  Lock lock(mutex);
  pending.erase(copy);
}

// Memory that the host gives back, although a copy still needs it.
void check_not_pending(const Allocation& allocation, const std::string& how) {
  if (has_pending(allocation.begin, allocation.size)) fault(how + " before a copy of it has ended");
}

uint64_t checksum(const void* begin, size_t size) {
  uint64_t sum = 14695981039346656037u;
  auto bytes = (const unsigned char*)begin;
  size_t at = 0;
  for (; at + 8 <= size; at += 8) {
    uint64_t word;
    memcpy(&word, bytes + at, 8);
    sum = (sum ^ word) * 1099511628211u;
  }
  for (; at < size; at++) sum = (sum ^ bytes[at]) * 1099511628211u;
  return sum;
}

bool is_pinned(const std::optional<Allocation>& found) {
  return found && (found->kind == Kind::kPinned || found->kind == Kind::kRegistered);
}

// A range of host memory must be pinned as a whole or not at all.
bool check_pinned_range(const void* begin, size_t size) {
  Lock lock(mutex);
  auto first = live.upper_bound((const char*)begin);
  if (first != live.begin()) --first;
  for (auto each = first; each != live.end() && each->first < (const char*)begin + size; ++each) {
    const Allocation& other = each->second;
    const bool outside = other.begin + other.size <= (const char*)begin;
    const bool holds = other.begin <= (const char*)begin && (const char*)begin + size <= other.begin + other.size;
    if (!outside && !holds) {
      fault("a copy of " + std::to_string(size) + " bytes leaves its allocation or its pinned memory of " +
            std::to_string(other.size) + " bytes");
      return false;
    }
  }
  return true;
}

int copy_from_host(char* to, const char* from, size_t size, Stream* stream, bool pinned) {
  trace("copy", "to device", size, stream);
  if (!pinned) {  // CUDA copies it to memory of its own before it returns
    auto staged = std::make_shared<std::vector<char>>(from, from + size);
    enqueue(stream, [=] { memcpy(to, staged->data(), size); });
    return kSuccess;
  }
  const bool is_written = has_pending(from, size);  // by an earlier copy: then the bytes will still change
  const uint64_t expected = checksum(from, size);
  const std::string line = python_line();
  auto copy = begin_pending(from, size, false);
  enqueue(stream, [=] {
    if (!is_written && checksum(from, size) != expected)
      fault("pinned memory was overwritten before a copy from it had started; the copy: " + line);
    memcpy(to, from, size);
    end_pending(copy);
  });
  return kSuccess;
}

int copy_to_host(char* to, const char* from, size_t size, Stream* stream, bool pinned) {
  trace("copy", "to host", size, stream);
  if (!pinned) {
    trace("wait", "for a copy", 0, stream);
    wait_for(stream, enqueue(stream, [=] { memcpy(to, from, size); }));
    return kSuccess;
  }
  if (!has_pending(to, size)) memset(to, kOverdue, size);
  auto copy = begin_pending(to, size, true);
  enqueue(stream, [=] {
    memcpy(to, from, size);
    end_pending(copy);
  });
  return kSuccess;
}

// A copy between two devices in the null stream waits for both, and both wait for it.
int copy_between(char* to, const char* from, size_t size, Stream* stream, bool in_null_stream, int other) {
  if (in_null_stream) {
    synchronize_device(other);
    synchronize_device(device_of(stream));
  }
  const Ticket ticket = enqueue(stream, [=] { memmove(to, from, size); });
  if (in_null_stream) wait_for(stream, ticket);
  return kSuccess;
}

}  // namespace

std::optional<Allocation> find(const void* address) { return look_up(live, address); }
bool is_freed(const void* address) { return !find(address) && look_up(freed, address); }

bool check_range(const void* begin, size_t size, const std::string& what) {
  if (is_freed(begin)) {
    fault(what + ": memory is used after it was freed");
    return false;
  }
  auto found = find(begin);
  if (found && (const char*)begin + size > found->begin + found->size) {
    fault(what + ": " + std::to_string(size) + " bytes leave an allocation, or pinned memory, of " + std::to_string(found->size));
    return false;
  }
  return true;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

int cudaMalloc(void** address, size_t size) { return allocate(address, size, Kind::kDevice); }
int cudaMallocManaged(void** address, size_t size, unsigned) { return allocate(address, size, Kind::kManaged); }
int cudaMallocAsync(void** address, size_t size, void*) { return cudaMalloc(address, size); }
int cudaMallocFromPoolAsync(void** address, size_t size, void*, void*) { return cudaMalloc(address, size); }
int cudaHostAlloc(void** address, size_t size, unsigned) { return allocate(address, size, Kind::kPinned); }
int cudaFree(void* address) {
  synchronize_all();
  return release(address);
}
int cudaFreeAsync(void* address, void* stream) {
  enqueue(stream_of(stream), [=] { release(address); });
  return kSuccess;
}
int cudaFreeHost(void* address) {
  if (auto found = find(address)) check_not_pending(*found, "pinned memory is freed");
  synchronize_all();
  return release(address);
}
int cudaHostRegister(void* address, size_t size, unsigned) {
  Lock lock(mutex);
  auto next = live.lower_bound((char*)address);
  if (find(address) || (next != live.end() && next->first < (char*)address + size)) return kAlreadyRegistered;
  live[(char*)address] = {(char*)address, size, current_device(), Kind::kRegistered};
  return kSuccess;
}
int cudaHostUnregister(void* address) {
  auto found = find(address);
  if (!found || found->begin != address || found->kind != Kind::kRegistered) return kNotRegistered;
  check_not_pending(*found, "memory is unregistered");
  synchronize_all();
  Lock lock(mutex);
  live.erase((char*)address);
  return kSuccess;
}
int cudaMemGetInfo(size_t* available, size_t* total) {
  *available = 60ull << 30;
  *total = 80ull << 30;
  return kSuccess;
}

int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* handle) {
  if (!size) return kSuccess;
  for (const void* each : {(const void*)to, from})
    if (!check_range(each, size, "copy") || !check_pinned_range(each, size)) return kInvalidValue;
  const auto target = find(to), source = find(from);
  const bool to_device = target && target->on_device(), from_device = source && source->on_device();
  if (kind == cudaMemcpyHostToDevice && !to_device) fault("a copy to a device has host memory as its target");
  if (kind == cudaMemcpyDeviceToHost && !from_device) fault("a copy from a device has host memory as its source");
  auto stream = stream_of(handle);
  if (to_device && from_device && target->device != source->device) {
    const int other = target->device == device_of(stream) ? source->device : target->device;
    return copy_between((char*)to, (const char*)from, size, stream, (uintptr_t)handle <= 1, other);
  }
  if (to_device && !from_device) return copy_from_host((char*)to, (const char*)from, size, stream, is_pinned(source));
  if (from_device && !to_device) return copy_to_host((char*)to, (const char*)from, size, stream, is_pinned(target));
  trace("copy", "on device", size, stream);
  enqueue(stream, [=] { memmove(to, from, size); });
  return kSuccess;
}
int cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  const int status = cudaMemcpyAsync(to, from, size, kind, nullptr);
  trace("wait", "for a copy", 0, stream_of(nullptr));
  synchronize(stream_of(nullptr));
  return status;
}
int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void* stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
int cudaMemcpyPeer(void* to, int, const void* from, int, size_t size) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, nullptr);
}
int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int,
                      void* stream) {
  enqueue(stream_of(stream), [=] {
    for (size_t row = 0; row < height; row++)
      memmove((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  });
  return kSuccess;
}
int cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                 int kind) {
  cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
  synchronize(stream_of(nullptr));
  return kSuccess;
}
int cudaMemsetAsync(void* begin, int value, size_t size, void* stream) {
  if (!check_range(begin, size, "memset")) return kInvalidValue;
  enqueue(stream_of(stream), [=] { memset(begin, value, size); });
  return kSuccess;
}
int cudaMemset(void* begin, int value, size_t size) { return cudaMemsetAsync(begin, value, size, nullptr); }
int cudaMemPrefetchAsync(const void*, size_t, int, void*) { return kSuccess; }
int cudaMemAdvise(const void*, size_t, int, int) { return kSuccess; }

int cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {};
  auto found = find(address);
  if (!found) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = (void*)address;
    return kSuccess;
  }
  attributes->type = found->kind == Kind::kRegistered ? cudaMemoryTypeHost : (cudaMemoryType)found->kind;
  attributes->device = found->device;
  attributes->devicePointer = (void*)address;
  if (found->kind != Kind::kDevice) attributes->hostPointer = (void*)address;
  return kSuccess;
}
}
