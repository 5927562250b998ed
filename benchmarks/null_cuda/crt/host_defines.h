// The macros of CUDA's header of that name, which its pip package leaves out, for a compiler that makes no device code.
#pragma once
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ inline
#define __host__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
