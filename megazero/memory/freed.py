"""Memory that the C library keeps when it has been freed.

Making a model leaves holes: first values are drawn in pieces, and dropped.  The C library keeps them for its next
allocations, which on a CPU are activations of other sizes, so a process grows by what it might have used again.
"""

import ctypes

import torch


def return_freed_memory(device: torch.device) -> bool:
    """Give what lies free to the system, on a CPU whose C library can (glibc); whether there was any."""
    if device.type != "cpu":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
