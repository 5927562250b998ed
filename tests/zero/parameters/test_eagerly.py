"""A user's compiled blocks stay compiled in stage 3: what gathers parameters is not traced."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.irregular_model import alone
from torch import Tensor, nn

import megazero

WIDTH, BLOCKS = 6, 10  # more blocks than torch's limit of compilations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Stack(nn.Module):
    """A model of equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def losses(stage: int, compiles: Callable[[Stack, Any], object], graphs: list[Any]) -> list[float]:
    """Train and evaluate a model that `compiles` has prepared; `graphs` gets every graph that is compiled."""

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    torch.manual_seed(1)
    model = Stack().double()
    compiles(model, backend)
    config = {
        "zero": {"zero_stage": stage},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": "SGD", "lr": 0.1},
    }
    engine = megazero.initialize(model, config, mesh=alone())
    x, found = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3), []
    for _ in range(3):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            found += [loss.item(), engine(x).sum().item()]
    engine.close()
    return found


def nothing(model: Stack, backend: Any) -> None:
    """Leave the model as it is."""


def each_block(model: Stack, backend: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


@pytest.mark.filterwarnings("error:.*recompile_limit.*")
def test_stage_3_compiles_what_stage_0_compiles() -> None:
    """The blocks share their graphs, and what is computed is what it is without compilation."""
    graphs: dict[int, list[Any]] = {0: [], 3: []}
    plain = losses(3, nothing, [])
    for stage, found in graphs.items():
        assert losses(stage, each_block, found) == pytest.approx(plain, rel=1e-12)
    assert 0 < len(graphs[3]) <= len(graphs[0]) <= 8
    operations = [sum(len(graph.graph.nodes) for graph in found) for found in graphs.values()]
    assert operations[0] == operations[1]
