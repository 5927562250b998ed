"""Number formats of the run, of its 8-bit matrix products, and fp16's loss scale."""

from typing import Literal

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting

Fp8Format = Literal["e4m3", "hybrid"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PrecisionConfig:
    """Working precision; fp16 and bf16 keep fp32 master weights and moments."""

    precision: Literal["fp64", "fp32", "bf16", "fp16"] = setting(
        "fp32", help="number format of parameters and computation; --fp64 --fp32 --bf16 --fp16 for short"
    )
    accumulate_allreduce_grads_in_fp32: bool = setting(
        False, help="with bf16 or fp16, add up and reduce gradients in fp32; 2 more bytes a gradient element"
    )
    fp8_format: Fp8Format | None = setting(
        None,
        help="with bf16, make the matrix products of the blocks' linear layers of 8-bit numbers; hybrid: e4m3, but e5m2"
        " for gradients of outputs; --fp8 for hybrid",
    )
    loss_scale: float | None = setting(None, help="fp16: constant loss scale; without it, the scale is dynamic", gt=0)
    initial_loss_scale: float = setting(2.0**32, help="fp16: first dynamic loss scale", gt=0)
    min_loss_scale: float = setting(1.0, help="fp16: the dynamic loss scale never gets smaller", gt=0)
    loss_scale_window: int = setting(
        1000, help="fp16: steps without an overflow before the scale doubles", unit="steps", ge=1
    )
    hysteresis: int = setting(2, help="fp16: overflows before the scale is halved", unit="steps", ge=1)
    consecutive_hysteresis: bool = setting(
        False, help="fp16: a step without an overflow refills the hysteresis; false: only a growing scale does"
    )
    max_skipped_steps_at_min_loss_scale: int = setting(
        20,
        help="fp16: after this many skipped steps in a row at the minimum scale the run saves and stops",
        unit="steps",
        ge=1,
    )
