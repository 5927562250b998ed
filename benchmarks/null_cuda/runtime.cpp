// The null GPU's CUDA runtime and cuBLAS, preloaded in place of the real ones under torch's CUDA build.
//
// Memory is the host's, which is mapped and never touched; kernels and matrix products are logged and do nothing;
// streams and events are empty.  All above is real: torch's dispatcher, its caching allocator, autograd, Inductor and
// Triton.  What a kernel would have written is garbage or zero.  While a stream is captured, what is launched is counted
// for the graph and not logged; a graph's launch is logged with that number.  cuDNN, NCCL and CUPTI do not run on it.
// `scripts/null_gpu.sh` builds it.
#include <dlfcn.h>
#include <driver_types.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "device.h"

using Error = cudaError_t;
using Blas = int;  // cublasStatus_t
constexpr Error kOk = cudaSuccess;
constexpr int kFloat = 0, kDouble = 1;  // of cudaDataType_t

// Constructors of the libraries above run before this one's, so what they reach is made at its first use.
static std::mutex mutex;
static FILE* log_file = nullptr;

using Blocks = std::map<uintptr_t, size_t>;  // bytes by address

static Blocks& device_blocks() {
    static auto* blocks = new Blocks;
    return *blocks;
}

static Blocks& host_blocks() {
    static auto* blocks = new Blocks;
    return *blocks;
}

static std::map<const void*, std::string>& kernel_names() {
    static auto* names = new std::map<const void*, std::string>;
    return *names;
}

// The number of each stream's capture, counted from 1, by stream; and what has been launched in the one under way.
static std::map<cudaStream_t, unsigned long long>& captures() {
    static auto* numbers = new std::map<cudaStream_t, unsigned long long>;
    return *numbers;
}
static size_t num_captured = 0;

static size_t used_bytes = 600u << 20;  // about what a context takes

// True if an address lies in one of the blocks.  The caller holds the mutex.
static bool is_in(const Blocks& blocks, const void* pointer) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    auto after = blocks.upper_bound(address);
    if (after == blocks.begin()) return false;
    --after;
    return address < after->first + after->second;
}

extern "C" void null_gpu_log(const char* path) {
    std::lock_guard<std::mutex> guard(mutex);
    if (log_file) fclose(log_file);
    log_file = path ? fopen(path, "w") : nullptr;
}

extern "C" void null_gpu_note(const char* kind, const char* name, const char* detail) {
    std::lock_guard<std::mutex> guard(mutex);
    if (!captures().empty() && (strchr("KPC", *kind) || !strcmp(kind, "MEMSET"))) {  // a kernel, a product or a copy
        ++num_captured;
    } else if (log_file) {
        fprintf(log_file, "%s|%s|%s\n", kind, name, detail);
    }
}

static void note_bytes(const char* kind, const char* name, size_t bytes) {
    char detail[32];
    snprintf(detail, sizeof detail, "%zu", bytes);
    null_gpu_note(kind, name, detail);
}

// Waiting is an error while a stream is captured, as on a GPU: nothing of what is waited for runs.
static Error wait(const char* name) {
    null_gpu_note("SYNC", name, "");
    std::lock_guard<std::mutex> guard(mutex);
    return captures().empty() ? kOk : cudaErrorStreamCaptureUnsupported;
}

static Error launch(const void* kernel) {
    std::string name;
    {
        std::lock_guard<std::mutex> guard(mutex);
        auto found = kernel_names().find(kernel);
        name = found == kernel_names().end() ? "?" : found->second;
    }
    null_gpu_note("KERNEL", name.c_str(), "");
    return kOk;
}

// Zeroes large blocks by returning their pages, so that they stay untouched; other large values are not written.
static void fill(void* pointer, int value, size_t bytes) {
    if (value == 0 && bytes > (4u << 20)) {
        auto begin = reinterpret_cast<uintptr_t>(pointer), end = begin + bytes;
        uintptr_t first = (begin + 4095) & ~uintptr_t{4095}, last = end & ~uintptr_t{4095};
        memset(pointer, 0, first - begin);
        madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
        memset(reinterpret_cast<void*>(last), 0, end - last);
    } else if (bytes <= (64u << 20)) {
        memset(pointer, value, bytes);
    }
}

// Large copies to or within the device are left out: nothing computes with their contents.
static Error copy(void* target, const void* source, size_t bytes, int kind) {
    if (bytes <= (1u << 20) || kind == cudaMemcpyDeviceToHost) memmove(target, source, bytes);
    return kOk;
}

static Error any_handle(void* handle) {
    *static_cast<void**>(handle) = malloc(16);
    return kOk;
}

static const char* copy_name(int kind) {
    const char* names[] = {"host to host", "host to device", "device to host", "device to device"};
    return kind >= 0 && kind < 4 ? names[kind] : "either way";
}

extern "C" {

// --- devices; NULL_GPU_DEVICES is their number, 1 by default
Error cudaGetDeviceCount(int* count) {
    const char* stated = getenv("NULL_GPU_DEVICES");
    *count = stated ? atoi(stated) : 1;
    return kOk;
}
static thread_local int current_device = 0;
Error cudaGetDevice(int* device) { *device = current_device; return kOk; }
Error cudaSetDevice(int device) { current_device = device; return kOk; }
Error cudaRuntimeGetVersion(int* version) { *version = kVersion; return kOk; }
Error cudaDriverGetVersion(int* version) { *version = kVersion; return kOk; }
Error cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return kOk; }
Error cudaDeviceEnablePeerAccess(int, unsigned) { return kOk; }
Error cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return kOk; }
Error cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = device_attribute(attribute);
    return kOk;
}
Error cudaDeviceGetPCIBusId(char* id, int length, int device) {
    snprintf(id, length, "0000:00:0%d.0", device);
    return kOk;
}
Error cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, kName);
    properties->major = device_attribute(75);
    properties->minor = device_attribute(76);
    properties->multiProcessorCount = device_attribute(16);
    properties->totalGlobalMem = kMemoryBytes;
    properties->warpSize = device_attribute(10);
    properties->sharedMemPerBlock = device_attribute(8);
    properties->sharedMemPerBlockOptin = device_attribute(97);
    properties->sharedMemPerMultiprocessor = device_attribute(81);
    properties->regsPerBlock = device_attribute(12);
    properties->regsPerMultiprocessor = device_attribute(82);
    properties->maxThreadsPerBlock = device_attribute(1);
    properties->maxThreadsPerMultiProcessor = device_attribute(39);
    for (int axis = 0; axis < 3; ++axis) {
        properties->maxThreadsDim[axis] = device_attribute(2 + axis);
        properties->maxGridSize[axis] = device_attribute(5 + axis);
    }
    properties->l2CacheSize = device_attribute(38);
    properties->memoryBusWidth = device_attribute(37);
    properties->maxBlocksPerMultiProcessor = device_attribute(106);
    properties->concurrentKernels = 1;
    properties->asyncEngineCount = 3;
    properties->unifiedAddressing = 1;
    properties->totalConstMem = 65536;
    properties->textureAlignment = 512;
    return kOk;
}

// --- errors: there are none
Error cudaGetLastError() { return kOk; }
Error cudaPeekAtLastError() { return kOk; }
const char* cudaGetErrorString(Error) { return "an error of the null GPU"; }
const char* cudaGetErrorName(Error) { return "nullGpuError"; }

// --- memory
Error cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    *total = kMemoryBytes;
    *free_bytes = kMemoryBytes - used_bytes;
    return kOk;
}
Error cudaMalloc(void** pointer, size_t bytes) {
    note_bytes("ALLOC", "device", bytes);
    std::lock_guard<std::mutex> guard(mutex);
    size_t rounded = (bytes + 0x1fffff) & ~size_t{0x1fffff};
    if (used_bytes + rounded > kMemoryBytes) return cudaErrorMemoryAllocation;
    void* block = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) return cudaErrorMemoryAllocation;
    device_blocks()[reinterpret_cast<uintptr_t>(block)] = rounded;
    used_bytes += rounded;
    *pointer = block;
    return kOk;
}
Error cudaFree(void* pointer) {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = device_blocks().find(reinterpret_cast<uintptr_t>(pointer));
    if (found == device_blocks().end()) return kOk;
    munmap(pointer, found->second);
    used_bytes -= found->second;
    device_blocks().erase(found);
    if (log_file) fprintf(log_file, "FREE|device|\n");
    return kOk;
}
Error cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
Error cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
Error cudaDeviceGetDefaultMemPool(cudaMemPool_t*, int) { return kOk; }
Error cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    note_bytes("ALLOC", "pinned", bytes);
    if (posix_memalign(pointer, 4096, bytes)) return cudaErrorMemoryAllocation;
    std::lock_guard<std::mutex> guard(mutex);
    host_blocks()[reinterpret_cast<uintptr_t>(*pointer)] = bytes;
    return kOk;
}
Error cudaFreeHost(void* pointer) {
    {
        std::lock_guard<std::mutex> guard(mutex);
        host_blocks().erase(reinterpret_cast<uintptr_t>(pointer));
    }
    free(pointer);
    return kOk;
}
Error cudaHostRegister(void*, size_t, unsigned) { return kOk; }
Error cudaHostUnregister(void*) { return kOk; }
Error cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    std::lock_guard<std::mutex> guard(mutex);
    memset(attributes, 0, sizeof *attributes);
    bool on_device = is_in(device_blocks(), pointer), on_host = is_in(host_blocks(), pointer);
    attributes->type = on_device ? cudaMemoryTypeDevice : on_host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    if (on_device || on_host) attributes->devicePointer = const_cast<void*>(pointer);
    if (on_host) attributes->hostPointer = const_cast<void*>(pointer);
    return kOk;
}

// --- copies; a copy without a stream waits for the device
Error cudaMemset(void* pointer, int value, size_t bytes) { fill(pointer, value, bytes); return kOk; }
Error cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
    note_bytes("MEMSET", "memset", bytes);
    fill(pointer, value, bytes);
    return kOk;
}
Error cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
    note_bytes("SYNC", "cudaMemcpy", bytes);
    return copy(target, source, bytes, kind);
}
Error cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    note_bytes("COPY", copy_name(kind), bytes);
    return copy(target, source, bytes, kind);
}
Error cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, cudaStream_t) {
    note_bytes("COPY", "device to device", bytes);
    return copy(target, source, bytes, cudaMemcpyDeviceToDevice);
}
Error cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t width, size_t height, cudaMemcpyKind kind,
                        cudaStream_t) {
    note_bytes("COPY", copy_name(kind), width * height);
    return kOk;
}
Error cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return kOk; }
Error cudaGetSymbolAddress(void** pointer, const void*) {
    static char zeros[4096];
    *pointer = zeros;
    return kOk;
}

// --- streams and events
Error cudaStreamCreate(cudaStream_t* stream) { return any_handle(stream); }
Error cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return any_handle(stream); }
Error cudaStreamDestroy(cudaStream_t) { return kOk; }
Error cudaStreamQuery(cudaStream_t) { return kOk; }
Error cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return kOk; }
Error cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return kOk; }
Error cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                               cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = captures().find(stream);
    bool is_captured = found != captures().end();
    *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = is_captured ? found->second : 0;
    return kOk;
}
Error cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
Error cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    static unsigned long long last = 0;
    std::lock_guard<std::mutex> guard(mutex);
    if (!captures().empty()) return cudaErrorStreamCaptureUnsupported;
    captures()[stream] = ++last;
    num_captured = 0;
    return kOk;
}
Error cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    std::lock_guard<std::mutex> guard(mutex);
    if (!captures().erase(stream)) return cudaErrorIllegalState;
    *graph = reinterpret_cast<cudaGraph_t>(new size_t(num_captured));
    return kOk;
}
Error cudaGraphInstantiateWithFlags(cudaGraphExec_t* launched, cudaGraph_t graph, unsigned long long) {
    *launched = reinterpret_cast<cudaGraphExec_t>(new size_t(*reinterpret_cast<size_t*>(graph)));
    return kOk;
}
Error cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
    note_bytes("GRAPH", "cudaGraphLaunch", *reinterpret_cast<size_t*>(graph));
    return kOk;
}
Error cudaGraphDestroy(cudaGraph_t graph) { delete reinterpret_cast<size_t*>(graph); return kOk; }
Error cudaGraphExecDestroy(cudaGraphExec_t graph) { delete reinterpret_cast<size_t*>(graph); return kOk; }
Error cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* number) {
    if (!nodes) *number = *reinterpret_cast<size_t*>(graph);
    return kOk;
}
Error cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return kOk; }
Error cudaStreamAddCallback(cudaStream_t, void*, void*, unsigned) { return kOk; }
Error cudaLaunchHostFunc(cudaStream_t, void (*function)(void*), void* data) { function(data); return kOk; }
Error cudaEventCreate(cudaEvent_t* event) { return any_handle(event); }
Error cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return any_handle(event); }
Error cudaEventDestroy(cudaEvent_t) { return kOk; }
Error cudaEventRecord(cudaEvent_t, cudaStream_t) { return kOk; }
Error cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return kOk; }
Error cudaEventQuery(cudaEvent_t) { return kOk; }
Error cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { *milliseconds = 5.0f; return kOk; }
Error cudaDeviceSynchronize() { return wait("cudaDeviceSynchronize"); }
Error cudaStreamSynchronize(cudaStream_t) { return wait("cudaStreamSynchronize"); }
Error cudaEventSynchronize(cudaEvent_t) { return wait("cudaEventSynchronize"); }

// --- kernels
void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
    std::lock_guard<std::mutex> guard(mutex);
    kernel_names()[host_function] = name;
}
Error __cudaGetKernel(void** kernel, const void* function) { *kernel = const_cast<void*>(function); return kOk; }
Error __cudaLaunchKernel(void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launch(kernel); }
Error cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return launch(kernel); }
Error cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = device_attribute(97);
    return kOk;
}
Error cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return kOk; }
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* number, const void*, int, size_t, unsigned) {
    *number = 2;
    return kOk;
}
Error cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                       cudaDriverEntryPointQueryResult* result) {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, symbol) : nullptr;
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return kOk;
}
Error cudaProfilerStart() { return kOk; }
Error cudaProfilerStop() { return kOk; }

// --- cuBLAS; a product's detail is its transpositions, rows, columns and inner size, batch, and number of its data type
static Blas product(const char* name, int ta, int tb, long m, long n, long k, long batch, int type) {
    char detail[160];
    snprintf(detail, sizeof detail, "%c%c %ld %ld %ld x%ld t%d", ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k, batch, type);
    null_gpu_note("PRODUCT", name, detail);
    return 0;
}
Blas cublasCreate_v2(void** handle) { any_handle(handle); return 0; }
Blas cublasDestroy_v2(void*) { return 0; }
Blas cublasSetStream_v2(void*, void*) { return 0; }
Blas cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
Blas cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
Blas cublasSetMathMode(void*, int) { return 0; }
Blas cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
Blas cublasSetPointerMode_v2(void*, int) { return 0; }
Blas cublasGemmEx(void*, int ta, int tb, int m, int n, int k, const void*, const void*, int type, int, const void*, int,
                  int, const void*, void*, int, int, int, int) {
    return product("cublasGemmEx", ta, tb, m, n, k, 1, type);
}
Blas cublasGemmStridedBatchedEx(void*, int ta, int tb, int m, int n, int k, const void*, const void*, int type, int,
                                long long, const void*, int, int, long long, const void*, void*, int, int, long long,
                                int batch, int, int) {
    return product("cublasGemmStridedBatchedEx", ta, tb, m, n, k, batch, type);
}
Blas cublasSgemm_v2(void*, int ta, int tb, int m, int n, int k, const float*, const float*, int, const float*, int,
                    const float*, float*, int) {
    return product("cublasSgemm", ta, tb, m, n, k, 1, kFloat);
}
Blas cublasDgemm_v2(void*, int ta, int tb, int m, int n, int k, const double*, const double*, int, const double*, int,
                    const double*, double*, int) {
    return product("cublasDgemm", ta, tb, m, n, k, 1, kDouble);
}
Blas cublasSgemmStridedBatched(void*, int ta, int tb, int m, int n, int k, const float*, const float*, int, long long,
                               const float*, int, long long, const float*, float*, int, long long, int batch) {
    return product("cublasSgemmStridedBatched", ta, tb, m, n, k, batch, kFloat);
}
Blas cublasDgemmStridedBatched(void*, int ta, int tb, int m, int n, int k, const double*, const double*, int, long long,
                               const double*, int, long long, const double*, double*, int, long long, int batch) {
    return product("cublasDgemmStridedBatched", ta, tb, m, n, k, batch, kDouble);
}
Blas cublasSgemv_v2(void*, int ta, int m, int n, const float*, const float*, int, const float*, int, const float*,
                    float*, int) {
    return product("cublasSgemv", ta, 0, m, 1, n, 1, kFloat);
}

// --- cuBLASLt: descriptors keep what the log prints
size_t cublasLtGetVersion() { return 130000; }
struct Layout {
    int type;
    uint64_t rows, columns;
};
struct Operation {
    int transpose_a, transpose_b, epilogue;
};
struct Heuristic {  // cublasLtMatmulHeuristicResult_t
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
Blas cublasLtMatmulDescCreate(void** operation, int, int) { *operation = calloc(1, sizeof(Operation)); return 0; }
Blas cublasLtMatmulDescDestroy(void* operation) { free(operation); return 0; }
Blas cublasLtMatmulDescSetAttribute(void* operation, int attribute, const void* value, size_t bytes) {
    auto* stated = static_cast<Operation*>(operation);
    int number = 0;
    if (bytes == sizeof number) memcpy(&number, value, bytes);
    if (attribute == 3) stated->transpose_a = number;
    if (attribute == 4) stated->transpose_b = number;
    if (attribute == 7) stated->epilogue = number;
    return 0;
}
Blas cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t) {
    *layout = new Layout{type, rows, columns};
    return 0;
}
Blas cublasLtMatrixLayoutDestroy(void* layout) { delete static_cast<Layout*>(layout); return 0; }
Blas cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return 0; }
Blas cublasLtMatmulPreferenceCreate(void** preference) { any_handle(preference); return 0; }
Blas cublasLtMatmulPreferenceDestroy(void* preference) { free(preference); return 0; }
Blas cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
Blas cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* found,
                                    int* number) {
    memset(found, 0, sizeof *found);
    found->waves = 1;
    *number = 1;
    return 0;
}
Blas cublasLtMatmul(void*, void* operation, const void*, const void*, void* layout_a, const void*, void*, const void*,
                    const void*, void*, void*, void* layout_d, const void*, void*, size_t, void*) {
    auto *a = static_cast<Layout*>(layout_a), *d = static_cast<Layout*>(layout_d);
    auto* stated = static_cast<Operation*>(operation);
    char name[48];
    snprintf(name, sizeof name, "cublasLtMatmul, epilogue %d", stated->epilogue);
    return product(name, stated->transpose_a, stated->transpose_b, d->rows, d->columns,
                   stated->transpose_a ? a->rows : a->columns, 1, a->type);
}

}  // extern "C"
