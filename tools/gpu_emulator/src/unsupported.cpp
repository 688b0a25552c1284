// Functions of CUDA's runtime and driver that CuPy links with or looks up, and that the emulator does not have: each says
// so when it is called. build.py makes the same for the libraries, from the names that CuPy's modules need.
#include "emulator.h"

#define UNSUPPORTED(name) \
  int name() { return emulator::unsupported(#name, emulator::kNotSupported); }

extern "C" {

UNSUPPORTED(cudaCreateSurfaceObject)
UNSUPPORTED(cudaCreateTextureObject)
UNSUPPORTED(cudaDestroySurfaceObject)
UNSUPPORTED(cudaDestroyTextureObject)
UNSUPPORTED(cudaDeviceSetMemPool)
UNSUPPORTED(cudaFreeArray)
UNSUPPORTED(cudaGetChannelDesc)
UNSUPPORTED(cudaGetTextureObjectResourceDesc)
UNSUPPORTED(cudaGetTextureObjectTextureDesc)
UNSUPPORTED(cudaGraphDebugDotPrint)
UNSUPPORTED(cudaGraphDestroy)
UNSUPPORTED(cudaGraphExecDestroy)
UNSUPPORTED(cudaGraphInstantiate)
UNSUPPORTED(cudaGraphLaunch)
UNSUPPORTED(cudaGraphUpload)
UNSUPPORTED(cudaIpcCloseMemHandle)
UNSUPPORTED(cudaIpcGetEventHandle)
UNSUPPORTED(cudaIpcGetMemHandle)
UNSUPPORTED(cudaIpcOpenEventHandle)
UNSUPPORTED(cudaIpcOpenMemHandle)
UNSUPPORTED(cudaMalloc3DArray)
UNSUPPORTED(cudaMallocArray)
UNSUPPORTED(cudaMemPoolCreate)
UNSUPPORTED(cudaMemPoolDestroy)
UNSUPPORTED(cudaMemPoolGetAttribute)
UNSUPPORTED(cudaMemPoolSetAttribute)
UNSUPPORTED(cudaMemPoolTrimTo)
UNSUPPORTED(cudaMemcpy2DFromArray)
UNSUPPORTED(cudaMemcpy2DFromArrayAsync)
UNSUPPORTED(cudaMemcpy2DToArray)
UNSUPPORTED(cudaMemcpy2DToArrayAsync)
UNSUPPORTED(cudaMemcpy3D)
UNSUPPORTED(cudaMemcpy3DAsync)
UNSUPPORTED(cudaStreamBeginCapture)
UNSUPPORTED(cudaStreamEndCapture)
UNSUPPORTED(cuLinkCreate_v2)
UNSUPPORTED(cuLinkAddData_v2)
UNSUPPORTED(cuLinkAddFile_v2)
UNSUPPORTED(cuLinkComplete)
UNSUPPORTED(cuLinkDestroy)
UNSUPPORTED(cuCtxCreate_v2)
UNSUPPORTED(cuCtxDestroy_v2)
UNSUPPORTED(cuModuleLoad)
}
