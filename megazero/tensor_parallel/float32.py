"""Sets the precision of fp32 products on GPUs: exact, or TF32, whose factors have 10 bits of mantissa instead of 23."""

from collections.abc import Iterator

import torch

from megazero.config.engine_sections import PrecisionConfig
from megazero.errors import ConfigError, Problem

_CAPABILITY = (8, 0)  # of GPUs with TF32 products


def use_tf32(precision: PrecisionConfig, device: torch.device, *, given: str = "--tf32") -> Iterator[str]:
    """Let fp32 products of this process be TF32's if the settings allow it; yield notices for the user.

    Without the setting nothing is changed: torch's default is exact, and the user's program may have decided otherwise.
    given: the setting as messages name it.  Raises ConfigError where the device has no TF32.
    """
    if precision.precision != "fp32":
        return
    if precision.tf32:
        check_tf32(device, given)
        # torch's older setting, since it keeps its older and its newer ones consistent, which the newer one doesn't.
        torch.backends.cuda.matmul.allow_tf32 = True
        yield f"{given}: fp32 products are TF32's, with 10 bits of mantissa, and are summed up in fp32"
    elif device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision != "tf32":
        yield f"fp32 products run at full precision; {given} rounds their factors to TF32, about ten times as fast"


def check_tf32(device: torch.device, given: str) -> None:
    """Raise ConfigError if the device has no TF32 products."""
    rule = f"TF32 products are those of GPUs of compute capability {'.'.join(map(str, _CAPABILITY))} or more (Ampere)"
    if device.type != "cuda":
        raise ConfigError(Problem(f"{given} on a CPU", rule, f"leave out {given}"))
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        has = ".".join(map(str, capability))
        name = torch.cuda.get_device_name(device)
        raise ConfigError(Problem(f"{given} on {name} (compute capability {has})", rule, f"leave out {given}"))
