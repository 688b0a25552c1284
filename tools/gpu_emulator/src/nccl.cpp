// NCCL among processes of one host: data goes through a file in shared memory, operations go through the streams.
//
// Every rank tells the others what it calls, so that different calls, and calls in different orders, are found.
#include <fcntl.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "emulator.h"

namespace emulator {
namespace {

constexpr size_t kChunk = 1 << 18;
constexpr int kMostRanks = 8, kTypes = 10, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6;
constexpr size_t kTypeSizes[kTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
enum Type { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kFloat32, kFloat64, kBfloat16 };
enum Reduction { kSum, kProduct, kMaximum, kMinimum, kAverage };

// What a rank calls; the same on all ranks.
struct Call {
  char name[32];
  size_t count;
  int type, reduction, root;
  bool operator==(const Call& other) const {
    return !strcmp(name, other.name) && count == other.count && type == other.type && reduction == other.reduction &&
           root == other.root;
  }
  std::string text() const {
    return std::string(name) + " of " + std::to_string(count) + " elements of type " + std::to_string(type) +
           ", reduction " + std::to_string(reduction) + ", root " + std::to_string(root);
  }
};

// A message on its way from one rank to another.
struct Mailbox {
  std::atomic<uint64_t> written, read;
  char data[kChunk];
};

struct Shared {
  std::atomic<int> joined, arrived, generation, aborted;
  int devices[kMostRanks];
  Call calls[kMostRanks];
  char chunks[kMostRanks][kChunk];
  Mailbox mail[kMostRanks][kMostRanks];
};

struct Communicator {
  Shared* shared;
  int size, rank, device;
  std::atomic<int> error{0};
  bool gone = false;
  Stream* last_stream = nullptr;  // of its last operation
  Ticket last_ticket = 0;
};

using Clock = std::chrono::steady_clock;

long futex(std::atomic<int>* word, int operation, int value, const timespec* limit) {
  return syscall(SYS_futex, word, operation, value, limit, nullptr, 0);
}

// False, and a fault, if there is no use in waiting for other ranks any longer.
bool may_wait(Communicator* own, Clock::time_point since, const std::string& what) {
  static const int most = setting("GPU_EMULATOR_NCCL_SECONDS", 40);
  if (own->shared->aborted || own->error) return false;
  if (Clock::now() - since > std::chrono::seconds(most)) {
    fault("NCCL: rank " + std::to_string(own->rank) + " has waited for its peers for " + std::to_string(most) +
          " seconds, in " + what);
    own->error = kRemoteError;
    return false;
  }
  return true;
}

// Sleeps shortly, while waiting for other ranks; false if there is no use in waiting.
bool nap(Communicator* own, Clock::time_point since, const std::string& what) {
  const timespec moment = {0, 20000};
  nanosleep(&moment, nullptr);
  return may_wait(own, since, what);
}

bool meet(Communicator* own, const std::string& what) {
  Shared* shared = own->shared;
  const int generation = shared->generation;
  if (shared->arrived.fetch_add(1) + 1 == own->size) {
    shared->arrived = 0;
    shared->generation++;
    futex(&shared->generation, FUTEX_WAKE, own->size, nullptr);
    return true;
  }
  const auto since = Clock::now();
  const timespec limit = {0, 10'000'000};  // an abort wakes nobody
  while (shared->generation == generation) {
    if (!may_wait(own, since, what)) return false;
    futex(&shared->generation, FUTEX_WAIT, generation, &limit);
  }
  return true;
}

// All ranks must call the same; false, and a fault on every rank, if they do not.
bool agree(Communicator* own, const Call& call, const std::string& line) {
  own->shared->calls[own->rank] = call;
  if (!meet(own, call.name)) return false;
  for (int rank = 0; rank < own->size; rank++) {
    const Call& other = own->shared->calls[rank];
    if (other == call) continue;
    fault("NCCL: rank " + std::to_string(own->rank) + " calls " + call.text() + ", rank " + std::to_string(rank) +
          " calls " + other.text() + "; the call: " + line);
    own->error = kInvalidUsage;
    break;
  }
  return meet(own, call.name) && !own->error;
}

float from_bfloat16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}
uint16_t to_bfloat16(float value) {
  uint32_t wide;
  memcpy(&wide, &value, sizeof wide);
  if (value != value) return 0x7fff;
  return (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

template <class T>
T combine(T sum, T value, int reduction) {
  switch (reduction) {
    case kProduct: return sum * value;
    case kMaximum: return value > sum ? value : sum;
    case kMinimum: return value < sum ? value : sum;
    default: return sum + value;
  }
}

template <class Stored, class T, class Load, class Store>
void reduce_as(char* target, const Shared* shared, size_t offset, size_t count, int ranks, int reduction, Load load,
               Store store) {
  for (size_t i = 0; i < count; i++) {
    T sum{};
    for (int rank = 0; rank < ranks; rank++) {
      const T value = load(((const Stored*)(shared->chunks[rank] + offset))[i]);
      sum = rank ? combine(sum, value, reduction) : value;
    }
    ((Stored*)target)[i] = store(reduction == kAverage ? (T)(sum / ranks) : sum);
  }
}

template <class Stored, class T>
void reduce_plain(char* target, const Shared* shared, size_t offset, size_t count, int ranks, int reduction) {
  auto load = [](Stored value) { return (T)value; };
  auto store = [](T value) { return (Stored)value; };
  reduce_as<Stored, T>(target, shared, offset, count, ranks, reduction, load, store);
}

void reduce(char* target, const Shared* shared, size_t offset, size_t count, int ranks, const Call& call) {
  const int op = call.reduction;
  auto from_half = [](uint16_t bits) { return _cvtsh_ss(bits); };
  auto to_half = [](float value) { return (uint16_t)_cvtss_sh(value, 0); };
  switch (call.type) {
    case kInt8: return reduce_plain<int8_t, int>(target, shared, offset, count, ranks, op);
    case kUint8: return reduce_plain<uint8_t, int>(target, shared, offset, count, ranks, op);
    case kInt32: return reduce_plain<int32_t, int32_t>(target, shared, offset, count, ranks, op);
    case kUint32: return reduce_plain<uint32_t, uint32_t>(target, shared, offset, count, ranks, op);
    case kInt64: return reduce_plain<int64_t, int64_t>(target, shared, offset, count, ranks, op);
    case kUint64: return reduce_plain<uint64_t, uint64_t>(target, shared, offset, count, ranks, op);
    case kFloat32: return reduce_plain<float, float>(target, shared, offset, count, ranks, op);
    case kFloat64: return reduce_plain<double, double>(target, shared, offset, count, ranks, op);
    case kFloat16: return reduce_as<uint16_t, float>(target, shared, offset, count, ranks, op, from_half, to_half);
    case kBfloat16:
      return reduce_as<uint16_t, float>(target, shared, offset, count, ranks, op, from_bfloat16, to_bfloat16);
  }
}

struct Message {
  bool sends;
  char* data;
  size_t size;
  int peer;
  Communicator* own;
  size_t done = 0;
  bool moved() {
    Shared* shared = own->shared;
    Mailbox& box = sends ? shared->mail[own->rank][peer] : shared->mail[peer][own->rank];
    const bool is_full = box.written > box.read;
    if (done >= size || is_full == sends) return false;
    const size_t length = std::min(kChunk, size - done);
    memcpy(sends ? box.data : data + done, sends ? data + done : box.data, length);
    done += length;
    (sends ? box.written : box.read)++;
    return true;
  }
};

// The operations of a group on one stream.
struct Group {
  void* stream;
  std::vector<Communicator*> communicators;
  std::vector<std::function<void()>> collectives;
  std::vector<Message> messages;
};
thread_local int depth = 0;
thread_local std::vector<Group> groups;

Group& group_of(void* stream, void* communicator) {
  auto found = std::find_if(groups.begin(), groups.end(), [=](auto& each) { return each.stream == stream; });
  if (found == groups.end()) found = groups.insert(found, Group{stream, {}, {}, {}});
  found->communicators.push_back((Communicator*)communicator);
  return *found;
}

// Exchanges messages; those to one peer, and from one, in order.
void exchange(std::vector<Message>& messages) {
  auto since = Clock::now();
  for (;;) {
    bool over = true, moved = false;
    bool busy[2][kMostRanks] = {};
    for (auto& message : messages) {
      if (message.done >= message.size) continue;
      over = false;
      if (std::exchange(busy[message.sends][message.peer], true)) continue;
      moved |= message.moved();
    }
    if (over) return;
    if (moved) since = Clock::now();
    else if (!nap(messages[0].own, since, "send or recv")) return;
  }
}

int begin_group() {
  depth++;
  return 0;
}

int end_group() {
  if (--depth) return 0;
  for (auto& each : std::exchange(groups, {})) {
    auto group = std::make_shared<Group>(std::move(each));
    auto stream = stream_of(group->stream);
    // The operations of one communicator are executed in the order of their calls, also on different streams.
    for (auto own : group->communicators)
      if (own->last_stream && own->last_stream != stream) let_wait(stream, own->last_stream, own->last_ticket);
    const Ticket ticket = enqueue(stream, [=] {
      for (auto& collective : group->collectives) collective();
      if (!group->messages.empty()) exchange(group->messages);
    });
    for (auto own : group->communicators) {
      own->last_stream = stream;
      own->last_ticket = ticket;
    }
  }
  return 0;
}

// 0 if an operation may use this memory and this stream.
int check(Communicator* own, const void* data, size_t size, void* stream, const std::string& name) {
  const std::string what = "NCCL " + name;
  if (own->gone) {
    fault(what + ": the communicator was destroyed or aborted");
    return kInvalidUsage;
  }
  auto found = find(data);
  if (!check_range(data, size, what)) return kInvalidArgument;
  if (!found || !found->on_device()) {
    fault(what + ": expected memory of a device");
    return kInvalidArgument;
  }
  if (found->device != own->device) fault(what + ": memory of another device than the communicator's");
  if (device_of(stream_of(stream)) != own->device) fault(what + ": a stream of another device than the communicator's");
  return 0;
}

// Puts a collective on a stream; body gets the number of elements that fit into a chunk.
template <class Body>
int collective(void* communicator, const Call& call, void* stream, Body body) {
  auto own = (Communicator*)communicator;
  const std::string line = python_line();
  trace("nccl", call.name, call.count * kTypeSizes[call.type], stream_of(stream));
  begin_group();
  group_of(stream, communicator).collectives.push_back([=] {
    if (agree(own, call, line)) body(own, call, kTypeSizes[call.type]);
  });
  return end_group();
}

Call make_call(const char* name, size_t count, int type, int reduction = -1, int root = -1) {
  Call call = {"", count, type, reduction, root};
  snprintf(call.name, sizeof call.name, "%s", name);
  return call;
}

int check_both(void* communicator, const Call& call, const void* from, size_t sent, const void* to, size_t received,
               void* stream) {
  auto own = (Communicator*)communicator;
  if (call.type < 0 || call.type >= kTypes) {
    fault(std::string("NCCL ") + call.name + ": unknown type " + std::to_string(call.type));
    return kInvalidArgument;
  }
  const size_t size = kTypeSizes[call.type];
  if (from)
    if (int status = check(own, from, sent * size, stream, call.name)) return status;
  return to ? check(own, to, received * size, stream, call.name) : 0;
}

int reduce_to(const void* from, void* to, const Call& call, void* communicator, void* stream) {
  auto own = (Communicator*)communicator;
  const bool receives = call.root < 0 || call.root == own->rank;
  if (int status = check_both(own, call, from, call.count, receives ? to : nullptr, call.count, stream)) return status;
  return collective(own, call, stream, [=](Communicator* own, const Call& call, size_t size) {
    for (size_t begin = 0; begin < call.count; begin += kChunk / size) {
      const size_t length = std::min(call.count - begin, kChunk / size);
      memcpy(own->shared->chunks[own->rank], (const char*)from + begin * size, length * size);
      if (!meet(own, call.name)) return;
      if (receives) reduce((char*)to + begin * size, own->shared, 0, length, own->size, call);
      if (!meet(own, call.name)) return;
    }
  });
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

struct UniqueId {
  char name[128];
};

int ncclGetVersion(int* version) {
  *version = 23203;
  return 0;
}
const char* ncclGetErrorString(int status) { return status ? "an error of the emulated NCCL" : "no error"; }
const char* ncclGetLastError(void*) { return "see the faults of the GPU emulator"; }
int ncclGetUniqueId(UniqueId* id) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  *id = {};
  snprintf(id->name, sizeof id->name, "/gpu-emulator-%d-%ld", getpid(), now.tv_nsec);
  return 0;
}

int ncclCommInitRankConfig(void** made, int size, UniqueId id, int rank, void*) {
  if (size > kMostRanks) {
    fault("NCCL: at most " + std::to_string(kMostRanks) + " ranks are emulated");
    return kInvalidArgument;
  }
  const int file = shm_open(id.name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared))) return 2;
  void* mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  auto own = new Communicator{(Shared*)mapped, size, rank, current_device()};
  own->shared->devices[rank] = own->device;
  own->shared->joined++;
  const auto since = Clock::now();
  while (own->shared->joined < size)
    if (!nap(own, since, "ncclCommInitRank")) return kRemoteError;
  if (!meet(own, "ncclCommInitRank")) return kRemoteError;
  if (rank == 0) shm_unlink(id.name);
  for (int other = 0; other < rank && !getenv("NCCL_MULTI_RANK_GPU_ENABLE"); other++)
    if (own->shared->devices[other] == own->device) fault("NCCL: two ranks share a device");
  *made = own;
  return 0;
}
int ncclCommInitRankScalable(void** made, int size, int rank, int, UniqueId* ids, void* config) {
  return ncclCommInitRankConfig(made, size, ids[0], rank, config);
}
int ncclCommInitRank(void** made, int size, UniqueId id, int rank) {
  return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}
int ncclCommInitAll() { return unsupported("ncclCommInitAll", kInvalidArgument); }
int ncclCommSplit() { return unsupported("ncclCommSplit", kInvalidArgument); }
int ncclCommFinalize(void*) { return 0; }
int ncclCommDestroy(void* communicator) {
  trace("nccl", "destroy", 0, nullptr);
  ((Communicator*)communicator)->gone = true;
  return 0;
}
int ncclCommAbort(void* communicator) {
  trace("nccl", "abort", 0, nullptr);
  auto own = (Communicator*)communicator;
  own->gone = true;
  own->shared->aborted = 1;
  return 0;
}
int ncclCommGetAsyncError(void* communicator, int* status) {
  auto own = (Communicator*)communicator;
  *status = own->error ? own->error.load() : own->shared->aborted && !own->gone ? kRemoteError : 0;
  return 0;
}
int ncclCommCount(void* communicator, int* size) {
  *size = ((Communicator*)communicator)->size;
  return 0;
}
int ncclCommUserRank(void* communicator, int* rank) {
  *rank = ((Communicator*)communicator)->rank;
  return 0;
}
int ncclCommCuDevice(void* communicator, int* device) {
  *device = ((Communicator*)communicator)->device;
  return 0;
}
int ncclGroupStart() { return begin_group(); }
int ncclGroupEnd() { return end_group(); }

int ncclAllReduce(const void* from, void* to, size_t count, int type, int reduction, void* communicator,
                  void* stream) {
  return reduce_to(from, to, make_call("allreduce", count, type, reduction), communicator, stream);
}
int ncclReduce(const void* from, void* to, size_t count, int type, int reduction, int root, void* communicator,
               void* stream) {
  return reduce_to(from, to, make_call("reduce", count, type, reduction, root), communicator, stream);
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* communicator, void* stream) {
  const Call call = make_call("broadcast", count, type, -1, root);
  const bool sends = ((Communicator*)communicator)->rank == root;
  if (int status = check_both(communicator, call, sends ? from : nullptr, count, to, count, stream)) return status;
  return collective(communicator, call, stream, [=](Communicator* own, const Call& call, size_t size) {
    for (size_t begin = 0; begin < count * size; begin += kChunk) {
      const size_t length = std::min(count * size - begin, kChunk);
      if (sends) memcpy(own->shared->chunks[root], (const char*)from + begin, length);
      if (!meet(own, call.name)) return;
      memmove((char*)to + begin, own->shared->chunks[root], length);
      if (!meet(own, call.name)) return;
    }
  });
}
int ncclBcast(void* data, size_t count, int type, int root, void* communicator, void* stream) {
  return ncclBroadcast(data, data, count, type, root, communicator, stream);
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int reduction, void* communicator,
                      void* stream) {
  const Call call = make_call("reduce_scatter", count, type, reduction);
  const size_t ranks = ((Communicator*)communicator)->size;
  if (int status = check_both(communicator, call, from, count * ranks, to, count, stream)) return status;
  return collective(communicator, call, stream, [=](Communicator* own, const Call& call, size_t size) {
    const std::vector<char> input((const char*)from, (const char*)from + count * ranks * size);  // may be in place
    const size_t step = kChunk / size / ranks;
    for (size_t begin = 0; begin < count; begin += step) {
      const size_t length = std::min(count - begin, step);
      for (size_t rank = 0; rank < ranks; rank++)
        memcpy(own->shared->chunks[own->rank] + rank * step * size, &input[(rank * count + begin) * size],
               length * size);
      if (!meet(own, call.name)) return;
      reduce((char*)to + begin * size, own->shared, own->rank * step * size, length, own->size, call);
      if (!meet(own, call.name)) return;
    }
  });
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* communicator, void* stream) {
  const Call call = make_call("allgather", count, type);
  const size_t ranks = ((Communicator*)communicator)->size;
  if (int status = check_both(communicator, call, from, count, to, count * ranks, stream)) return status;
  return collective(communicator, call, stream, [=](Communicator* own, const Call& call, size_t size) {
    for (size_t begin = 0; begin < count * size; begin += kChunk) {
      const size_t length = std::min(count * size - begin, kChunk);
      memcpy(own->shared->chunks[own->rank], (const char*)from + begin, length);
      if (!meet(own, call.name)) return;
      for (size_t rank = 0; rank < ranks; rank++)
        memcpy((char*)to + rank * count * size + begin, own->shared->chunks[rank], length);
      if (!meet(own, call.name)) return;
    }
  });
}
int ncclSend(const void* from, size_t count, int type, int peer, void* communicator, void* stream) {
  if (int status = check_both(communicator, make_call("send", count, type), from, count, nullptr, 0, stream))
    return status;
  trace("nccl", "send", count * kTypeSizes[type], stream_of(stream));
  begin_group();
  group_of(stream, communicator).messages.push_back({true, (char*)from, count * kTypeSizes[type], peer, (Communicator*)communicator});
  return end_group();
}
int ncclRecv(void* to, size_t count, int type, int peer, void* communicator, void* stream) {
  if (int status = check_both(communicator, make_call("recv", count, type), nullptr, 0, to, count, stream))
    return status;
  trace("nccl", "recv", count * kTypeSizes[type], stream_of(stream));
  begin_group();
  group_of(stream, communicator).messages.push_back({false, (char*)to, count * kTypeSizes[type], peer, (Communicator*)communicator});
  return end_group();
}
}
