"""Runs training steps of a configuration on one process, to measure what they hold and whether they fit under a limit.

A step is the one that pretrain_gpt.py runs, on made-up samples, with as many micro-batches and pipeline stages as the
configuration has, at a constant learning rate.  The bytes that it holds are counted by the ledger, which refuses a step
beyond a limit: it raises MemoryLimitError at the operation that exceeds it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs import Place, run_job
from report import tell

from megazero.comm.startup import make_mesh
from megazero.command_line.parse import parse
from megazero.config.run import RunConfig
from megazero.data.loader import StepBatch, build_step_batch
from megazero.data.mock import MockSamples
from megazero.errors import ConfigError, MemoryLimitError, raise_problems
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_interface import AnyLedger
from megazero.model.compiled import check_compiler
from megazero.optim.loss_scaler import LossScaler
from megazero.rules import run as rules
from megazero.tensor_parallel.float32 import use_tf32
from megazero.train.attention_kernel import check_attention
from megazero.train.build import batch_layout, build_components, step_context
from megazero.train.determinism import use_deterministic_mode
from megazero.train.start.check import topology
from megazero.train.step import StepControls, training_step

MODEL_STATES = ("parameters", "gradients", "master", "moments")
LR = 3e-4
_FLAGS = ("--mock-data", "--train-iters", "1", "--lr", str(LR), "--hidden-dropout", "0", "--attention-dropout", "0")


def configuration(settings: Mapping[str, Any], world_size: int) -> RunConfig:
    """Return the configuration that these flags (`num_layers=8` is --num-layers 8) make on so many processes.

    Raises ConfigError with all that is wrong.
    """
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return configuration_of(words, world_size)


def configuration_of(words: Sequence[str], world_size: int) -> RunConfig:
    """Return the configuration that the words of a command line make; raises ConfigError with all that is wrong."""
    config = parse([*_FLAGS, *words], world_size=world_size).config
    raise_problems(ConfigError, rules.check(config, world_size))
    return config


class Steps:
    """The training of one configuration on this process, with the kernels that pretrain_gpt.py chooses.

    tokens: those of one process in a step.  ledger: one that is kept, under which --compile auto compiles nothing.
    """

    def __init__(self, config: RunConfig, place: Place, ledger: AnyLedger | None = None) -> None:
        check_attention(config.training.attention_backend, place.device)
        notices = [*use_deterministic_mode(config, place.device)]
        layout = topology(config, place.launch.world_size)
        buffers = FusedBuffers(0, place.device, ledger=ledger)
        self.mesh = make_mesh(layout, place.launch.rank, place.device, buffers)
        assert config.model.vocab_size is not None, "made-up samples have a stated vocabulary"
        self.core = build_components(config, self.mesh, buffers, vocab_size=config.model.vocab_size, ledger=ledger)
        self.parts = step_context(config, self.core)
        notices += [
            *use_tf32(config.precision, place.device),
            *check_compiler(config.training.compile, place.device, keeps_ledger=ledger is not None),
        ]
        for line in filter(None, (*notices, self.core.attention.line)) if place.launch.rank == 0 else ():
            tell(line)
        self._samples = MockSamples(config.model.vocab_size, config.model.seq_length, seed=1)
        self._layout = batch_layout(config, self.mesh, eod=None)
        self.tokens = self._layout.global_batch_size // layout.dp * config.model.seq_length
        self._lr = config.optimizer.lr
        self._scaler = LossScaler.from_config(config.precision)
        self._scale = self._scaler.start()

    def batch(self, number: int) -> StepBatch:
        """Return this process's samples of one step."""
        return build_step_batch(self._samples, number * self._layout.global_batch_size, self._layout)

    def take(self, batch: StepBatch) -> float:
        """Take one step, wait for its end on the device, and return its loss."""
        report = training_step(self.parts, batch, StepControls(self._lr, self._scale.scale))
        loss: float = report.loss.item()
        if self.parts.checks_overflow:
            self._scale = self._scaler.after_step(self._scale, overflow=bool(report.skipped.item()))
        return loss

    def close(self) -> None:
        """Wait for communication in flight, and release the model."""
        self.core.engine.close()


@dataclass(frozen=True)
class Held:
    """The bytes that a process holds and sends in its second step.

    model_states: alive at its end, and all through it.  peak: the most alive at once; checkpoints, buffers: activation
    checkpoints and communication buffers at the peak.  host: in host memory.  sent: by axis.  numel: parameters of this
    process, in elements.  at_peak: bytes at the peak by the ledger's category.
    """

    model_states: int
    checkpoints: int
    buffers: int
    peak: int
    host: int
    sent: Mapping[str, int]
    numel: int
    at_peak: Mapping[str, int] = field(default_factory=dict)

    @property
    def rest(self) -> int:
        """The other bytes at the peak: what recomputing a layer needs, gradients on their way, temporaries."""
        return self.peak - self.model_states - self.checkpoints - self.buffers


def hold(place: Place, config: RunConfig, limit_bytes: int | None) -> Held:
    """Take two steps under the ledger, the first of which makes moments and buffers, and measure the second."""
    with Ledger(place.device, limit_bytes=limit_bytes) as ledger:
        steps = Steps(config, place, ledger)
        for number in range(2):
            batch = steps.batch(number)
            steps.mesh.meter.reset()
            ledger.reset()
            steps.take(batch)
        step, live = ledger.take(), ledger.live_bytes()
        host = ledger.elsewhere_bytes()
    sent = {axis: sum(table.values()) for axis, table in steps.mesh.meter.bytes_by_axis().items()}
    return Held(
        model_states=sum(live[category] for category in MODEL_STATES),
        checkpoints=step.at_peak["activation_checkpoints"],
        buffers=step.at_peak["communication_buffers"],
        peak=step.peak_bytes,
        host=host,
        sent=sent,
        numel=sum(parameter.numel() for parameter in steps.core.model.parameters()),
        at_peak=dict(step.at_peak),
    )


def held(config: RunConfig, world_size: int, *, device: str, limit_bytes: int | None = None) -> Held | None:
    """Return the figures of the fullest process of a job, or None where the limit refuses the steps."""
    try:
        ranks: list[Held] = run_job(world_size, hold, config, limit_bytes, device=device)
    except MemoryLimitError:
        return None
    return max(ranks, key=lambda rank: rank.peak)


def crossing(limit: float, points: Sequence[tuple[int, int]]) -> int:
    """Return the last whole number at which a line through two points (number, bytes) has at most `limit` bytes.

    It is the larger of the two numbers where the line doesn't rise, and at most four times that, since further away the
    line is no more than a guess.
    """
    (first, low), (second, high) = points
    if high <= low:
        return second
    return min(int((limit - low) * (second - first) // (high - low)) + first, 4 * second)


def largest_that_fits(fits: Callable[[int], bool], guess: int) -> int:
    """Return the number n >= 1 with fits(n) and not fits(n + 1), both of which are tried; 0 if 1 doesn't fit.

    The search goes from the guess in steps that double until the answer is enclosed, then by bisection, so that a good
    guess costs two trials.
    """
    low, high, step = max(guess, 1), max(guess, 1) + 1, 1
    if fits(low):
        while fits(high):
            low, high, step = high, high + 2 * step, 2 * step
    else:
        while True:
            low, high, step = low - step, low, 2 * step
            if low < 1:
                low = 0
                break
            if fits(low):
                break
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
