// The null GPU's driver, libcuda.so.1: what torch and Triton call directly.  Launches are logged and do nothing.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "device.h"

using Result = int;
constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotFound = 500;

struct Function {
    char name[256];
};

static Result launch(void* function) {
    if (null_gpu_note) null_gpu_note("KERNEL", static_cast<Function*>(function)->name, "");
    return kSuccess;
}

static Result wait(const char* name) {
    if (null_gpu_note) null_gpu_note("SYNC", name, "");
    return kSuccess;
}

static Result any_handle(void** handle) {
    *handle = malloc(8);
    return kSuccess;
}

static void* const kContext = reinterpret_cast<void*>(1);

extern "C" {

// --- devices
Result cuInit(unsigned) { return kSuccess; }
Result cuDriverGetVersion(int* version) { *version = kVersion; return kSuccess; }
Result cuDeviceGet(int* device, int index) { *device = index; return kSuccess; }
Result cuDeviceGetCount(int* count) { *count = 1; return kSuccess; }
Result cuDeviceGetName(char* name, int length, int) { strncpy(name, kName, length); return kSuccess; }
Result cuDeviceGetAttribute(int* value, int attribute, int) { *value = device_attribute(attribute); return kSuccess; }
Result cuDeviceComputeCapability(int* major, int* minor, int) { *major = 9; *minor = 0; return kSuccess; }
Result cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = kMemoryBytes; return kSuccess; }
Result cuMemGetInfo_v2(size_t* free, size_t* total) { *free = *total = kMemoryBytes; return kSuccess; }

// --- contexts: the one of device 0 exists
Result cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
    *flags = 0;
    *is_active = device == 0;
    return kSuccess;
}
Result cuDevicePrimaryCtxRetain(void** context, int) { *context = kContext; return kSuccess; }
Result cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
Result cuCtxGetCurrent(void** context) { *context = kContext; return kSuccess; }
Result cuCtxSetCurrent(void*) { return kSuccess; }
Result cuCtxGetDevice(int* device) { *device = 0; return kSuccess; }
Result cuCtxGetLimit(size_t* limit, int) { *limit = 1 << 20; return kSuccess; }
Result cuCtxSetLimit(int, size_t) { return kSuccess; }
Result cuCtxPushCurrent_v2(void*) { return kSuccess; }
Result cuCtxPopCurrent_v2(void**) { return kSuccess; }
Result cuCtxSynchronize() { return wait("cuCtxSynchronize"); }
Result cuStreamSynchronize(void*) { return wait("cuStreamSynchronize"); }

// --- modules and kernels
Result cuModuleLoad(void** module, const char*) { return any_handle(module); }
Result cuModuleLoadData(void** module, const void*) { return any_handle(module); }
Result cuModuleLoadDataEx(void** module, const void*, unsigned, void*, void*) { return any_handle(module); }
Result cuModuleUnload(void*) { return kSuccess; }
Result cuModuleGetFunction(void** function, void*, const char* name) {
    auto* made = static_cast<Function*>(calloc(1, sizeof(Function)));
    strncpy(made->name, name, sizeof made->name - 1);
    *function = made;
    return kSuccess;
}
Result cuModuleGetGlobal_v2(void**, size_t*, void*, const char*) { return kNotFound; }
Result cuFuncGetAttribute(int* value, int attribute, void*) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;  // threads of a block, registers of a thread
    return kSuccess;
}
Result cuFuncSetAttribute(void*, int, int) { return kSuccess; }
Result cuFuncSetCacheConfig(void*, int) { return kSuccess; }
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* number, void*, int, size_t) { *number = 2; return kSuccess; }
Result cuOccupancyMaxActiveClusters(int* number, void*, const void*) { *number = 66; return kSuccess; }
Result cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                      void**, void**) {
    return launch(function);
}
Result cuLaunchKernelEx(const void*, void* function, void**, void**) { return launch(function); }
Result cuLaunchCooperativeKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 void*, void**) {
    return launch(function);
}
Result cuLinkCreate_v2(...) { return kSuccess; }
Result cuLinkAddData_v2(...) { return kSuccess; }
Result cuLinkComplete(...) { return kSuccess; }
Result cuLinkDestroy(...) { return kSuccess; }

// --- memory: the runtime's; none is had here
Result cuMemAlloc_v2(...) { return kOutOfMemory; }
Result cuMemFree_v2(...) { return kSuccess; }
Result cuMemcpyHtoD_v2(...) { return kSuccess; }
Result cuMemsetD8Async(...) { return kSuccess; }
Result cuMemGetAddressRange_v2(...) { return kInvalidValue; }
Result cuMemGetHandleForAddressRange(...) { return kInvalidValue; }
Result cuPointerGetAttribute(void* value, int, unsigned long long pointer) {
    *static_cast<unsigned long long*>(value) = pointer;  // Triton reads the device's pointer, which is the same
    return kSuccess;
}
Result cuPointerGetAttributes(...) { return kSuccess; }
Result cuTensorMapEncodeTiled(...) { return kSuccess; }
Result cuTensorMapEncodeIm2col(...) { return kSuccess; }
Result cuStreamWriteValue32_v2(...) { return kSuccess; }

// --- the rest
Result cuGetErrorString(int, const char** text) { *text = "an error of the null GPU"; return kSuccess; }
Result cuGetErrorName(int, const char** text) { *text = "NULL_GPU"; return kSuccess; }
Result cuGetProcAddress_v2(const char* symbol, void** function, int, unsigned long long, void*) {
    *function = dlsym(RTLD_DEFAULT, symbol);
    return *function ? kSuccess : kNotFound;
}
Result cuGetExportTable(...) { return kNotFound; }
Result cuProfilerStart() { return kSuccess; }
Result cuProfilerStop() { return kSuccess; }

}  // extern "C"
