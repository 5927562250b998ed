"""Makes the figures of training steps for tests of reports."""

from typing import Any

from megazero.report.metrics import StepMetrics


def make_step(iteration: int, **changes: Any) -> StepMetrics:
    """Return the figures of a step of 8 samples that takes a second; `changes` are fields with other values."""
    fields: dict[str, Any] = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "global_batch_size": 8,
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "loss_scale": 1.0,
        "skipped": False,
        "step_seconds": 1.0,
        "tokens_per_second": 100.0,
        "tflops_per_device": 10.0,
    }
    return StepMetrics(**{**fields, **changes})
