"""What the GPU of this machine can do, if there is one."""

import torch


def has_8bit_gpu() -> bool:
    """Return True if there is a GPU with matrix products of 8-bit numbers."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
