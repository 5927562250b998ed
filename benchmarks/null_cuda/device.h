// What the runtime and the driver of the null GPU have in common: the figures of an H200, and the log of calls.
#pragma once
#include <cstddef>

constexpr size_t kMemoryBytes = 150754820096ull;
constexpr char kName[] = "NVIDIA H200";
constexpr int kVersion = 13000;  // CUDA 13.0

// Returns a device attribute by its number, which cudaDeviceAttr and CUdevice_attribute share; 1 for those that nothing
// here depends on.
inline int device_attribute(int attribute) {
    switch (attribute) {
        case 1: case 2: case 3: return 1024;         // threads of a block, and along x and y
        case 4: return 64;                           // threads along z
        case 5: return 2147483647;                   // blocks along x
        case 6: case 7: return 65535;                // blocks along y and z
        case 8: return 49152;                        // shared memory of a block
        case 10: return 32;                          // threads of a warp
        case 12: case 82: return 65536;              // registers of a block, of a multiprocessor
        case 13: return 1980000;                     // clock, kHz
        case 16: return 132;                         // multiprocessors
        case 36: return 3201000;                     // memory clock, kHz
        case 37: return 6144;                        // memory bus, bits
        case 38: return 62914560;                    // level-2 cache
        case 39: return 2048;                        // threads of a multiprocessor
        case 75: return 9;                           // compute capability 9.0
        case 76: return 0;
        case 81: return 233472;                      // shared memory of a multiprocessor
        case 97: return 232448;                      // shared memory of a block that asks for more than the default
        case 106: return 32;                         // blocks of a multiprocessor
        default: return 1;
    }
}

// Starts a log in the file, or ends it (nullptr).  Every call that a GPU would work or wait for is a line of it,
// `kind|name|detail`; the kinds are KERNEL, PRODUCT, MEMSET, COPY, SYNC, ALLOC and FREE.
extern "C" __attribute__((weak)) void null_gpu_log(const char* path);
extern "C" __attribute__((weak)) void null_gpu_note(const char* kind, const char* name, const char* detail);
