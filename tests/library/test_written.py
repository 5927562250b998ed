"""Tests that what a user does to an engine's parameters counts as in plain PyTorch, or is refused with a remedy."""

import copy
import io
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.errors import UsageError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.state.access import safe_get_full_fp32_param, safe_set_full_fp32_param
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology
from megazero.zero.parameters.gathered import GatheredParameters

DP = 2
CPU = torch.device("cpu")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
ADAMW = {"optimizer": {"type": "AdamW", "lr": 1e-2, "params": {"weight_decay": 0.1}}, "gradient_accumulation_steps": 2}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    return nn.Sequential(nn.Linear(4, 3), frozen, nn.Tanh(), nn.Linear(3, 3, bias=False), nn.Linear(3, 1))


def make(mesh: Mesh, stage: int, precision: str, weights: dict[str, Tensor] | None = None, **more: Any) -> Any:
    """Return an engine whose SGD has no state: a step depends on the weights before it and on the batch alone."""
    model = net().to(DTYPES[precision])
    if weights is not None:
        model.load_state_dict(weights)
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 64},
        "precision": {"precision": precision},
        "optimizer": {"type": "SGD", "lr": 0.125},
        **more,
    }
    return megazero.initialize(model, config, mesh=mesh)


def step(engine: DataParallelEngine, seed: int = 0) -> None:
    """Take a step with the same batch on every rank."""
    dtype = next(engine.module.parameters()).dtype
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    engine.backward(engine(x).square().mean())
    engine.step()


def masters(engine: DataParallelEngine) -> dict[str, Tensor]:
    found = {name: safe_get_full_fp32_param(parameter) for name, parameter in engine.module.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def load(model: nn.Sequential, by: float) -> None:
    model.load_state_dict({name: value + by for name, value in model.state_dict().items()})


def swap(model: nn.Sequential, by: float) -> None:
    """Swap in another model's weights with the assignment that moving averages use."""
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5 + by


def fill(model: nn.Sequential, by: float) -> None:
    with torch.no_grad():
        model[0].weight.fill_(by).clamp_(-1, 1)
        model[1].bias.copy_(model[1].bias + by)


def initialise(model: nn.Sequential, by: float) -> None:
    nn.init.constant_(model[3].weight, by)


def through_data(model: nn.Sequential, by: float) -> None:
    before = model[4].weight.data
    model[0].weight.data.mul_(0.5).add_(by)
    before.view(-1).sub_(by)


def swap_there_and_back(model: nn.Sequential, by: float) -> None:
    """Write through `.data` before other values are swapped in, to what is swapped out, and when it is back."""
    model[0].weight.data.add_(by)
    own = [parameter.data for parameter in model.parameters()]
    swap(model, by)
    own[4].sub_(by)
    for parameter, values in zip(model.parameters(), own, strict=True):
        parameter.data = values
    own[5].add_(by)


def set_memory(model: nn.Sequential, by: float) -> None:
    with torch.no_grad():
        model[0].bias.data.add_(by)
        model[0].bias.set_(torch.full_like(model[0].bias, by))
        model[0].bias.data.mul_(2)
        assert torch.equal(model[0].bias, torch.full_like(model[0].bias, 2 * by)), "`.data` is the new memory"
        model[3].weight.data = model[3].weight.data.t()


def convert(model: nn.Sequential, by: float) -> None:
    dtype = model[0].weight.dtype
    model.double()
    load(model, by)
    model.to(dtype)


def through_state(model: nn.Sequential, by: float) -> None:
    torch._foreach_add_(list(model.state_dict().values()), by)


def on_inference(model: nn.Sequential, by: float) -> None:
    with torch.inference_mode():
        model[0].weight.add_(by)
        model[4].weight.data.add_(by)


def in_block(model: nn.Sequential, by: float) -> None:
    with GatheredParameters(model, modifier_rank=0), torch.no_grad():
        model[0].weight.add_(by)
        model[1].weight.add_(by)


def set_masters(model: nn.Sequential, by: float) -> None:
    """Write one parameter, then set the master weights of another one of its section."""
    with torch.no_grad():
        model[0].bias.add_(by)
    safe_set_full_fp32_param(model[0].weight, torch.full_like(model[0].weight, 0.5, dtype=torch.float32))


WAYS: dict[str, Callable[[nn.Sequential, float], None]] = {
    way.__name__: way
    for way in (
        *(
            load,
            swap,
            fill,
            initialise,
            through_data,
            swap_there_and_back,
            set_memory,
            convert,
            through_state,
            on_inference,
            in_block,
        ),
        *(on_inference, in_block, set_masters),
    )
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_counts(way: str) -> None:
    """After a write in mixed or full precision, a step does as in an engine that begins with the written weights."""
    mesh = make_mesh(Topology(), 0, CPU, FusedBuffers(0, CPU))
    for stage, precision in ((0, "bf16"), (1, "fp32"), (2, "bf16")):
        engine = make(mesh, stage, precision)
        before = weights_of(engine.module)
        WAYS[way](engine.module, 0.25)
        written = weights_of(engine.module)
        assert any(not torch.equal(written[key], value) for key, value in before.items())
        expected = make(mesh, stage, precision, written)
        for one in (engine, expected):
            step(one)
        for found, wanted in zip(states(engine), states(expected), strict=True):
            assert torch.equal(found, wanted), (stage, precision)
        engine.close()
        assert type(engine.module[0].weight) is nn.Parameter


def test_values_that_are_swapped_there_and_back_are_not_written() -> None:
    """Master weights keep the bits that the parameters do not have."""
    mesh = make_mesh(Topology(), 0, CPU, FusedBuffers(0, CPU))
    engine = make(mesh, 2, "bf16")
    through_data(engine.module, 0.25)
    step(engine)
    before = masters(engine)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())
    for _ in range(2):
        own = [parameter.data for parameter in engine.module.parameters()]
        swap(engine.module, 0.25)
        for parameter, values in zip(engine.module.parameters(), own, strict=True):
            parameter.data = values
        engine.zero_engine.written.check()  # as the next step does
    assert all(torch.equal(value, before[name]) for name, value in masters(engine).items())
    engine.close()


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "bf16"), (2, "fp32")])
def test_what_is_loaded_counts_more_than_what_was_written_before(stage: int, precision: str, tmp_path: Path) -> None:
    mesh = make_mesh(Topology(), 0, CPU, FusedBuffers(0, CPU))
    engine = make(mesh, stage, precision)
    engine.save_checkpoint(tmp_path)
    first, saved = states(engine), weights_of(engine.module)
    for load_again in (lambda: engine.load_checkpoint(tmp_path), lambda: engine.load_state_dict(saved)):
        for way in (load, swap, fill, set_memory, set_masters):
            step(engine)
            way(engine.module, 0.25)
            load_again()
            engine.zero_engine.written.check()  # as the next step does
            for found, wanted in zip(states(engine), first, strict=True):
                assert torch.equal(found, wanted), way
    engine.close()


def states(engine: DataParallelEngine) -> list[Tensor]:
    return [*masters(engine).values(), *weights_of(engine.module).values()]


def write_on_ranks(rank: int) -> None:
    """Write other values on every rank, and take a step that changes nothing."""
    mesh = mesh_in_worker(rank, dp=DP)
    nothing = {"type": "SGD", "lr": 1e-30}
    for (stage, precision), way in product(((1, "bf16"), (2, "fp32")), WAYS.values()):
        if precision == "fp32" and way in (through_data, swap_there_and_back, on_inference):
            continue  # through `.data`, which has a version in mixed precision only
        engine = make(mesh, stage, precision, optimizer=nothing)
        way(engine.module, 0.25 * (rank + 1))
        written = [weights_of(engine.module)]
        dist.broadcast_object_list(written, 0)
        step(engine)
        for name, value in weights_of(engine.module).items():
            assert torch.equal(value, written[0][name]), (stage, precision, way, name)
        for name, value in masters(engine).items():
            assert torch.equal(value, written[0][name].to(value.dtype)), (stage, precision, way, name)
        engine.close()


@pytest.mark.gloo
def test_the_first_rank_s_values_count_on_every_rank() -> None:
    run_ranks(DP, write_on_ranks)


def user_program(model: nn.Sequential, step: Callable[[int], None], whole: Callable[[], Any]) -> dict[str, Tensor]:
    """Train as a user may: load, clamp, swap moving averages in and out."""
    with whole():
        saved = average = weights_of(model)
    for number in range(6):
        step(number)
        with whole(), torch.no_grad():
            if number == 1:
                model.load_state_dict(saved)
            elif number == 2:
                model[0].weight.clamp_(-0.1, 0.1)
                nn.init.ones_(model[4].bias)
            elif number == 3:
                held = weights_of(model)
                model.load_state_dict(average)
                model.load_state_dict(held)
            elif number == 4:
                for name, parameter in model.named_parameters():
                    parameter.copy_(average[name].lerp(parameter, 0.5))
    with whole():
        return weights_of(model)


def samples(number: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def plain_program() -> dict[str, Tensor]:
    model = net().double()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(samples(number)).square().mean().backward()
        optimizer.step()

    return user_program(model, step, nullcontext)


def engine_program(rank: int) -> list[dict[str, Tensor]]:
    mesh, found = mesh_in_worker(rank, dp=DP), []
    for stage in range(4):
        engine = make(mesh, stage, "fp64", **ADAMW)

        def step(number: int, engine: DataParallelEngine = engine) -> None:
            for share in samples(number).chunk(2):
                engine.backward(engine(share.chunk(DP)[rank]).square().mean())
                engine.step()

        def whole(module: nn.Module = engine.module) -> GatheredParameters:
            return GatheredParameters(module, modifier_rank=0)

        found.append(user_program(engine.module, step, whole if stage == 3 else nullcontext))
        engine.close()
    return found


@pytest.mark.gloo
def test_programs_train_as_in_plain_torch() -> None:
    expected = plain_program()
    for found in (weights for runs in run_ranks(DP, engine_program) for weights in runs):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stage", range(3))
def test_models_may_be_converted_there_and_back(stage: int) -> None:
    """Gradients come back with their parameters, before a backward and after it."""
    mesh, weights = make_mesh(Topology(), 0, CPU, FusedBuffers(0, CPU)), []
    for converts in (False, True):
        engine = make(mesh, stage, "fp32", **ADAMW)
        for number in range(4):
            if converts:
                engine.module.double().float()
            x = samples(number).float()
            engine(x).square().mean().backward() if number % 2 else engine.backward(engine(x).square().mean())
            if converts:
                engine.module.double().float()
            engine.step()
        weights.append(weights_of(engine.module))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    assert not stage or not torch.equal(weights[1]["0.weight"], net()[0].weight)


def assign(model: nn.Sequential) -> None:
    weights = net().to(model[1].weight.dtype).state_dict()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in weights.items()}, assign=True)


def replace(model: nn.Sequential) -> None:
    model[0].bias = nn.Parameter(torch.zeros(3, dtype=model[0].bias.dtype))


def add(model: nn.Sequential) -> None:
    model[2].scale = nn.Parameter(torch.zeros(3, dtype=model[0].bias.dtype))


def append(model: nn.Sequential) -> None:
    model.append(nn.Linear(1, 1, dtype=model[0].bias.dtype))


REFUSALS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "assigned": (assign, "parameter 0.weight, which was replaced.*without assign=True"),
    "replaced": (replace, "parameter 0.bias, which was replaced"),
    "added": (add, "parameter 2.scale, which was added"),
    "appended": (append, "parameter 5.weight, which was added.*initialize of the"),
    "frozen": (lambda model: model[3].requires_grad_(False), "3.weight with requires_grad False, which was True"),
    "thawed": (lambda model: model[1].requires_grad_(True), "1.bias with requires_grad True, which was False"),
    "half": (lambda model: model.half(), "4.bias, which has become a tensor .* of torch.float16"),
    "reshaped": (lambda model: setattr(model[3].weight, "data", torch.zeros(2, 3)), "3.weight, .*tensor .2, 3. of"),
}


def restore(model: nn.Sequential, parameters: dict[str, nn.Parameter]) -> None:
    """Give the model its parameters back, and no others."""
    model[2]._parameters.clear()
    while len(model) > 5:
        del model[5]
    for name, parameter in parameters.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, parameter.requires_grad_(not name.startswith("1.")))


def refused(rank: int) -> None:
    """Change the model before or after a backward: the step is refused, and can be taken once that is mended."""
    mesh = mesh_in_worker(rank, dp=DP)
    for stage, precision in ((0, "bf16"), (2, "fp32"), (3, "fp32")):
        expected = make(mesh, stage, precision)
        step(expected)
        step(expected)
        for (name, (change, message)), is_early in product(REFUSALS.items(), (False, True)):
            converts = name in ("half", "reshaped")
            if (converts and stage == 3) or (is_early and name not in ("half", "assigned", "frozen")):
                continue  # the guard refuses conversions
            engine = make(mesh, stage, precision)
            step(engine)
            parameters = dict(engine.module.named_parameters())
            x = torch.randn(2, 4).to(parameters["0.bias"].dtype)
            if not is_early:
                engine.backward(engine(x).square().mean())
            change(engine.module)
            with pytest.raises(UsageError, match=f"(?s){message}"):
                step(engine) if is_early else engine.step()
            restore(engine.module, parameters)
            if converts:
                parameters["3.weight"].data = torch.ones(3, 3)
                engine.module.to(DTYPES[precision])
            step(engine)
            for key, value in masters(engine).items():
                wanted = masters(expected)[key]
                assert value.dtype == wanted.dtype and (converts or torch.equal(value, wanted)), (stage, name, key)
            engine.close()
        engine = make(mesh, stage, precision)  # frozen from before its first pass
        engine.module[3].requires_grad_(False)
        with pytest.raises(UsageError, match=f"(?s){REFUSALS['frozen'][1]}"):
            step(engine)
        engine.module[3].requires_grad_(True)
        for _ in range(2):
            step(engine)
        assert all(torch.equal(value, masters(expected)[key]) for key, value in masters(engine).items())
        engine.close()
        expected.close()


@pytest.mark.gloo
def test_parameters_that_are_not_the_engine_s_are_refused_by_name() -> None:
    run_ranks(DP, refused)


def written_on_one_rank(rank: int) -> None:
    mesh = mesh_in_worker(rank, dp=DP)
    for stage, precision in product(range(3), ("fp32", "bf16")):
        engine = make(mesh, stage, precision)
        for name in ("0.weight", "1.weight"):
            if rank == 1:
                nn.init.zeros_(engine.module.get_parameter(name))
            with pytest.raises(UsageError, match=f"rank {rank}: {name if rank else 'none'}\n.*every rank writes"):
                step(engine)
            with tempfile.TemporaryDirectory() as folder:
                for save in (engine.save_checkpoint, engine.save_fp32_model):
                    with pytest.raises(
                        UsageError, match=f"rank {rank}: {name if rank else 'none'}\n.*every rank writes"
                    ):
                        save(folder)
                assert os.listdir(folder) == [], "nothing is saved of what the ranks differ in"
            if rank == 0:
                nn.init.ones_(engine.module.get_parameter(name))
            step(engine)
            assert bool((engine.module.get_parameter(name) > 0.5).all())
        saved = {name: torch.full_like(value, 0.75) for name, value in weights_of(engine.module).items()}
        for given in (saved, {"0.weight": saved["0.weight"]}):
            if rank == 1:
                nn.init.zeros_(engine.module.get_parameter("0.weight"))
            engine.load_state_dict(given, strict=False)
            assert bool((masters(engine)["0.weight"] == 0.75).all()), "a write of one rank is gone once all ranks load"
            step(engine)
        if rank == 1:
            nn.init.zeros_(engine.module.get_parameter("1.weight"))
        engine.load_state_dict({"0.weight": saved["0.weight"]}, strict=False)
        with pytest.raises(UsageError, match=f"rank {rank}: {'1.weight' if rank else 'none'}\n"):
            step(engine)
        engine.load_state_dict(saved)
        nn.init.constant_(engine.module.get_parameter("0.weight"), 2.0 + rank)
        with tempfile.TemporaryDirectory() as folder:
            engine.save_fp32_model(folder)
        assert bool((masters(engine)["0.weight"] == 2).all()), "the first rank's values"
        engine.close()


@pytest.mark.gloo
def test_writes_of_one_rank_are_refused_on_all() -> None:
    run_ranks(DP, written_on_one_rank)


def copied(rank: int) -> None:
    mesh = mesh_in_worker(rank, dp=DP)
    x = torch.ones(1, 4)
    for stage in range(4):
        engine = make(mesh, stage, "fp32")
        module = engine.module
        if stage == 3:
            with pytest.raises(UsageError, match="GatheredParameters"):
                copy.deepcopy(module)
        with GatheredParameters(module):
            twin, average = copy.deepcopy(module), torch.optim.swa_utils.AveragedModel(module)
            average.update_parameters(module)
            file = io.BytesIO()
            torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)  # a whole module, which this test itself has just saved
        with torch.no_grad():
            expected = engine(x).item()
        for other in (twin, average, loaded):
            assert all(type(parameter) is nn.Parameter for parameter in other.parameters())
            other(x).sum().backward()
            assert other(x).item() == expected
        if stage < 3:
            for value in module.state_dict().values():
                alone, file = io.BytesIO(), io.BytesIO()
                torch.save(value.clone(), alone)
                torch.save(value, file)
                assert len(file.getvalue()) == len(alone.getvalue())
        step(engine)
        with torch.no_grad():
            assert engine(x).item() != expected == twin(x).item()
        make(mesh, stage, "fp32", weights_of(twin)).close()
        engine.close()


@pytest.mark.gloo
def test_models_and_their_tensors_are_copied_alone() -> None:
    run_ranks(DP, copied)
