"""The smallest runs for tests of training: a tiny GPT, drawn samples with many documents' ends, the plain twin's view.

Everything that makes a batch or a first weight here is also what the reference is given.
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
from megazero.parallel.launch import Launch
from megazero.train.build import RunComponents, assemble, build_components, check_checkpoint
from megazero.train.check import check
from megazero.train.inputs import RunInputs
from megazero.train.loop import train

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
    """Sample k is drawn from k; a share of its tokens that grows with k is EOD, so no two ranks mask alike."""

    seq_length: int = LENGTH

    def sample(self, k: int) -> NDArray[np.int64]:
        draw = np.random.default_rng(k)
        tokens = draw.integers(0, VOCAB, self.seq_length + 1)
        tokens[draw.random(self.seq_length + 1) < (k % 4) / 4] = EOD
        return tokens


def tiny_run(**settings: Any) -> RunConfig:
    """The tiny run with some settings of its own."""
    return make_run(**{**TINY, **settings})


def core_on_rank(
    rank: int, config: RunConfig, *, tp: int = 1, dp: int = 1, pp: int = 1, is_late: bool = True
) -> RunComponents:
    """Model and engine on a worker's mesh."""
    mesh = mesh_in_worker(rank, tp=tp, dp=dp, pp=pp, is_late=is_late)
    return build_components(config, mesh, FusedBuffers(0, mesh.device), vocab_size=VOCAB)


def reference_batch(first: int, size: int, *, masked: bool) -> Batch:
    """Samples [first, first + size) as the plain twin takes them."""
    rows = torch.from_numpy(np.stack([DrawnSamples().sample(k) for k in range(first, first + size)]))
    tokens, labels = rows[:, :-1], rows[:, 1:]
    return Batch(tokens, labels, (tokens != EOD).double() if masked else None)


def owned_boxes(core: RunComponents) -> list[Saved]:
    """What this rank owns of the state, for `support.training.assemble`."""
    return [box for fragment in core.engine.owned_state() for box in boxes(fragment)]


class Told(NamedTuple):
    """Why a run ended, and what it printed."""

    reason: str
    text: str


def train_run(rank: int, size: int, settings: dict[str, Any], inputs: RunInputs | None = None) -> Told:
    """A whole run as the program makes it, on one rank of `size`."""
    config, launch, printed = tiny_run(**settings), Launch(rank, size, rank), io.StringIO()
    with contextlib.redirect_stdout(printed):
        checked = check(config, launch)
        check_checkpoint(config, checked)
        reason = train(assemble(config, launch, CPU, inputs or checked))
    return Told(reason, printed.getvalue())
