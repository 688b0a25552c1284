// Modules and kernels: shared libraries that compile_hook.py has made with g++ from CUDA C++.
//
// The threads of a block run one after the other. If the kernel contains barriers, each is a fiber, and the next one
// runs when it reaches a barrier.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "emulator.h"

namespace emulator {
namespace {

constexpr char kMagic[] = "GPU_EMULATOR:";
constexpr unsigned kMostThreads = 1024, kMostSharedBytes = 232448, kWarp = 32;
constexpr size_t kStackBytes = 1 << 16;

// What a library exports for each kernel; see cuda_on_host.h.
struct Kernel {
  void (*run)(char** arguments, unsigned* dimensions, size_t shared_bytes);
  const size_t* sizes;
  int count;
  std::string name;
};

// A launch's own copy of its arguments.
class Arguments {
 public:
  Arguments(const Kernel& kernel, void** values) {
    for (int i = 0; i < kernel.count; i++) {
      const size_t units = (kernel.sizes[i] + sizeof(Unit) - 1) / sizeof(Unit);
      copies_.emplace_back(new Unit[units]);
      memcpy(copies_.back().get(), values[i], kernel.sizes[i]);
      addresses_.push_back((char*)copies_.back().get());
    }
  }
  char** addresses() { return addresses_.data(); }

 private:
  struct alignas(16) Unit {
    char bytes[16];
  };
  std::vector<std::unique_ptr<Unit[]>> copies_;
  std::vector<char*> addresses_;
};

// Arguments of the size of an address or more begin with one, if there is memory at it.
bool check_pointers(const Kernel& kernel, void** values) {
  for (int i = 0; i < kernel.count; i++) {
    if (kernel.sizes[i] < sizeof(void*)) continue;
    void* address;
    memcpy(&address, values[i], sizeof address);
    const std::string what = "kernel " + kernel.name + ", argument " + std::to_string(i);
    if (is_freed(address)) {
      fault(what + ": memory is used after it was freed");
      return false;
    }
    auto found = find(address);
    if (found && found->kind == Kind::kDevice && found->device != current_device())
      fault(what + ": memory of device " + std::to_string(found->device) + " on device " +
            std::to_string(current_device()));
  }
  return true;
}

struct Fiber {
  enum State { kReady, kAtBlockBarrier, kAtWarpBarrier, kOver };
  void* stack_pointer;
  State state;
};

struct Block {
  std::vector<Fiber> fibers;
  void* scheduler;
  unsigned current;
  void (*body)(void*);
  void* argument;
};
thread_local Block* block = nullptr;

}  // namespace
}  // namespace emulator

using namespace emulator;

// The registers that a function must preserve, and the stack.
asm(R"(.text
.globl gpu_emulator_switch
gpu_emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
extern "C" void gpu_emulator_switch(void** from, void* to);

namespace emulator {
namespace {

void fiber_main() {
  block->body(block->argument);
  Fiber& fiber = block->fibers[block->current];
  fiber.state = Fiber::kOver;
  gpu_emulator_switch(&fiber.stack_pointer, block->scheduler);
  abort();  // it is not resumed
}

void reach(Fiber::State barrier) {
  if (!block) return;
  Fiber& fiber = block->fibers[block->current];
  fiber.state = barrier;
  gpu_emulator_switch(&fiber.stack_pointer, block->scheduler);
}

void* new_stack(unsigned number) {
  static thread_local std::vector<char*> stacks;
  while (stacks.size() <= number) stacks.push_back((char*)aligned_alloc(64, kStackBytes));
  auto top = (void**)(stacks[number] + kStackBytes - 64);
  *--top = nullptr;
  *--top = (void*)fiber_main;  // where the first switch returns to
  for (int saved = 0; saved < 6; saved++) *--top = nullptr;
  return top;
}

// Lets fibers pass the barriers that all live threads of their warp, or of the block, have reached.
bool open_barriers(Block& all) {
  bool moved = false;
  size_t live = 0, at_block_barrier = 0;
  for (size_t begin = 0; begin < all.fibers.size(); begin += kWarp) {
    const size_t end = std::min(begin + kWarp, all.fibers.size());
    size_t in_warp = 0, waiting = 0;
    for (size_t i = begin; i < end; i++) {
      in_warp += all.fibers[i].state != Fiber::kOver;
      waiting += all.fibers[i].state == Fiber::kAtWarpBarrier;
      at_block_barrier += all.fibers[i].state == Fiber::kAtBlockBarrier;
    }
    live += in_warp;
    if (!waiting || waiting != in_warp) continue;
    for (size_t i = begin; i < end; i++)
      if (all.fibers[i].state == Fiber::kAtWarpBarrier) all.fibers[i].state = Fiber::kReady;
    moved = true;
  }
  if (moved) return true;
  const bool all_at_barrier = at_block_barrier == live;
  for (auto& fiber : all.fibers) {  // lanes that have left a warp's loop do not count
    if (fiber.state != (all_at_barrier ? Fiber::kAtBlockBarrier : Fiber::kAtWarpBarrier)) continue;
    fiber.state = Fiber::kReady;
    moved = true;
  }
  return moved;
}

bool all_over(const Block& all) {
  for (auto& fiber : all.fibers)
    if (fiber.state != Fiber::kOver) return false;
  return true;
}

}  // namespace
}  // namespace emulator

extern "C" {

struct FkCtx {
  unsigned tid[3], bid[3], bdim[3], gdim[3];
  void* dyn;
};
__thread FkCtx fk_ctx;

void fk_sync() { reach(Fiber::kAtBlockBarrier); }
void fk_syncwarp() { reach(Fiber::kAtWarpBarrier); }
int fk_lane() { return block ? block->current : 0; }
unsigned long long* fk_slot(int thread) {
  static thread_local unsigned long long slots[kMostThreads];
  return slots + thread;
}

// Runs one block; dimensions are those of the grid, then those of the block.
void fk_block(void (*body)(void*), void* argument, unsigned* dimensions, int has_barriers) {
  const unsigned *size = dimensions + 3, threads = size[0] * size[1] * size[2];
  auto become = [&](unsigned thread) {
    fk_ctx.tid[0] = thread % size[0];
    fk_ctx.tid[1] = thread / size[0] % size[1];
    fk_ctx.tid[2] = thread / size[0] / size[1];
  };
  if (!has_barriers) {
    for (unsigned thread = 0; thread < threads; thread++) {
      become(thread);
      body(argument);
    }
    return;
  }
  Block own{{}, nullptr, 0, body, argument};
  for (unsigned thread = 0; thread < threads; thread++) own.fibers.push_back({new_stack(thread), Fiber::kReady});
  Block* outer = block;
  block = &own;
  while (!all_over(own)) {
    for (unsigned thread = 0; thread < threads; thread++) {
      if (own.fibers[thread].state != Fiber::kReady) continue;
      own.current = thread;
      become(thread);
      gpu_emulator_switch(&own.scheduler, own.fibers[thread].stack_pointer);
    }
    if (!all_over(own) && !open_barriers(own)) {
      fault("the threads of a block wait at different barriers");
      abort();
    }
  }
  block = outer;
}

int cuModuleLoadData(void** module, const void* image) {
  const size_t prefix = sizeof kMagic - 1;
  if (strncmp((const char*)image, kMagic, prefix)) {
    fault("a module was not compiled for the emulator");
    return kInvalidImage;
  }
  *module = dlopen((const char*)image + prefix, RTLD_NOW | RTLD_LOCAL);
  if (!*module) fault(std::string("a module cannot be loaded: ") + dlerror());
  return *module ? kSuccess : kInvalidImage;
}
int cuModuleUnload(void*) { return kSuccess; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  auto symbol = [&](const char* kind) { return dlsym(module, (std::string(kind) + name).c_str()); };
  void* run = symbol("fkrun_");
  if (!run) return kNotFound;
  auto sizes = (const size_t* (*)())symbol("fksizesp_");
  *function = new Kernel{(decltype(Kernel::run))run, sizes(), *(int*)symbol("fkn_"), name};
  return kSuccess;
}
int cuModuleGetGlobal_v2(void** address, size_t* size, void* module, const char* name) {
  *address = dlsym(module, name);
  *size = 8;
  return *address ? kSuccess : kNotFound;
}
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void* handle, void** values, void**) {
  auto kernel = (Kernel*)function;
  const unsigned long blocks = (unsigned long)grid_x * grid_y * grid_z;
  const unsigned long threads = (unsigned long)block_x * block_y * block_z;
  if (!blocks || !threads || threads > kMostThreads || shared_bytes > kMostSharedBytes) {
    fault("kernel " + kernel->name + ": invalid dimensions of its launch");
    return kInvalidValue;
  }
  auto stream = stream_of(handle);
  if (device_of(stream) != current_device()) {
    fault("kernel " + kernel->name + " is launched on device " + std::to_string(current_device()) +
          ", on a stream of device " + std::to_string(device_of(stream)));
    return kInvalidHandle;
  }
  if (!check_pointers(*kernel, values)) return kInvalidValue;
  trace("kernel", kernel->name, 0, stream);
  auto arguments = std::make_shared<Arguments>(*kernel, values);
  enqueue(stream, [=] {
    unsigned dimensions[6] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
    kernel->run(arguments->addresses(), dimensions, shared_bytes);
  });
  return kSuccess;
}
int cuLaunchCooperativeKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** values) {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, values,
                        nullptr);
}
int cuFuncGetAttribute(int* value, int attribute, void*) {
  *value = attribute == 0 ? kMostThreads : 32;
  return kSuccess;
}
int cuFuncSetAttribute(void*, int, int) { return kSuccess; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void*, int, size_t) {
  *count = 8;
  return kSuccess;
}
int cuOccupancyMaxPotentialBlockSize(int* grid, int* threads, void*, void*, size_t, int) {
  *grid = 132;
  *threads = 256;
  return kSuccess;
}
}
