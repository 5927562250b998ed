"""AdamW on flat tensors, through torch's fused kernel.

The kernel wants gradients in the master weights' dtype, so each run of gradients is scaled into a leased constant-size
buffer on its way; unscaling and clipping are one factor there.  `found_inf` travels into the kernel: on overflow
weights, moments and step count stay untouched, without a branch on the host.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.comm.interface import Scratch


@dataclass(frozen=True)
class AdamWSettings:
    """Constants of the optimizer (Loshchilov and Hutter, arXiv 1711.05101); weight decay is decoupled."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class AdamWRun(NamedTuple):
    """One contiguous run of equal treatment: one-dimensional views of the same length."""

    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    decay: bool


class StepInputs(NamedTuple):
    """What one optimizer step depends on beside the state; the tensors have no dimensions.

    lr: learning rate.  factor: what gradients are multiplied with (unscaling and clipping).  found_inf: float32, 1 when
    the step is to be skipped; None where overflow is no subject.
    """

    lr: float
    factor: Tensor
    found_inf: Tensor | None


def advance(step: Tensor, inputs: StepInputs) -> None:
    """Count one optimizer step in `step` (float32, no dimensions), unless it is skipped."""
    step.add_(1.0 if inputs.found_inf is None else 1.0 - inputs.found_inf)


def adamw(run: AdamWRun, settings: AdamWSettings, step: Tensor, inputs: StepInputs, *, buffers: Scratch) -> None:
    """Update one run in place; `step` has been advanced."""
    with_buffer = buffers.lease(run.master.numel(), run.master.dtype)
    gradient = with_buffer.tensor.copy_(run.gradient).mul_(inputs.factor)
    torch._fused_adamw_(
        [run.master],
        [gradient],
        [run.exp_avg],
        [run.exp_avg_sq],
        [],
        [step],
        lr=inputs.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay if run.decay else 0.0,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=inputs.found_inf,
    )
    with_buffer.release()
