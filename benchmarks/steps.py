"""Training steps of a configuration on one process: what they hold, and whether they are possible under a limit.

A step is the one that pretrain_gpt.py runs, on made-up samples, with one micro-batch.  What it holds is the ledger's
word, and so is its refusal: the ledger raises MemoryLimitError at the operation that goes beyond the limit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jobs import Place, run_job

from megazero.comm.build import make_mesh
from megazero.config import derived, rules
from megazero.config.cli import parse
from megazero.config.run import RunConfig
from megazero.data.loader import MicroBatch, StepBatch
from megazero.data.mock import MockSamples
from megazero.errors import ConfigError, MemoryLimitError, raise_problems
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_interface import AnyLedger
from megazero.train.build import build_core, step_parts, topology
from megazero.train.step import StepControls, training_step

MODEL_STATES = ("parameters", "gradients", "master", "moments")
LR = 3e-4
_FLAGS = ("--mock-data", "--train-iters", "1", "--lr", str(LR), "--hidden-dropout", "0", "--attention-dropout", "0")


def configuration(settings: Mapping[str, Any], world_size: int) -> RunConfig:
    """The run that a user gets by these flags (`num_layers=8` is --num-layers 8) on so many processes."""
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config = parse([*_FLAGS, *words], world_size=world_size).config
    raise_problems(ConfigError, rules.check(config, world_size))
    return config


class Steps:
    """The training of one configuration on this process."""

    def __init__(self, config: RunConfig, place: Place, ledger: AnyLedger | None = None) -> None:
        layout = topology(config, place.launch.world_size)
        self.tokens = config.training.micro_batch_size * config.model.seq_length
        buffers = FusedBuffers(0, place.device, ledger=ledger)
        self.mesh = make_mesh(layout, place.launch.rank, place.device, buffers)
        assert config.model.vocab_size is not None, "made-up samples have a stated vocabulary"
        self.core = build_core(config, self.mesh, buffers, vocab_size=config.model.vocab_size, ledger=ledger)
        self.parts = step_parts(config, self.core)
        self._rows = config.training.micro_batch_size
        self._samples = MockSamples(config.model.vocab_size, config.model.seq_length, seed=1)
        assert derived.num_micro_batches(config, layout.world_size) == 1, "a step has one micro-batch"

    def batch(self, number: int) -> StepBatch:
        """This process's samples of one step."""
        first = (number * self.mesh.topology.dp + self.mesh.coordinate("dp")) * self._rows
        rows = torch.stack([torch.from_numpy(self._samples.sample(first + row)) for row in range(self._rows)])
        return StepBatch(first, [MicroBatch(first, rows[:, :-1], rows[:, 1:], None)])

    def take(self, batch: StepBatch) -> float:
        """One step, to its end on the device; its loss."""
        return training_step(self.parts, batch, StepControls(LR, 1.0)).loss.item()

    def close(self) -> None:
        """Wait for what is in flight, and let go of the model."""
        self.core.engine.close()


@dataclass(frozen=True)
class Held:
    """A process's second step, in bytes.

    model_states: alive at its end, and all through it.  peak: the most alive at once; checkpoints, buffers: of
    activations and of communication, at the peak.  host: in host memory.  sent: by axis.  numel: parameters of this
    process, in elements.
    """

    model_states: int
    checkpoints: int
    buffers: int
    peak: int
    host: int
    sent: Mapping[str, int]
    numel: int

    @property
    def rest(self) -> int:
        """At the peak: what a layer needs while it is computed again, gradients on their way, temporaries."""
        return self.peak - self.model_states - self.checkpoints - self.buffers


def hold(place: Place, config: RunConfig, limit_bytes: int | None) -> Held:
    """Two steps under the ledger: the first makes moments and buffers, the second is measured."""
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
    )


def held(config: RunConfig, world_size: int, *, device: str, limit_bytes: int | None = None) -> Held | None:
    """Figures of the fullest process of a job, or None where the limit refuses the steps."""
    try:
        ranks: list[Held] = run_job(world_size, hold, config, limit_bytes, device=device)
    except MemoryLimitError:
        return None
    return max(ranks, key=lambda rank: rank.peak)


def crossing(limit: float, points: Sequence[tuple[int, int]]) -> int:
    """Where a straight line through two points (number, bytes) has its last whole number with at most `limit` bytes.

    The larger of the two numbers where the line doesn't rise, and at most four times that: further on it is a guess.
    """
    (first, low), (second, high) = points
    if high <= low:
        return second
    return min(int((limit - low) * (second - first) // (high - low)) + first, 4 * second)


def largest_that_fits(fits: Callable[[int], bool], guess: int) -> int:
    """The number n >= 1 with fits(n) and not fits(n + 1), both tried; 0 if 1 doesn't fit.

    From the guess in steps that double until the answer is enclosed, then by bisection: a good guess costs two trials.
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
