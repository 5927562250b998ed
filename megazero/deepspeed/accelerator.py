"""The device of this process under DeepSpeed's names: the current GPU, or the CPU where torch sees no GPU."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from megazero.deepspeed.missing import missing_name

# Functions of torch.cuda that programs call through the accelerator, and what they return on a CPU.
_ON_CPU: Mapping[str, int | None] = MappingProxyType(
    {
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), 0),
        **dict.fromkeys(("empty_cache", "reset_max_memory_allocated", "reset_peak_memory_stats", "synchronize"), None),
    }
)
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)


class Accelerator:
    """The kind of device that this machine's processes train on.

    Functions of torch.cuda that have no meaning on a CPU, such as memory_allocated, return 0 or do nothing there.
    """

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"

    def __getattr__(self, name: str) -> Any:
        if name not in _ON_CPU:
            raise missing_name(name, "get_accelerator()")
        return getattr(torch.cuda, name) if self._name == "cuda" else lambda *_: _ON_CPU[name]

    def is_available(self) -> bool:
        """Return True: there always is a device."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu", "cuda", or "cuda:N" of a device's index."""
        return self._name if device_index is None or self._name == "cpu" else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return a context in which a GPU is the current one; on a CPU one that does nothing."""
        return torch.cuda.device(device_index) if self._name == "cuda" else torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Make a GPU the current one."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """Return the index of the current GPU; 0 on a CPU."""
        return torch.cuda.current_device() if self._name == "cuda" else 0

    def current_device_name(self) -> str:
        """Return "cpu", or "cuda:N" of the current GPU."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Return the number of GPUs that this process sees; 1 on a CPU."""
        return torch.cuda.device_count() if self._name == "cuda" else 1

    def communication_backend_name(self) -> str:
        """Return the backend of collectives."""
        return "nccl" if self._name == "cuda" else "gloo"

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generators of all devices."""
        torch.manual_seed(seed)

    manual_seed = manual_seed_all

    def is_bf16_supported(self) -> bool:
        """Return True if the device computes in bf16."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Return True: every device computes in fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating-point formats that the device computes in."""
        return [each for each in _FORMATS if each is not torch.bfloat16 or self.is_bf16_supported()]


def get_accelerator() -> Accelerator:
    """Return the kind of device that this process trains on."""
    return Accelerator()
