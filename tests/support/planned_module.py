"""Trains modules of odd shapes by `megazero.initialize` on real ranks, and compares what a dry rank takes."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from support.irregular_model import Awkward
from support.planned_step import MOMENT, REPETITIONS, Figures, differing, figures_of, figures_of_record
from torch import Tensor, nn

import megazero
from megazero.memory.ledger import Ledger
from megazero.parallel.nodes import Nodes
from megazero.planner.module import ModuleJob, module_job, run_module_rank, take_step
from megazero.planner.trace import Part
from megazero.report.ledger_report import traffic

VOCABULARY, WIDTH, ROWS, LENGTH = 53, 24, 3, 11
PARTS: tuple[Part, ...] = ("start-up", "first step", "steady step")


class _Layer(nn.Module):
    """Attention and a bottleneck whose activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.bottleneck = nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Dropout(0.1), nn.Linear(7, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            self.attention(self.norm(x)).unflatten(-1, (3, 4, WIDTH // 4)).movedim(-3, 0).transpose(2, 3)
        )
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        recomputed: Tensor = megazero.recompute(self.bottleneck, x)
        return x + recomputed


class Tied(nn.Module):
    """A language model whose head is its embedding, with a frozen adapter, running statistics and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.adapter = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5, 3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.linspace(0, 1, LENGTH)[:, None])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.to(self.embedding.weight)
        x = self.statistics(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.adapter(x))
        return scores


def _tokens() -> Tensor:
    return torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY


def _loss_of_tokens(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _loss_of_rows(model: Any, rows: Tensor) -> Tensor:
    loss: Tensor = model(rows).square().mean()
    return loss


KINDS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[Any, Any], Tensor]]] = {
    "awkward": (Awkward, lambda: torch.ones(5, 7), _loss_of_rows),
    "tied": (Tied, _tokens, _loss_of_tokens),
}


def differences(rank: int, world_size: int, kind: str, config: dict[str, Any], made_in_parts: bool) -> list[str]:
    """Return where no repetition of this rank has the figure of its dry run; a collective call."""
    model_fn, batch, loss_fn = KINDS[kind]
    job = module_job(
        model_fn, config, batch, Nodes((world_size,)), loss_fn=loss_fn, is_gpu=False, made_in_parts=made_in_parts
    )
    real = _real(job, config)
    dry = {name: figures_of_record(part) for name, part in run_module_rank(job, rank).parts.items()}
    if made_in_parts:  # a program's Init sends over groups of its own, which no meter of an engine counts
        del dry["start-up"]["traffic"]
        real["start-up"] = [{name: each for name, each in real["start-up"][0].items() if name != "traffic"}]
    return [f"{part}, {line}" for part in PARTS for line in differing(part, dry[part], real[part])]


def _real(job: ModuleJob, config: dict[str, Any]) -> dict[str, list[Figures]]:
    """Return the figures of every repetition of every part of this rank, which computes; a collective call."""
    found: dict[str, list[Figures]] = {name: [] for name in PARTS}
    with Ledger(torch.device("cpu")) as ledger:
        with megazero.zero.Init(config_dict_or_path=config) if job.made_in_parts else contextlib.nullcontext():
            model = job.model_fn()
        engine = megazero.initialize(model, config, ledger=ledger)

        def take(name: Part) -> None:
            time.sleep(MOMENT)
            memory = ledger.take()
            counts = {axis: {n: tuple(c) for n, c in row.items()} for axis, row in traffic(engine.mesh.meter).items()}
            found[name].append(figures_of(memory, counts))
            engine.mesh.meter.reset()

        take("start-up")
        take_step(engine, job)
        take("first step")
        for _ in range(REPETITIONS):
            take_step(engine, job)
            take("steady step")
        engine.close()
    return found
