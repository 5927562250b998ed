"""Tests of GatheredParameters, which reads and changes weights outside a forward on all ranks, in every ZeRO stage."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.diverging_ranks import ROUTES, TIMEOUT_SECONDS
from support.irregular_model import (
    Awkward,
    Options,
    alone,
    batch,
    engine_around,
    loss_of,
    make_engine,
    make_model,
    take_step,
)
from support.processes import mesh_in_worker, run_ranks
from support.training import Saved, assemble, boxes
from support.warm_python import warm_python
from torch import Tensor, nn

from megazero.errors import UsageError
from megazero.zero.engine import Engine
from megazero.zero.parameters.gathered import GatheredParameters, register_external_parameter
from megazero.zero.parameters.guard import PartitionedParameter

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
Values = dict[str, Tensor]


def values(model: nn.Module) -> Values:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def whole_values(model: nn.Module) -> Values:
    with GatheredParameters(model):
        return values(model)


def train(engine: Engine, model: Awkward, rank: int, steps: range) -> None:
    """Take some steps on two ranks."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        engine.begin_step()
        x, y = batch(step, dtype)
        engine.backward(loss_of(model, x.chunk(2)[rank], y.chunk(2)[rank]), is_last=True)
        take_step(engine)


def saved_by(engine: Engine) -> list[Saved]:
    return [box for fragment in engine.owned_state() for box in boxes(fragment) if fragment.kind == "weight"]


def read_everything(rank: int, stage: int) -> list[Values]:
    """Read all values by module, by list and by parameter, and once more after two steps."""
    model, engine, _ = make_engine(rank, Options(stage=stage, dp=2))
    found = [whole_values(model)]
    with GatheredParameters([*model.parameters(), model.scale]):
        found.append(values(model))
    one_by_one = {}
    for name, parameter in model.named_parameters():
        with GatheredParameters(parameter):
            one_by_one[name] = parameter.detach().clone()
    found.append(one_by_one)
    train(engine, model, rank, range(2))
    found.append(whole_values(model))
    left = engine.gathered_numel[0]
    engine.close()
    return [*found, {"left": torch.tensor(left)}]


@pytest.mark.gloo
@STAGES
def test_values_are_whole_in_the_block(stage: int) -> None:
    first, second = run_ranks(2, read_everything, stage)
    expected = values(make_model())
    for found in first[:3]:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first[3]["first.weight"], expected["first.weight"]) and not first[4]["left"]


def change_on(rank: int, stage: int, precision: str, modifier: int) -> tuple[Values, list[Saved]]:
    """Write the right values on one rank only; return the working parameters then, and the state after two steps."""
    model, engine, _ = make_engine(rank, Options(stage=stage, dp=2, precision=precision))
    train(engine, model, rank, range(1))
    with GatheredParameters(model, modifier_rank=modifier), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1 if rank == modifier else torch.nan)
    at_once = whole_values(model)
    train(engine, model, rank, range(1, 3))
    engine.close()
    return at_once, saved_by(engine)


def plain_after_the_change(precision: str) -> Values:
    """Do the same on one rank without a block: take a step, write 0.1 everywhere, and take two steps."""
    (weights,) = run_ranks(1, change_alone, precision)
    return weights


def change_alone(rank: int, precision: str) -> Values:
    model, engine, _ = make_engine(rank, Options(stage=0, dp=1, precision=precision))
    dtype = next(model.parameters()).dtype
    for step in range(3):
        engine.begin_step()
        engine.backward(loss_of(model, *batch(step, dtype)), is_last=True)
        take_step(engine)
        if step == 0:
            for piece in engine.wanted_state():
                if piece.kind == "weight":
                    piece.tensor.fill_(torch.tensor(0.1, dtype=dtype))
            engine.state_loaded()
    engine.close()
    return assemble(saved_by(engine))


@pytest.mark.gloo
@pytest.mark.parametrize(("precision", "modifier"), [("fp64", 1), ("bf16", 0)])
@STAGES
def test_the_changes_of_one_rank_become_everyones(stage: int, precision: str, modifier: int) -> None:
    """Changes reach all ranks' working parameters at once, and master weights too, or the next step would undo them."""
    outcomes = run_ranks(2, change_on, stage, precision, modifier)
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}[precision]
    for at_once, _ in outcomes:
        assert all(bool((value == torch.tensor(0.1, dtype=dtype)).all()) for value in at_once.values())
    trained = assemble(piece for _, saved in outcomes for piece in saved)
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if precision == "fp64" else {"rtol": 1e-2, "atol": 2e-3}
    torch.testing.assert_close(trained, plain_after_the_change(precision), **tolerance)


def change_without_saying(rank: int, zero: dict[str, Any]) -> bool:
    model = make_model()
    engine = engine_around(model, mesh_in_worker(rank, dp=2), **zero)
    x = batch(0)[0]
    with torch.no_grad():
        for _ in range(2):  # the second pass prefetches
            expected = model(x)
        with GatheredParameters(model):
            for parameter in model.parameters():
                parameter.fill_(7.0)
        nothing_left = engine.gathered_numel[0] == 0
        same = torch.equal(model(x), expected)
    engine.close()
    return nothing_left and same


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [{}, {"max_reuse_distance": 10**6}])
def test_changes_without_a_modifier_are_lost(zero: dict[str, Any]) -> None:
    """Changes without a modifier rank are lost, even those of the unit that the next pass begins with."""
    assert run_ranks(2, change_without_saying, zero) == [True, True]


def change_under_checks(rank: int, writes: bool) -> tuple[str, int, bool]:
    """Write on rank 1 without a modifier; return the error, the elements still gathered, and whether reading passes."""
    model = make_model()
    zero = {"enable_sanity_checks": True, "param_persistence_threshold": 6}
    engine = engine_around(model, mesh_in_worker(rank, dp=2), **zero)
    text = ""
    try:
        with GatheredParameters(model):
            if rank == 1 and writes:
                model.first.weight.data.add_(1.0)
                model.scale.data.mul_(2.0)
    except UsageError as error:
        text = str(error)
    with GatheredParameters(model.first), GatheredParameters(model, modifier_rank=0), torch.no_grad():
        model.first.weight.fill_(0.5)
    left = engine.gathered_numel[0]
    with GatheredParameters(model.first.weight):
        stored = bool((model.first.weight == 0.5).all())
    engine.close()
    return text, left, stored


@pytest.mark.gloo
@pytest.mark.parametrize("writes", [True, False])
def test_changes_without_a_modifier_are_an_error_on_every_rank_where_checked(writes: bool) -> None:
    for text, left, stored in run_ranks(2, change_under_checks, writes):
        assert ("scale, first.weight changed in GatheredParameters on some rank" in text) == writes
        assert ("modifier_rank=0" in text) == writes and left == 0 and stored


def move(model: nn.Module) -> None:
    """Write by assignments that give parameters other memory; vector_to_parameters makes them views of one vector."""
    vector = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    nn.utils.vector_to_parameters(0.5 * vector, model.parameters())
    model.scale.data = torch.full_like(model.scale, 0.25)
    with torch.no_grad():
        model.first.bias.set_(torch.full_like(model.first.bias, 0.75))
    model.middle.weight.data = model.middle.weight.data.t().contiguous().t()


def move_in_block(rank: int, precision: str) -> tuple[Values, Values]:
    """Move parameters on data-parallel rank 0 for good, and on rank 1 in a block that stores nothing."""
    model, engine, _ = make_engine(rank, Options(stage=3, dp=2, precision=precision))
    expected = make_model().to(next(model.parameters()).dtype)
    move(expected)
    with GatheredParameters(model, modifier_rank=0):
        if rank == 0:
            move(model)
    with GatheredParameters(model):
        model.scale.data = torch.zeros_like(model.scale)
    found = whole_values(model)
    train(engine, model, rank, range(1))
    engine.close()
    return found, values(expected)


@pytest.mark.gloo
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_values_that_are_assigned_in_the_block_count(precision: str) -> None:
    for found, expected in run_ranks(2, move_in_block, precision):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_another_form_in_the_block_is_refused_and_undone() -> None:
    model = make_model()
    engine = engine_around(model, alone())
    before = whole_values(model)
    with pytest.raises(UsageError, match="scale, which has become another"), GatheredParameters(model, modifier_rank=0):
        model.scale.data = model.scale.data.half()
    assert engine.gathered_numel[0] == 0
    torch.testing.assert_close(whole_values(model), before, rtol=0, atol=0)


class Refused(Exception):
    """An error that is raised inside a block."""


def error_in_block(rank: int) -> Values:
    model, engine, _ = make_engine(rank, Options(stage=3, dp=2))
    with pytest.raises(Refused), GatheredParameters(model, modifier_rank=0), torch.no_grad():
        model.first.weight.fill_(7.0)
        raise Refused
    assert engine.gathered_numel[0] == 0
    assert all(type(parameter) is PartitionedParameter for parameter in model.parameters())
    train(engine, model, rank, range(1))
    found = whole_values(model)
    engine.close()
    return found


@pytest.mark.gloo
def test_after_an_error_in_the_block_nothing_has_changed() -> None:
    first, second = run_ranks(2, error_in_block)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert float(first["first.weight"].abs().max()) < 1


def test_blocks_in_blocks() -> None:
    model = make_model()
    engine = engine_around(model, alone())
    with GatheredParameters(model.first.weight):
        with GatheredParameters(model, modifier_rank=0), torch.no_grad():
            model.first.weight.fill_(2.0)
            with GatheredParameters([model.first.bias, model.scale]):
                assert model.scale.item() == 1.0
        assert model.first.weight.mean().item() == 2.0
        with pytest.raises(UsageError, match="middle"):
            model.middle.bias.sum()
    with pytest.raises(UsageError):
        model.first.weight.sum()
    assert engine.gathered_numel[0] == 0
    assert float(whole_values(model)["first.weight"].mean()) == 2.0


def test_a_block_with_nothing_to_do() -> None:
    """A block may be disabled, empty, or around parameters that no engine partitions."""
    model, other = make_model(), nn.Linear(2, 2)
    engine_around(model, alone())
    with GatheredParameters(model, enabled=False), pytest.raises(UsageError):
        model.first.weight.sum()
    with GatheredParameters([other.weight, model.first.bias], modifier_rank=0):
        assert model.first.bias.sum() + other.weight.sum() != 0
    with GatheredParameters([]):
        pass


def test_parameters_of_two_engines() -> None:
    models = [make_model(), make_model()]
    for model in models:
        engine_around(model, alone())
    with GatheredParameters([model.first.weight for model in models], modifier_rank=0), torch.no_grad():
        models[1].first.weight.mul_(3)
    first, second = (whole_values(model)["first.weight"] for model in models)
    assert torch.equal(3 * first, second)


def test_a_step_inside_a_block_is_refused() -> None:
    model = make_model()
    engine = engine_around(model, alone())
    engine.begin_step()
    engine.backward(loss_of(model, *batch(0)), is_last=True)
    with (
        GatheredParameters(model.first.weight),
        pytest.raises(UsageError, match="optimizer step while first is gathered"),
    ):
        take_step(engine)
    take_step(engine)
    assert engine.gathered_numel[0] == 0


def test_blocks_around_and_inside_of_passes() -> None:
    """Gradients are right with a pass in a block, a block in a forward, and one between forward and backward."""
    plain = make_model()
    loss_of(plain, *batch(0)).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}

    def read(*_: Any) -> None:
        with GatheredParameters([model.last.weight, model.first.bias]):
            assert model.last.weight.sum() != 0

    for how in ("around", "inside", "between"):
        model = make_model()
        engine = engine_around(model, alone())
        if how == "inside":
            model.middle.register_forward_pre_hook(read)
        for _ in range(2):
            engine.begin_step()
            with GatheredParameters(model, enabled=how == "around"):
                loss = loss_of(model, *batch(0))
                if how == "between":
                    read()
                engine.backward(loss, is_last=True)
                if how == "around":
                    torch.testing.assert_close(values(model), values(make_model()), rtol=0, atol=0)
            engine.finish_reductions()
            for name, gradient in expected.items():
                pieces = list(engine.pieces(name, "gradient"))
                found = torch.cat([piece.tensor for piece in pieces]).view(gradient.shape)
                torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14, msg=f"{how}: {name}")
            assert engine.gathered_numel[0] == 0


def test_external_parameters_come_with_the_forward_that_reads_them() -> None:
    model = make_model()
    engine = engine_around(model, alone())
    seen: list[type] = []

    def look(*_: Any) -> None:
        seen.append(type(model.first.weight))

    model.unused.register_forward_pre_hook(look)
    x = torch.ones(1, 5, dtype=torch.float64)
    model.unused(x)
    register_external_parameter(model.unused, model.first.weight)
    model.unused(x)
    with GatheredParameters(model.last.bias, fwd_module=model.unused):
        pass
    model.unused(x)
    assert seen == [PartitionedParameter, nn.Parameter, nn.Parameter]
    assert engine._frames._consumers[model.unused] == ["unused", "first", "last"]
    with pytest.raises(TypeError, match="not a Tensor"):
        register_external_parameter(model.unused, torch.ones(1))
    register_external_parameter(model.unused, nn.Parameter(torch.ones(1)))


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the outcome of each (case, rank) of a program whose ranks diverge."""
    folder = tmp_path_factory.mktemp("lonely")
    program = Path(__file__).parents[3] / "tests" / "support" / "diverging_ranks.py"
    paths = os.pathsep.join(str(folder) for folder in program.parents[1:3])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*words, str(program), str(folder)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    lines = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    assert lines, done.stderr[-3000:]
    return {(line["case"], line["rank"]): line for line in lines}


CALLS = {
    "block_on_rank_0": r"GatheredParameters(first.weight)",
    "module_on_rank_0": "the forward of first",
    "touch_on_rank_0": "sum in unused",
    "backward_on_rank_0": "backward",
    "rank_1_is_gone": r"GatheredParameters(first.weight)",
}


@pytest.mark.gloo
@pytest.mark.parametrize("case", ROUTES)
def test_ranks_that_gather_different_units(case: str, lonely: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Both ranks raise an error that names both modules, at once, and neither computes with the other's memory."""
    for rank in range(2):
        outcome = lonely[case, rank]
        assert outcome["error"] == "CollectiveError", outcome["text"]
        here = f"data-parallel rank {rank} gathers experts.{rank} for the forward of experts.{rank}"
        assert f"{here}, rank {1 - rank} experts.{1 - rank}" in outcome["text"]
        assert "set_z3_leaf_modules" in outcome["text"] and outcome["seconds"] < TIMEOUT_SECONDS


@pytest.mark.gloo
@pytest.mark.parametrize("case", CALLS)
def test_a_gather_that_only_one_rank_enters(case: str, lonely: dict[tuple[str, int], dict[str, Any]]) -> None:
    """The gather ends with an error that names the rank, the parameters and the call."""
    alone = lonely[case, 0]
    assert alone["error"] == "CollectiveError", alone["text"]
    text = alone["text"]
    assert "data-parallel rank 0" in text and CALLS[case] in text and "on all ranks or on none" in text
    assert ("unused.weight" if case == "backward_on_rank_0" else "first.bias, first.weight") in text
    assert alone["seconds"] < TIMEOUT_SECONDS + 30 and alone["warnings"] == [], "told once"
    if case != "rank_1_is_gone":
        other = lonely[case, 1]
        assert other["error"] and other["seconds"] < TIMEOUT_SECONDS + 30, "nobody waits for ever"
