"""The loss scale as a pure transition function.

fp16 gradients below 6e-8 are zero, so the loss is multiplied by a *loss scale* before backward and the gradients are
divided by it before the update.  An *overflow* (an infinity or a NaN in a gradient) skips the step.  A *static* scale
never moves.  A *dynamic* one doubles after a *window* of good steps and halves on overflow, but only once the
*hysteresis* - the number of overflows that it tolerates - is used up; growing refills the hysteresis (Micikevicius et
al., arXiv 1710.03740, section 3.2, with Megatron-LM's meaning of the four figures).

Other formats need no scale: for bf16, fp32 and fp64 it is the static scale 1.  `megazero.zero.step` detects overflows,
from the gradient norms of `megazero.optim.grad_norm`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megazero.config.engine_sections import PrecisionConfig
from megazero.errors import DamageError, Problem

GROWTH = 2.0
BACKOFF = 0.5
_SMALLEST = 2.0**-126  # a scale is a normal number of fp32, by which gradients can be divided


@dataclass(frozen=True)
class LossScale:
    """The state of the loss scale between two steps.

    scale: the factor of the next step's loss.
    good_steps: steps without overflow since the last overflow or growth.
    hysteresis_left: overflows that are still tolerated before the scale halves.
    skips_at_minimum: steps skipped in a row while the scale could fall no further.
    """

    scale: float
    good_steps: int = 0
    hysteresis_left: int = 1
    skips_at_minimum: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the state as a checkpoint stores it."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "LossScale":
        """Restore a checkpoint's state; raise `DamageError` if a field is missing, unknown or out of range."""
        expected = {"scale": float, "good_steps": int, "hysteresis_left": int, "skips_at_minimum": int}
        if set(saved) != set(expected) or any(type(saved[name]) is not kind for name, kind in expected.items()):
            rule = "a saved loss scale has the numbers " + ", ".join(expected)
            raise DamageError(Problem(f"the checkpoint's loss scale {str(dict(saved))[:200]}", rule))
        if not math.isfinite(saved["scale"]) or saved["scale"] <= 0 or min(saved.values()) < 0:
            given = f"the checkpoint's loss scale {str(dict(saved))[:200]}"
            raise DamageError(Problem(given, "a loss scale is a positive number, and its counts are not negative"))
        return cls(**saved)


@dataclass(frozen=True)
class LossScaler:
    """The transition function of the loss scale, and its constants.

    initial, minimum: the first and the least value; equal for a static scale.
    window: good steps before it doubles.  hysteresis: overflows before it halves.
    consecutive_hysteresis: True if a good step between overflows resets their count.
    max_skips_at_minimum: steps skipped in a row at the minimum after which the run is `exhausted`.
    """

    initial: float
    minimum: float
    dynamic: bool
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    max_skips_at_minimum: int = 20

    @classmethod
    def from_config(cls, config: PrecisionConfig, *, autocast: str | None = None) -> "LossScaler":
        """Make the scaler: in fp16 static with --loss-scale and dynamic without it; else the static scale 1.

        autocast: the format of torch.autocast around a model in fp32, which scales in fp16 too.
        """
        scales = "fp16" in (config.precision, autocast)
        dynamic = scales and config.loss_scale is None
        fixed = config.loss_scale if scales and config.loss_scale is not None else 1.0
        return cls(
            initial=config.initial_loss_scale if dynamic else fixed,
            minimum=max(config.min_loss_scale, _SMALLEST) if dynamic else fixed,
            dynamic=dynamic,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
            consecutive_hysteresis=config.consecutive_hysteresis,
            max_skips_at_minimum=config.max_skipped_steps_at_min_loss_scale,
        )

    def start(self) -> LossScale:
        """Return the state before the first step."""
        return LossScale(scale=self.initial, hysteresis_left=self.hysteresis)

    def after_step(self, state: LossScale, *, overflow: bool) -> LossScale:
        """Return the state after one step, which was skipped if there was an `overflow`."""
        return self._after_overflow(state) if overflow else self._after_good_step(state)

    def exhausted(self, state: LossScale) -> bool:
        """Return True if `max_skips_at_minimum` steps in a row were skipped at the minimum."""
        return state.skips_at_minimum >= self.max_skips_at_minimum

    def exhaustion(self, state: LossScale, *, cause: str) -> Problem:
        """Return the problem of an `exhausted` scale; cause: where the last step's first overflow was, in words."""
        return Problem(
            f"{state.skips_at_minimum} steps in a row overflowed at loss scale {state.scale:g}; in the last, {cause}",
            "training goes on while the loss scale can still fall or a step succeeds",
            "a lower --lr, a longer warm-up, a lower --clip-grad, or --bf16",
        )

    def _after_overflow(self, state: LossScale) -> LossScale:
        at_minimum = not self.dynamic or state.scale <= self.minimum
        state = replace(state, good_steps=0, skips_at_minimum=state.skips_at_minimum + 1 if at_minimum else 0)
        if not self.dynamic:
            return state
        # The hysteresis stays used up until the scale has grown again: in a bad stretch every overflow halves.
        left = max(state.hysteresis_left - 1, 0)
        scale = state.scale if left > 0 else max(state.scale * BACKOFF, self.minimum)
        return replace(state, hysteresis_left=left, scale=scale)

    def _after_good_step(self, state: LossScale) -> LossScale:
        state = replace(state, skips_at_minimum=0)
        if not self.dynamic:
            return state
        if self.consecutive_hysteresis:
            state = replace(state, hysteresis_left=self.hysteresis)
        if state.good_steps + 1 < self.window:
            return replace(state, good_steps=state.good_steps + 1)
        return replace(state, good_steps=0, scale=state.scale * GROWTH, hysteresis_left=self.hysteresis)
