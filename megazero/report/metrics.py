"""Defines the metrics of a run: host figures of a step, of a rank, of an interval and of an evaluation.

*Model FLOPs* are the floating-point operations in the mathematics of the model, however they are computed; their
rate against the device's peak is the *MFU*, model FLOPs utilisation (PaLM, appendix B).
A token costs 6 Psi + 12 L s h: two operations a weight forward and four backward, and the two s x s products of
attention in each of L blocks, counted in full although the mask hides half.  Psi is the number of weights that take
part in a matrix product: the blocks' four matrices and the LM head over the unpadded vocabulary.  A tied embedding is
the head and counts once; looking a row up costs nothing, nor do positions, biases and layer norms to this accuracy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megazero.config import derived
from megazero.config.model import ModelConfig
from megazero.report.part_times import PartTimes
from megazero.units import format_bytes

# exp(20) is 485 million: beyond it a perplexity has no meaning.
MAX_LOG_PERPLEXITY = 20.0

# (part of a device's name, peak of dense bf16/fp16 matrix products in TFLOP/s, from the makers' data sheets); the first
# part that the name contains counts.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("V100", 125.0),
)


@dataclass(frozen=True)
class StepMetrics:
    """The figures of one training step, read back from the device.

    consumed_samples: samples of all steps so far.  loss: mean over the global batch's tokens.
    grad_norm: the norm before clipping; infinite or NaN in a step that overflowed.  lr: the rate that this step used.
    tokens_per_second: the rate of the whole run.  tflops_per_device: model TFLOP/s of one process's device.
    mfu: fraction of the device's peak, None where no peak is known.
    timers: seconds of this process in parts of the step.  part_times: those of all, at log intervals, else None.
    overflow_parameter: the first parameter that overflowed, empty unless the step was skipped.
    data_wait_seconds: the time that this process waited for its batch.
    statistics: figures of weights, moments and gradients by name (`megazero.zero.statistics`), where they were taken.
    pipeline_idle_share: the idle part of the pipeline stages' time in a step that was traced, 0 to 1; else None.
    seq_length: the tokens of the step's rows, which a curriculum cuts; None where they are not reported.
    """

    iteration: int
    consumed_samples: int
    global_batch_size: int
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    step_seconds: float
    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None = None
    overflow_parameter: str = ""
    timers: Mapping[str, float] = field(default_factory=dict)
    pipeline_idle_share: float | None = None
    data_wait_seconds: float = 0.0
    statistics: Mapping[str, float] = field(default_factory=dict)
    part_times: PartTimes | None = None
    seq_length: int | None = None


@dataclass(frozen=True)
class RankMetrics:
    """The bytes that one rank held and sent in a step.

    model_state_bytes: {"parameters" | "gradients" | "master" | "moments": bytes} on the device.
    host_state_bytes, file_state_bytes: the same in host memory, and in files.
    comm_bytes: {axis: {collective: bytes}}.  bytes_across_nodes: those of them that went to other nodes.
    ledger: `StepLedger.to_json`, empty without a ledger.
    data_wait_seconds: the time that this rank waited for its batch.
    device_memory_bytes: `StepMemory.device_bytes`, empty on a CPU.
    """

    peak_memory_bytes: int
    model_state_bytes: Mapping[str, int]
    comm_bytes: Mapping[str, Mapping[str, int]]
    ledger: Mapping[str, Any] = field(default_factory=dict)
    data_wait_seconds: float = 0.0
    device_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    host_state_bytes: Mapping[str, int] = field(default_factory=dict)
    file_state_bytes: Mapping[str, int] = field(default_factory=dict)
    bytes_across_nodes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def traffic_line(sent: Mapping[str, Mapping[str, int]], across: Mapping[str, Mapping[str, int]]) -> str:
    """Return a rank's traffic by axis and by link as text; "" if nothing went to other nodes.

    sent, across: `RankMetrics.comm_bytes` and `bytes_across_nodes`.
    """
    if not across:
        return ""
    totals = {axis: sum(by_collective.values()) for axis, by_collective in sent.items()}
    parts = (
        f"{axis} {format_bytes(total)} ({format_bytes(sum(across.get(axis, {}).values()))} to other nodes)"
        for axis, total in totals.items()
        if total and axis not in ("host", "file")
    )
    return f"sent by this rank in the first step: {', '.join(parts)}"


@dataclass(frozen=True)
class Evaluation:
    """The loss on one split ("validation" or "test") after `iteration` steps.

    loss: in nats per token.  bytes_per_token: bytes of the corpus's text per token; None when it has no sidecar.
    group: the name of the group of corpora that was evaluated, "" without groups.
    """

    iteration: int
    consumed_samples: int
    split: str
    loss: float
    bytes_per_token: float | None = None
    group: str = ""

    @property
    def perplexity(self) -> float:
        """The perplexity, exp(loss), with the loss capped at `MAX_LOG_PERPLEXITY`; NaN stays NaN."""
        return math.exp(self.loss if math.isnan(self.loss) else min(self.loss, MAX_LOG_PERPLEXITY))

    @property
    def bits_per_byte(self) -> float | None:
        """The bits the model needs for one byte of text, comparable across tokenizers."""
        return self.loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None


class StepPicture(NamedTuple):
    """The picture of a step as SVG; title: "ledger" or "pipeline"."""

    title: str
    iteration: int
    svg: str


def matmul_parameters(config: ModelConfig, *, vocab_size: int) -> int:
    """Return the number of weights that take part in matrix products; vocab_size is that of the unpadded vocabulary."""
    return config.num_layers * derived.block_matrices(config) + vocab_size * config.hidden_size


def flops_per_token(config: ModelConfig, *, vocab_size: int) -> int:
    """Return the model FLOPs of one token's forward and backward: 6 Psi + 12 L s a d."""
    return 6 * matmul_parameters(config, vocab_size=vocab_size) + config.seq_length * attention_flops(config)


def attention_flops(config: ModelConfig) -> int:
    """Return the model FLOPs of a token's attention for each token of its row, 12 L a d."""
    return 12 * config.num_layers * config.num_attention_heads * derived.head_width(config)


def peak_tflops(device_name: str, *, precision: str) -> float | None:
    """Return the dense peak of a device by its torch.cuda.get_device_name; None when it is not in the table.

    Only bf16 and fp16 have one: that of fp32 depends on whether TF32 is allowed.
    """
    if precision not in ("bf16", "fp16"):
        return None
    return next((peak for name, peak in PEAK_TFLOPS if name in device_name), None)


@dataclass(frozen=True)
class Rates:
    """The speed of a run of `world_size` processes, each with a device of `device_peak_tflops` (None: not known).

    flops_per_token: of rows of `seq_length` tokens.  attention_flops: those of a token for each token of its row.
    """

    flops_per_token: int
    world_size: int
    device_peak_tflops: float | None = None
    seq_length: int = 0
    attention_flops: int = 0

    def of_length(self, length: int) -> "Rates":
        """Return the rates of a step whose rows have `length` tokens."""
        fewer = self.seq_length - length
        flops = self.flops_per_token - fewer * self.attention_flops
        return replace(self, flops_per_token=flops, seq_length=length) if fewer else self

    def tokens_per_second(self, num_tokens: int, *, seconds: float) -> float:
        """Return the tokens per second of the whole run; 0 when no time has passed."""
        return num_tokens / seconds if seconds > 0 else 0.0

    def tflops_per_device(self, num_tokens: int, *, seconds: float) -> float:
        """Return the model TFLOP/s of one device when the run takes `seconds` for `num_tokens`."""
        rate = self.tokens_per_second(num_tokens, seconds=seconds)
        return rate * self.flops_per_token / self.world_size / 1e12

    def mfu(self, num_tokens: int, *, seconds: float) -> float | None:
        """Return the share of the device's peak that model FLOPs use."""
        if self.device_peak_tflops is None:
            return None
        return self.tflops_per_device(num_tokens, seconds=seconds) / self.device_peak_tflops


@dataclass(frozen=True)
class IntervalMetrics:
    """The figures of the steps between two log lines.

    last: the interval's last step, whose rate, loss scale and gradient norm the line shows.
    loss: mean over the steps that were not skipped, None when all were.
    step_seconds, tokens_per_second, tflops_per_device, mfu: averages over the interval.
    num_skipped, num_nan: steps that were skipped, and steps whose loss was infinite or NaN.
    data_wait_seconds: spent waiting for batches, summed over the steps.
    """

    last: StepMetrics
    loss: float | None
    step_seconds: float
    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None
    num_skipped: int
    num_nan: int
    data_wait_seconds: float = 0.0

    def eta_seconds(self, train_iters: int, train_samples: int | None = None) -> float:
        """Return the seconds until step `train_iters` at the interval's pace.

        train_samples: what the run will have consumed then, where steps still grow; None: all steps are like the last.
        """
        if train_samples is None:
            return max(train_iters - self.last.iteration, 0) * self.step_seconds
        return max(train_samples - self.last.consumed_samples, 0) / self.last.global_batch_size * self.step_seconds


def interval_metrics(steps: Sequence[StepMetrics]) -> IntervalMetrics:
    """Return the averages over `steps`, at least one, in order."""
    losses = [step.loss for step in steps if not step.skipped]
    seconds = sum(step.step_seconds for step in steps)
    fractions = [step.mfu * step.step_seconds for step in steps if step.mfu is not None]
    return IntervalMetrics(
        last=steps[-1],
        loss=sum(losses) / len(losses) if losses else None,
        step_seconds=seconds / len(steps),
        # Rates are weighted by time, so that they are the interval's tokens over the interval's seconds.
        tokens_per_second=_over_time([step.tokens_per_second * step.step_seconds for step in steps], seconds),
        tflops_per_device=_over_time([step.tflops_per_device * step.step_seconds for step in steps], seconds),
        mfu=_over_time(fractions, seconds) if len(fractions) == len(steps) else None,
        num_skipped=sum(step.skipped for step in steps),
        num_nan=sum(not math.isfinite(step.loss) for step in steps),
        data_wait_seconds=sum(step.data_wait_seconds for step in steps),
    )


def _over_time(amounts: Sequence[float], seconds: float) -> float:
    return sum(amounts) / seconds if seconds > 0 else 0.0
