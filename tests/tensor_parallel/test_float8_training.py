"""Training with 8-bit products has nearly the losses of bf16, and the same losses in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import LLAMA
from support.processes import run_ranks
from support.training import Cell, Outcome, max_relative, train_on_rank, write_text_corpus

from megazero.tensor_parallel import float8
from megazero.tensor_parallel.float8 import Quantised

pytestmark = pytest.mark.gloo

STEPS = 7
# Bounds on the relative difference of losses, which fall by a quarter; they are some four times what was measured.
NEAR = 0.012  # between 8-bit products and bf16
SAME = 2e-3  # between layouts, which sum gradients in another order

# All layers of this model have sizes that 8-bit products support, also when tensor parallelism cuts them in two.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "accumulate_allreduce_grads_in_fp32": True,
}


def cell(fp8_format: str | None = "hybrid", *, tp: int = 1, dp: int = 1, pp: int = 1, **settings: Any) -> Cell:
    """Return a cell of the test matrix: ten steps of two micro-batches in bf16 with some layout and format."""
    stage = settings.pop("zero_stage", 0)
    accumulation = settings.pop("accumulation", 2 // dp)
    chosen = {**SIZES, "fp8_format": fp8_format, **settings}
    return Cell(
        tp=tp, dp=dp, pp=pp, stage=stage, accumulation=accumulation, precision="bf16", steps=STEPS, settings=chosen
    )


def losses(found: list[Outcome]) -> list[float]:
    assert all(outcome.losses == found[0].losses for outcome in found)
    return found[0].losses


def train(chosen: Cell, prefix: str) -> list[float]:
    return losses(run_ranks(chosen.world_size, train_on_rank, chosen, prefix))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def in_bf16(prefix: str) -> list[float]:
    found = train(cell(None), prefix)
    assert found[-1] < 0.75 * found[0]
    return found


@pytest.fixture(scope="module")
def in_fp8(prefix: str) -> list[float]:
    return train(cell(), prefix)


def is_near(found: list[float], expected: list[float], bound: float) -> bool:
    """Return True if all losses are finite and within the bound of the expected ones."""
    return bool(torch.isfinite(torch.tensor(found)).all()) and max_relative(found, expected) <= bound


@pytest.mark.parametrize(
    "chosen",
    [
        cell("e4m3"),
        cell(tp=2, dp=2, sequence_parallel=True, zero_stage=2),
        cell(pp=2, pipeline_schedule="zero-bubble"),
    ],
    ids=str,
)
def test_losses_are_near_those_of_bf16(chosen: Cell, prefix: str, in_bf16: list[float]) -> None:
    found = train(chosen, prefix)
    assert is_near(found, in_bf16, NEAR)
    assert max_relative(found, in_bf16) > 1e-4, "products were those of bf16"


@pytest.mark.parametrize("chosen", [cell(dp=2, zero_stage=3), cell(recompute_granularity="full")], ids=str)
def test_layouts_of_the_same_micro_batches_agree(
    chosen: Cell, prefix: str, in_fp8: list[float], in_bf16: list[float]
) -> None:
    """Layouts agree because each scale is computed from a whole weight or micro-batch, on whichever rank it is."""
    found = train(chosen, prefix)
    assert found[:2] == pytest.approx(in_fp8[:2], rel=1e-6), "the first step is of learning rate 0"
    assert is_near(found, in_fp8, SAME)
    assert is_near(in_fp8, in_bf16, NEAR) and not is_near(in_fp8, in_bf16, 1e-4)


def train_with_inverted_scales(rank: int, chosen: Cell, prefix: str) -> Outcome:
    quantise = float8.quantise

    def inverted(x: torch.Tensor, dtype: torch.dtype, **orders: bool) -> Quantised:
        found = quantise(x, dtype, **orders)
        return found._replace(scale=1 / found.scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "quantise", inverted)
        return train_on_rank(rank, chosen, prefix)


def test_inverted_scales_are_seen(prefix: str, in_bf16: list[float]) -> None:
    assert not is_near(losses(run_ranks(1, train_with_inverted_scales, cell(), prefix)), in_bf16, 4 * NEAR)


# With one group and two ranks the product of keys and values stays in bf16; with two it is of 8-bit numbers.  Scales
# are those of a rank's slice of a matrix, so layouts are as near as number formats.
@pytest.mark.parametrize("groups", [1, 2])
def test_llamas_have_the_same_losses_in_every_layout(prefix: str, groups: int) -> None:
    settings = {**LLAMA, "ffn_hidden_size": 128, "group_query_attention": True, "num_query_groups": groups}
    plain = train(cell(None, **settings), prefix)
    alone = train(cell(**settings), prefix)
    assert alone != plain and max_relative(alone, plain) < NEAR
    for layout in ({"tp": 2, "sequence_parallel": True}, {"dp": 2, "zero_stage": 3, "fp8_cache_weights": True}):
        assert max_relative(train(cell(**layout, **settings), prefix), alone) < NEAR
