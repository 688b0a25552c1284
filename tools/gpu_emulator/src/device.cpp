// The devices, their properties, and the parts of CUDA's runtime and driver that only have to be there.
#include <dlfcn.h>
#include <driver_types.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "emulator.h"

namespace emulator {
namespace {

thread_local int current = 0;

constexpr int kMultiprocessors = 132, kSharedBytes = 49152, kSharedBytesOptional = 232448, kRegisters = 65536;

}  // namespace

int current_device() { return current; }
void set_current_device(int device) { current = device; }
int devices() {
  static const int count = setting("GPU_EMULATOR_DEVICES", 4);
  return count;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

const char* cudaGetErrorName(int status) {
  switch (status) {
    case kSuccess: return "cudaSuccess";
    case kInvalidValue: return "cudaErrorInvalidValue";
    case kInvalidDevice: return "cudaErrorInvalidDevice";
    case kInvalidHandle: return "cudaErrorInvalidResourceHandle";
    case kNotReady: return "cudaErrorNotReady";
    case kAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case kNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case kNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}
const char* cudaGetErrorString(int status) { return cudaGetErrorName(status); }
int cudaGetLastError() { return kSuccess; }
int cudaDriverGetVersion(int* version) {
  *version = setting("GPU_EMULATOR_DRIVER", 13000);
  return kSuccess;
}
int cudaRuntimeGetVersion(int* version) {
  *version = GPU_EMULATOR_CUDA_VERSION;
  return kSuccess;
}
int cudaGetDevice(int* device) {
  *device = current_device();
  return kSuccess;
}
int cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return kInvalidDevice;
  set_current_device(device);
  return kSuccess;
}
int cudaGetDeviceCount(int* count) {
  *count = devices();
  return kSuccess;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = kSharedBytes; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kSharedBytesOptional; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = kRegisters; break;
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor:
    case cudaDevAttrMemoryPoolsSupported: *value = 0; break;
    default: *value = 1;
  }
  return kSuccess;
}
int cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02X:00.0", device + 1);
  return kSuccess;
}
int cudaDeviceGetByPCIBusId(int* device, const char* text) {
  unsigned bus = 0;
  if (sscanf(text, "%*x:%x:", &bus) != 1 || bus < 1 || (int)bus > devices()) return kInvalidValue;
  *device = bus - 1;
  return kSuccess;
}
int GPU_EMULATOR_GET_PROPERTIES(cudaDeviceProp* properties, int device) {
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "Emulated GPU %d", device);
  properties->major = 9;
  properties->multiProcessorCount = kMultiprocessors;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->totalGlobalMem = 80ull << 30;
  properties->sharedMemPerBlock = kSharedBytes;
  properties->regsPerBlock = kRegisters;
  properties->pciBusID = device + 1;
  properties->concurrentKernels = 1;
  return kSuccess;
}
int cudaDeviceSynchronize() {
  trace("wait", "for a device", 0, nullptr);
  synchronize_device(current_device());
  return kSuccess;
}
int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return kSuccess;
}
int cudaDeviceEnablePeerAccess(int, unsigned) { return kSuccess; }
int cudaDeviceDisablePeerAccess(int) { return kSuccess; }
int cudaDeviceGetLimit(size_t* value, int) {
  *value = 1 << 20;
  return kSuccess;
}
int cudaDeviceSetLimit(int, size_t) { return kSuccess; }
int cudaDeviceGetDefaultMemPool(void** pool, int) {
  *pool = (void*)1;
  return kSuccess;
}
int cudaDeviceGetMemPool(void** pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
int cudaProfilerStart() { return kSuccess; }
int cudaProfilerStop() { return kSuccess; }

int cuInit(unsigned) { return kSuccess; }
int cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }
int cuGetErrorName(int status, const char** name) {
  *name = cudaGetErrorName(status);
  return kSuccess;
}
int cuGetErrorString(int status, const char** text) { return cuGetErrorName(status, text); }
// A context is the number of its device, plus one.
int cuCtxGetCurrent(void** context) {
  *context = (void*)(uintptr_t)(current_device() + 1);
  return kSuccess;
}
int cuCtxSetCurrent(void* context) {
  if (context) set_current_device((int)(uintptr_t)context - 1);
  return kSuccess;
}
int cuCtxPushCurrent_v2(void* context) { return cuCtxSetCurrent(context); }
int cuCtxGetDevice(int* device) { return cudaGetDevice(device); }
int cuDeviceGet(int* device, int number) {
  *device = number;
  return kSuccess;
}
int cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(uintptr_t)(device + 1);
  return kSuccess;
}
int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}

int cuGetProcAddress_v2(const char* name, void** address, int, uint64_t, int* found) {
  *address = dlsym(RTLD_DEFAULT, name);
  static void* emulator = dlopen("libgpu_emulator.so", RTLD_NOW | RTLD_NOLOAD);
  if (emulator) *address = dlsym(emulator, name);
  if (emulator && !*address) *address = dlsym(emulator, (std::string(name) + "_v2").c_str());
  if (found) *found = *address ? 0 : 1;
  return *address ? kSuccess : kNotFound;
}
int cuGetProcAddress(const char* name, void** address, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, address, version, flags, nullptr);
}
}
