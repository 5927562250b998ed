"""Functions of DeepSpeed's `deepspeed.runtime.utils` that training programs call."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as clip_by_torch
from torch.utils._pytree import tree_map_only

from megazero.deepspeed.accelerator import get_accelerator
from megazero.deepspeed.missing import refuse
from megazero.operating_system import peak_resident_bytes
from megazero.units import format_bytes


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print, on rank 0, the device's memory and the most host memory of this process; nothing unless `force` is set."""
    if not force or (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
        return
    device = get_accelerator()
    figures = {
        "allocated": device.memory_allocated(),
        "at most": device.max_memory_allocated(),
        "reserved": device.memory_reserved(),
        "of the process at most": peak_resident_bytes(),
    }
    print(message, *(f"{name} {format_bytes(count)}" for name, count in figures.items()), sep=" | ", flush=True)


def move_to_device(item: Any, device: torch.device | str) -> Any:
    """Return the item with the tensors in it, however nested in lists, tuples and mappings, on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), item)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Clip gradients as torch does; raise UsageError where an engine clips them, or the model is divided by an mpu."""
    if mpu is not None:
        rule = "the norm of gradients that tensor-parallel ranks share is taken by the engine"
        raise refuse("clip_grad_norm_(mpu=...)", rule, "gradient_clipping in the configuration")
    return clip_by_torch(parameters, max_norm, norm_type)
