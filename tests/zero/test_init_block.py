"""Tests of zero.Init's block: uses of parameters in it and after it, its arguments, and its end."""

import gc
import inspect
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.each import each
from support.irregular_model import alone, engine_around
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from megazero.errors import ConfigError, UsageError
from megazero.library.partitioned_init.init import Init, first_value
from megazero.parallel.param_spec import spec_of
from megazero.zero.parameters.gathered import GatheredParameters, register_external_parameter
from megazero.zero.parameters.guard import PartitionedParameter, handle_of


def values(model: nn.Module) -> dict[str, Tensor]:
    with GatheredParameters(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def is_partitioned(parameter: Any) -> bool:
    return isinstance(parameter, PartitionedParameter) and parameter.untyped_storage().nbytes() == 0


def hooks() -> int:
    kinds = ("module", "parameter", "buffer")
    return sum(len(getattr(torch_module, f"_global_{kind}_registration_hooks")) for kind in kinds)


# --- touching ----------------------------------------------------------------------------------------------------

TOUCHES: dict[str, Callable[[nn.Parameter], object]] = {
    "add_": lambda p: p.add_(1),
    "normal_": lambda p: nn.init.normal_(p),
    "data": lambda p: p.data,
    "t": lambda p: p.t(),
    "detach": lambda p: p.detach(),
    "sum": lambda p: p.sum(),
    "deepcopy": lambda p: __import__("copy").deepcopy(p),
}


@each("call", sorted(TOUCHES.keys() - {"detach"}))  # which lists a name and a shape, for state_dict
def test_after_the_block(call: str) -> None:
    with Init():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    with torch.no_grad(), pytest.raises(UsageError) as error:
        TOUCHES[call](model[1].weight)
    message = str(error.value)
    assert all(part in message for part in ("1.weight", call, "after zero.Init", "GatheredParameters"))
    assert is_partitioned(model[1].weight), "as it was"


class Keeping(nn.Module):
    """A module that keeps another reference to its layer's memory."""

    def __init__(self, alias: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.kept = alias(self.layer.weight)
        self.other = nn.Linear(2, 2)


@pytest.mark.parametrize("call", ["data", "t", "detach"])
def test_an_alias_that_is_kept(call: str) -> None:
    models = []
    with pytest.raises(UsageError) as error, Init():
        models.append(Keeping(TOUCHES[call]))
    message = str(error.value)
    assert all(part in message for part in (call, "Linear.weight", "end of zero.Init", "GatheredParameters"))
    assert hooks() == 0


def test_an_alias_that_waits_for_the_garbage_collector() -> None:
    def forget(parameter: nn.Parameter) -> None:
        circle = [parameter.data]
        circle.append(circle)

    gc.disable()
    try:
        with Init():
            model = Keeping(forget)
    finally:
        gc.enable()
    assert is_partitioned(model.layer.weight)


def test_what_is_written_through_an_alias_counts() -> None:
    with Init():
        layer = nn.Sequential(nn.Linear(2, 2))[0]
        view = layer.weight.data[0]
        nn.Linear(3, 3)
        assert not is_partitioned(layer.weight), "whole as long as the view is used"
        view.fill_(7)
        del view
    assert bool((values(layer)["weight"][0] == 7).all())


class Calibrated(nn.Module):
    """A module that runs its layers, forward and backward, in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        (self.gradient,) = torch.autograd.grad(
            self.layers(torch.ones(1, 3, requires_grad=True)).square().sum(), self.layers[0].bias, retain_graph=True
        )


def test_backward_in_a_constructor() -> None:
    torch.manual_seed(1)
    whole = Calibrated()
    torch.manual_seed(1)
    with Init():
        model = Calibrated()
    assert torch.equal(model.gradient, whole.gradient)


# --- gathering ---------------------------------------------------------------------------------------------------


def gathered_by_hand(rank: int) -> list[float]:
    """Gather parameters to change them on rank 1, to read, and twice at once, before and after they are partitioned."""
    mesh, found = mesh_in_worker(rank, dp=2), []

    def change(parameter: nn.Parameter, modifier_rank: int | None) -> None:
        with GatheredParameters([parameter], modifier_rank=modifier_rank), torch.no_grad():
            parameter.add_(10.0 * (rank + 1))
        with GatheredParameters(parameter), GatheredParameters([parameter, parameter]):
            found.append(parameter[0].item())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.zeros(3))
            self.layer = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(self.layer.weight)
            change(self.own, 1)
            change(self.layer.weight, 1)

    with Init(mesh=mesh):
        model = Model()
    change(model.own, 1)
    change(model.own, None)
    assert is_partitioned(model.own)
    register_external_parameter(model, model.own)
    return found


@pytest.mark.gloo
def test_gathered_parameters() -> None:
    assert run_ranks(2, gathered_by_hand) == [[20, 20, 40, 40]] * 2


def test_parameters_that_are_held_stay_whole() -> None:
    with Init():
        new, partitioned = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))[0]
        with GatheredParameters([new.weight, partitioned.weight], modifier_rank=0), torch.no_grad():
            for layer in (new, partitioned):
                nn.Linear(3, 3)
                assert not is_partitioned(layer.weight)
                layer.weight.fill_(7)
        nn.Linear(3, 3)
        assert is_partitioned(new.weight) and is_partitioned(partitioned.weight)
    assert all(bool((values(layer)["weight"] == 7).all()) for layer in (new, partitioned))


def test_what_has_been_given_up_is_as_it_was() -> None:
    with Init():
        model = nn.Sequential(nn.Linear(2, 2))
    assert "apply" in vars(model[0])
    found = first_value(spec_of("0.weight", model[0].weight), model[0].weight)
    assert found.shape == (4,) and type(model[0].weight) is nn.Parameter and handle_of(model[0].weight) is None
    assert "apply" not in vars(model[0])


def test_an_engine_wants_parameters_that_nobody_holds() -> None:
    with Init():
        model = nn.Linear(2, 2)
        with pytest.raises(UsageError, match=r"takes over Linear.weight"):
            first_value(spec_of("weight", model.weight), model.weight)
    with GatheredParameters(model), pytest.raises(UsageError, match="GatheredParameters"):
        first_value(spec_of("weight", model.weight), model.weight)


def test_what_nobody_uses_is_freed() -> None:
    with Init():
        model = nn.Sequential(nn.Linear(2, 2))
    parameter = weakref.ref(model[0].weight)
    gc.disable()
    try:
        for module in model.modules():
            vars(module).pop("apply", None)  # a reference cycle, as a module and its hooks often form
        del model, module
        assert parameter() is None
    finally:
        gc.enable()


# --- blocks ------------------------------------------------------------------------------------------------------


def nested(rank: int) -> list[tuple[bool, torch.dtype]]:
    """Build a model with an inner block over its own group, within an outer block that sets its parameters again."""
    mesh, lone = mesh_in_worker(rank, dp=2), dist.new_group([rank], use_local_synchronization=True)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(2, 2)
            with Init(data_parallel_group=lone, dtype=torch.float64):
                self.inner = nn.Linear(2, 2)
                nn.init.constant_(self.before.weight, rank + 1.0)
            nn.init.constant_(self.inner.weight, rank + 5.0)
            self.after = nn.Linear(2, 2)
            nn.init.constant_(self.after.weight, rank + 8.0)

    with Init(mesh=mesh):
        model = Outer()
    assert hooks() == 0
    found = values(model)
    return [(value.mean().item(), value.dtype) for name, value in found.items() if name.endswith("weight")]


@pytest.mark.gloo
def test_blocks_within_blocks() -> None:
    for rank, found in enumerate(run_ranks(2, nested)):
        assert found == [(1.0, torch.float32), (rank + 5.0, torch.float64), (8.0, torch.float32)]


def test_one_block_after_the_other() -> None:
    """A second block takes over the parameters of a first one."""
    first, second = Init(), Init()
    with first:
        layer = nn.Linear(2, 2)
    with second:
        model = nn.Sequential(layer, nn.Linear(2, 2))
        nn.init.ones_(layer.weight)
    assert handle_of(layer.weight).owner is second and handle_of(layer.weight).name == "0.weight"
    with first:
        other = nn.Linear(1, 1)  # a block can be entered again
    assert is_partitioned(other.weight) and bool((values(model)["0.weight"] == 1).all())
    with first, pytest.raises(UsageError, match="own block"), first:
        pass


def test_a_block_that_fails() -> None:
    made: list[nn.Module] = []

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            self.own = nn.Parameter(torch.ones(2))
            self.layer = nn.Linear(2, 2)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), Init():
        Failing()
    assert hooks() == 0 and torch.overrides._get_current_function_mode_stack() == []
    assert type(made[0].own) is nn.Parameter and handle_of(made[0].own) is None
    assert is_partitioned(made[0].layer.weight)
    assert type(nn.Linear(2, 2).weight) is nn.Parameter


def test_switched_off() -> None:
    with Init(enabled=False, remote_device="nvme"):
        model = nn.Linear(2, 2)
        assert hooks() == 0
    assert type(model.weight) is nn.Parameter and handle_of(model.weight) is None


def test_what_belongs_to_an_engine_stays_there() -> None:
    teacher = nn.Linear(2, 2).double()
    engine = engine_around(teacher, alone(), zero_stage=1)
    with Init():
        student = nn.Sequential(teacher, nn.Linear(2, 2))
    assert handle_of(teacher.weight).owner is engine and is_partitioned(student[1].weight)


def test_parameters_without_values_are_left_alone() -> None:
    with Init(), torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    assert model[0].weight.is_meta and handle_of(model[0].weight) is None


# --- arguments ---------------------------------------------------------------------------------------------------


def partition_what_is_there(rank: int) -> tuple[list[Any], bool]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].register_parameter("tied", model[0].weight)
    Init(module=model, mesh=mesh_in_worker(rank, dp=2), dtype=torch.bfloat16)
    torch.manual_seed(0)
    expected = nn.Linear(3, 3).bfloat16().weight
    buffers = [(name, buffer.dtype) for name, buffer in model.named_buffers()]
    assert all(is_partitioned(parameter) for parameter in model.parameters()) and "apply" in vars(model[0])
    return buffers, torch.equal(values(model)["0.weight"], expected) and model[1].tied is model[0].weight


@pytest.mark.gloo
def test_a_module_that_is_there() -> None:
    floats = [("1.running_mean", torch.bfloat16), ("1.running_var", torch.bfloat16)]
    assert run_ranks(2, partition_what_is_there) == [([*floats, ("1.num_batches_tracked", torch.int64)], True)] * 2


def test_values_are_drawn_before_they_are_rounded() -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(33, 3))
        nn.init.normal_(model[0].weight)
        return model.apply(lambda module: None)

    with Init(dtype=torch.bfloat16):
        model = make()
    assert torch.equal(values(model)["0.weight"], make().bfloat16()[0].weight)


CONFIGS: list[dict[str, Any]] = [
    {"config_dict_or_path": {"zero": {"override_module_apply": False}, "precision": {"precision": "bf16"}}},
    {"config": {"zero_optimization": {"stage": 3, "override_module_apply": False}, "bf16": {"enabled": True}}},
]


@pytest.mark.parametrize("said", CONFIGS, ids=["own", "DeepSpeed's"])
def test_a_configuration(said: dict[str, Any]) -> None:
    with Init(**said):
        model = nn.Linear(2, 2)
    assert model.weight.dtype == torch.bfloat16 and "apply" not in vars(model)
    with Init(**said, dtype=torch.float64):
        assert nn.Sequential(nn.Linear(2, 2))[0].weight.dtype == torch.float32, "not yet"

    class Applying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            nn.init.ones_(self.layer.weight)
            self.apply(lambda module: module is self or nn.init.ones_(module.weight))

    with pytest.raises(UsageError, match="override_module_apply is false"), Init(**said):
        Applying()


def test_everything_that_is_wrong_is_said_at_once() -> None:
    wrong = {
        "remote_device": "nvme",
        "zero_param_parallel_group": object(),
        "param_swapper": object(),
        "dtype": torch.int8,
        "config": {},
    }
    with pytest.raises(ConfigError) as error:
        Init(**wrong, config_dict_or_path={}, mpu=object(), data_parallel_group=object())
    assert len(error.value.problems) == 6
    assert all(name in str(error.value) for name in (*wrong, "config_dict_or_path", "mpu", "data_parallel_group"))
    assert Init(None, None, True, "none", False).enabled
    first = ("module", "data_parallel_group", "mem_efficient_linear", "remote_device", "pin_memory")
    assert tuple(inspect.signature(Init).parameters)[:5] == first, "as DeepSpeed documents them"


def slices_over(rank: int) -> list[int]:
    """Return the sizes of a rank's slice of 12 elements, for each way to give the group of processes."""
    pair, other = dist.new_group([0, 1]), dist.new_group([2])
    mine = other if rank == 2 else pair
    mpu = SimpleNamespace(get_data_parallel_group=lambda: mine)
    sizes = []
    for said in (
        {},
        {"data_parallel_group": mine},
        {"mpu": mpu},
        {"mesh": mpu},
        {"sequence_data_parallel_group": mine},
    ):
        with Init(**said) as init:
            layer = nn.Linear(4, 3, bias=False)
        assert torch.equal(values(layer)["weight"], values(layer)["weight"])
        (kept,) = init._sliced.values()
        sizes.append(kept._slice.numel())
    return sizes


@pytest.mark.gloo
def test_over_which_processes() -> None:
    assert run_ranks(3, slices_over) == [[4, 6, 6, 6, 6], [4, 6, 6, 6, 6], [4, 12, 12, 12, 12]]
