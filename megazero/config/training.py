"""Batch, length of the run, evaluation and planned exits."""

from typing import Literal

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingConfig:
    """A step takes one global batch: each data-parallel process runs its share as micro-batches."""

    micro_batch_size: int = setting(
        help="samples of one forward pass on one data-parallel process",
        unit="samples",
        aliases=("batch-size",),
        ge=1,
    )
    global_batch_size: int | None = setting(
        None, help="samples of one step; without it, micro_batch_size x data-parallel size", unit="samples", ge=1
    )
    train_iters: int | None = setting(None, help="length of the run; or give train_samples", unit="steps", ge=1)
    train_samples: int | None = setting(None, help="length of the run; or give train_iters", unit="samples", ge=1)
    seed: int = setting(1234, help="fixes initial weights, order of the samples and dropout", ge=0, lt=2**32)
    eval_iters: int = setting(100, help="global batches of one evaluation; 0 evaluates nothing", unit="steps", ge=0)
    eval_interval: int = setting(1000, help="steps between evaluations", unit="steps", ge=1)
    eval_at_start: bool = setting(False, help="evaluate before the first step as well")
    exit_interval: int | None = setting(
        None, help="save and exit at the next step that this divides", unit="steps", ge=1
    )
    exit_duration_in_mins: float | None = setting(
        None, help="save and exit once the run has taken this long", unit="minutes", gt=0
    )
    compile: Literal["auto", "on", "off"] = setting(
        "auto",
        help="compile transformer blocks with torch.compile, which takes some seconds before the first step; auto is on"
        " for GPUs, off on CPUs",
    )
    attention_backend: Literal["auto", "flash", "fused", "efficient", "unfused"] = setting(
        "auto",
        help="kernel that computes attention: FlashAttention, cuDNN's (fused), the memory-efficient one, or plain"
        " products; auto is the fastest on the GPU, measured at the start, and torch's choice on CPUs",
    )
    exit_status_when_stopped: int | None = setting(
        None,
        help="exit status of a run that has saved and stopped before its last step: by a signal, at exit_interval or"
        " after exit_duration_in_mins; without it 0, as of a run that has finished",
        beyond="0 to 3 tell of finished runs and of errors, those above 125 of signals",
        ge=4,
        le=125,
    )
