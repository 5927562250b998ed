"""Weights that are quantised once a step give bitwise the training of weights that every product quantises anew."""

from typing import Any

import pytest
import torch
from support.float8_runs import (
    LAYERS,
    SIZES,
    STEPS,
    Layout,
    Ran,
    batch_of,
    build,
    check_bitwise,
    evaluated,
    ran,
    ran_all,
)
from support.processes import run_ranks
from support.small_runs import VOCAB, core_on_rank, tiny_run
from torch import Tensor
from torch._dynamo.utils import counters

from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.tensor_parallel import float8
from megazero.tensor_parallel.float8 import Float8Products, float8_products, quantise_weight, search_weight
from megazero.train.build import build_components, step_context
from megazero.train.step import StepControls, training_step

pytestmark = pytest.mark.gloo

CACHED = {"fp8_cache_weights": True}
ALONE = [
    Layout({}),
    Layout({"zero_stage": 3, "recompute_granularity": "full"}),
    Layout({"zero_stage": 2, "recompute_granularity": "selective", "overlap_comm": False}),
]
IN_PAIRS = [
    Layout({"zero_stage": 1}, dp=2),
    Layout({"zero_stage": 3, "param_persistence_threshold": 0, "recompute_granularity": "full"}, dp=2),
    Layout({"sequence_parallel": True}, tp=2),
    Layout({"pipeline_schedule": "zero-bubble", "zero_stage": 2}, pp=2),
]


@pytest.mark.parametrize("layouts", [ALONE, IN_PAIRS], ids=["one process", "two processes"])
def test_training_is_bitwise_the_same(layouts: list[Layout]) -> None:
    size = layouts[0].dp * layouts[0].tp * layouts[0].pp
    both = [*layouts, *(each.having(**CACHED) for each in layouts)]
    for results in run_ranks(size, ran_all, both):
        for layout, anew, cached in zip(layouts, results, results[len(layouts) :], strict=False):
            check_bitwise(cached, anew)
            assert len({loss for loss, _ in anew.figures}) == STEPS and len(set(anew.evaluations)) in (0, STEPS)
            changes = STEPS if layout.pp > 1 else STEPS + 1  # the last update is followed by an evaluation
            assert (anew.quantised, cached.quantised) == (0, changes * LAYERS * 4 // layout.pp), layout


def values_that_are_loaded(rank: int, stage: int) -> tuple[float, float, float]:
    """Return evaluations of changed weights, by products that quantise anew, and that have quantised other values."""
    losses = []
    for cached in (False, True):
        core, context = build(rank, Layout({"zero_stage": stage, "fp8_cache_weights": cached}))
        training_step(context, batch_of(core, 0), StepControls(1e-2, 1.0))
        before = evaluated(core)
        for fragment in core.engine.wanted_state():
            if fragment.kind == "weight":
                fragment.tensor.mul_(1.5)
        core.engine.state_loaded()
        losses.append(evaluated(core))
        core.engine.close()
    return before, losses[0], losses[1]


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_that_are_loaded_are_quantised_anew(stage: int) -> None:
    [(before, anew, cached)] = run_ranks(1, values_that_are_loaded, stage)
    assert cached == anew != before


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("make", [quantise_weight, search_weight])
def test_products_of_a_quantised_weight(make: Any) -> None:
    """Products of a weight that is quantised beforehand are bitwise those that quantise it, and do not read it."""
    x, weight, grad = drawn(32, 48, seed=0), drawn(64, 48, seed=1), drawn(32, 64, seed=2)
    anew = float8_products("hybrid")
    held = Float8Products(float8.E5M2, weight=make(weight))
    read = torch.full_like(weight, torch.nan) if make is quantise_weight else weight
    assert torch.equal(held.output(x, read, None), anew.output(x, weight, None))
    assert torch.equal(held.input_gradient(grad, read), anew.input_gradient(grad, weight))
    assert torch.equal(held.weight_gradient(grad, x), anew.weight_gradient(grad, x))


def test_other_layers_are_left_alone() -> None:
    """A layer whose sizes 8-bit products do not support has no 8-bit form, and computes as before."""
    odd = Layout({"ffn_hidden_size": 72})
    [[anew, cached]] = run_ranks(1, ran_all, [odd, odd.having(**CACHED)])
    check_bitwise(cached, anew)
    assert cached.quantised == LAYERS * 2 * (STEPS + 1)


def bytes_of_parameters(rank: int, stage: int) -> list[tuple[int, int]]:
    """Return the bytes of parameters at a step's peak, and those that the 8-bit form counts, without it and with it."""
    found = []
    for cached in (False, True):
        config = tiny_run(**{**SIZES, "zero_stage": stage, "fp8_cache_weights": cached})
        with Ledger(torch.device("cpu")) as ledger:
            mesh = core_on_rank(rank, config, is_late=False).mesh
            core = build_components(config, mesh, FusedBuffers(0, mesh.device), vocab_size=VOCAB, ledger=ledger)
            for step in range(2):
                ledger.reset()
                training_step(step_context(config, core), batch_of(core, step), StepControls(1e-3, 1.0))
            taken = ledger.take()
            assert taken is not None
            found.append((taken.peaks["parameters"], 0 if core.weights is None else core.weights.kept_bytes))
            core.engine.close()
    return found


def test_the_ledger_counts_them() -> None:
    [[(plain, _), (with_values, kept)]] = run_ranks(1, bytes_of_parameters, 1)
    assert kept == LAYERS * 12 * 32 * 32 * 2
    assert with_values == plain + kept + LAYERS * 4 * 4
    [[(plain, _), (with_maxima, kept)]] = run_ranks(1, bytes_of_parameters, 3)
    assert (with_maxima, kept) == (plain + LAYERS * 4 * 4, 0)


def compiled_and_not(rank: int, settings: dict[str, Any]) -> tuple[Ran, Ran, int, int]:
    """Return a run as it is and with its blocks compiled, the number of graphs, and that of breaks in them."""
    torch._dynamo.reset()
    counters.clear()
    # AOTAutograd makes backward graphs too, for twice the time.
    backend, original = "aot_eager" if settings == DELAYED else "eager", torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch, "compile", lambda function, **options: original(function, **options | {"backend": backend})
        )
        off, on = (ran(rank, Layout({**CACHED, **settings, "compile": choice})) for choice in ("off", "on"))
    return off, on, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


# Whole blocks, for training and for evaluation; or their parts, likewise: attention, the activation, between the two,
# after them; and the activation's backward.
WHOLE, PARTS = 2, 9
DELAYED = {"fp8_recipe": "delayed"}
IN_PARTS = {**DELAYED, "recompute_granularity": "selective", "fp8_cache_weights": False}


@pytest.mark.parametrize(
    ("settings", "of_blocks"),
    [
        ({"zero_stage": 3}, WHOLE),
        (DELAYED, WHOLE),
        (IN_PARTS, PARTS),
    ],
    ids=str,
)
def test_compiled_blocks_read_them(settings: dict[str, Any], of_blocks: int) -> None:
    """All compiled blocks share one graph for training and one for evaluation; weights are quantised outside of it.

    Delayed scales are the same too: compiled code records maxima, in forward and in backward.
    """
    [(off, on, graphs, breaks)] = run_ranks(1, compiled_and_not, settings)
    check_bitwise(on, off)
    assert on.quantised == off.quantised and breaks == 0
    of_head = 3
    assert graphs == of_blocks + of_head
