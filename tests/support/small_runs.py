"""The smallest runs for tests of training: a tiny GPT, random samples with many document ends, and reference batches.

Runs and the plain reference train on the same samples.
"""

import contextlib
import io
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from support.configs import make_run
from support.processes import mesh_in_worker
from support.reference import Batch
from support.training import Saved, boxes

from megazero.config.run import RunConfig
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import open_ledger
from megazero.parallel.launch import Launch
from megazero.train.build import assemble, build_components, check_checkpoint
from megazero.train.components import RunComponents
from megazero.train.loop import train
from megazero.train.start.check import check
from megazero.train.start.inputs import RunInputs

CPU = torch.device("cpu")
VOCAB = 29
LENGTH = 8
EOD = 3

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
    "micro_batch_size": 2,
    "train_iters": 5,
    "lr": 1e-2,
    "lr_decay_style": "constant",
    "precision": "fp64",
    "reduce_bucket_size": 700,
    "eval_iters": 0,
    "num_workers": 0,
}


@dataclass(frozen=True)
class DrawnSamples:
    """A dataset whose sample k is drawn with seed k; a share (k % 4) / 4 of its tokens is EOD, so that masks differ."""

    seq_length: int = LENGTH

    def loss_mask(self, k: int) -> None:
        """Every token is learnt."""

    def sample(self, k: int) -> NDArray[np.int64]:
        draw = np.random.default_rng(k)
        tokens = draw.integers(0, VOCAB, self.seq_length + 1)
        tokens[draw.random(self.seq_length + 1) < (k % 4) / 4] = EOD
        return tokens


def tiny_run(**settings: Any) -> RunConfig:
    """Return the tiny run with `settings` over its own."""
    return make_run(**{**TINY, **settings})


def core_on_rank(
    rank: int, config: RunConfig, *, tp: int = 1, dp: int = 1, pp: int = 1, is_late: bool = True
) -> RunComponents:
    """Build the model and the engine of a run on a worker's mesh."""
    mesh = mesh_in_worker(rank, tp=tp, dp=dp, pp=pp, is_late=is_late)
    return build_components(config, mesh, FusedBuffers(0, mesh.device), vocab_size=VOCAB)


def reference_batch(first: int, size: int, *, masked: bool) -> Batch:
    """Return the samples [first, first + size) as a batch of the plain reference; `masked`: EOD tokens do not count."""
    rows = torch.from_numpy(np.stack([DrawnSamples().sample(k) for k in range(first, first + size)]))
    tokens, labels = rows[:, :-1], rows[:, 1:]
    return Batch(tokens, labels, (tokens != EOD).double() if masked else None)


def owned_boxes(core: RunComponents) -> list[Saved]:
    """Return the boxes of the state that this rank owns, for `support.training.assemble`."""
    return [box for fragment in core.engine.owned_state() for box in boxes(fragment)]


class Told(NamedTuple):
    """The reason why a run ended, and the text it printed."""

    reason: str
    text: str


def train_run(
    rank: int,
    size: int,
    settings: dict[str, Any],
    inputs: RunInputs | None = None,
    ranks_per_node: tuple[int, ...] = (),
) -> Told:
    """Make a whole run as the program does, on one rank of `size`; ranks_per_node: as the launcher gives it."""
    config, launch, printed = tiny_run(**settings), Launch(rank, size, rank, ranks_per_node), io.StringIO()
    with contextlib.redirect_stdout(printed):
        checked = check(config, launch)
        check_checkpoint(config, checked, size)
        with open_ledger(CPU, kept=config.logging.ledger) as ledger:
            reason = train(assemble(config, launch, CPU, inputs or checked, ledger=ledger))
    return Told(reason, printed.getvalue())
