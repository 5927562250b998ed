"""Tests of guarded parameters: harmless uses pass, reads and writes are reported to the owner, nothing else changes."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.each import each
from support.irregular_model import Awkward, alone, engine_around, make_model
from torch import nn
from torch.nn import functional as F

from megazero.errors import UsageError
from megazero.zero.parameters.guard import PartitionedParameter, attach_handle, detach_handle, guard, handle_of, unguard


class Keeper:
    """An owner that records each touched parameter and the call, and makes the parameter whole."""

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.touches: list[tuple[str, str]] = []

    def keep(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        self.parameters[name] = parameter
        attach_handle(parameter, name, self)
        guard(parameter)
        return parameter

    def lists_partitioned(self) -> bool:
        return False

    def touched(self, name: str, call: str) -> None:
        self.touches.append((name, call))
        unguard(self.parameters[name])

    def gather(self, names: Iterable[str], why: str) -> None:
        raise AssertionError("nobody asks for it here")

    def release(self, names: Iterable[str], *, modifier_rank: int | None) -> None:
        raise AssertionError("nobody asks for it here")

    def register_external(self, module: nn.Module, name: str) -> None:
        raise AssertionError("nobody asks for it here")


class Scaled(nn.Parameter):
    """A user's subclass of Parameter."""


def test_the_class_is_exchanged_and_set_back() -> None:
    for whole_class in (nn.Parameter, Scaled):
        parameter = whole_class(torch.ones(3))
        address = id(parameter)
        Keeper().keep("p", parameter)
        assert type(parameter) is PartitionedParameter
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, torch.Tensor)
        assert id(parameter) == address
        unguard(parameter)
        assert type(parameter) is whole_class
        unguard(parameter)
        assert type(parameter) is whole_class, "twice is harmless"


def test_a_module_keeps_its_parameter() -> None:
    model = nn.Linear(3, 2)
    keeper = Keeper()
    weight = keeper.keep("weight", model.weight)
    assert model.weight is weight and dict(model.named_parameters())["weight"] is weight
    assert weight in {weight: 1} and weight in {weight}
    model.requires_grad_(False)
    assert not weight.requires_grad
    assert [name for name, _ in keeper.touches] == []


HARMLESS: dict[str, Callable[[nn.Parameter], Any]] = {
    "shape": lambda p: (tuple(p.shape), p.size(), p.size(0), p.dim(), p.ndim, p.numel(), p.nelement()),
    "kind": lambda p: (p.dtype, p.device, p.layout, p.is_cuda, p.is_sparse, p.is_leaf, p.is_floating_point()),
    "memory": lambda p: (p.stride(), p.element_size(), p.itemsize, p.nbytes, p.is_contiguous()),
    "gradient": lambda p: (p.grad, p.requires_grad, p.grad_fn),
    "identity": lambda p: (hash(p) != 0, isinstance(p, nn.Parameter)),
}


@each("what", HARMLESS)
def test_what_stays_may_be_read(what: str) -> None:
    plain = nn.Parameter(torch.arange(6.0).view(2, 3))
    keeper = Keeper()
    guarded = keeper.keep("p", nn.Parameter(plain.detach().clone()))
    assert HARMLESS[what](guarded) == HARMLESS[what](plain)
    assert type(guarded) is PartitionedParameter and keeper.touches == []


def test_gradients_may_be_set_and_hooked() -> None:
    keeper = Keeper()
    guarded = keeper.keep("p", nn.Parameter(torch.ones(3)))
    guarded.grad = torch.ones(3)
    guarded.grad = None
    guarded.requires_grad = True
    guarded.register_hook(lambda gradient: gradient).remove()
    guarded.register_post_accumulate_grad_hook(lambda p: None).remove()
    guarded.name_of_the_users = "anything"
    assert keeper.touches == []


def write_data(p: nn.Parameter) -> None:
    p.data = torch.zeros(2, 2)


TOUCHES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda p: p + 1,
    "mul_": lambda p: p.mul_(2),
    "sum": lambda p: p.sum(),
    "linear": lambda p: F.linear(torch.ones(1, 2), p),
    "cat": lambda p: torch.cat([torch.ones(1, 2), p]),
    "stack": lambda p: torch.stack((p, p)),
    "einsum": lambda p: torch.einsum("ij,jk->ik", torch.ones(2, 2), p),
    "add (keyword)": lambda p: torch.add(input=torch.ones(2, 2), other=p),
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "data": lambda p: p.data,
    "data (written)": write_data,
    "T": lambda p: p.T,
    "__getitem__": lambda p: p[0],
    "item": lambda p: p[0, 0].item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(force=True),
    "to": lambda p: p.to(torch.float64),
    "copy_": lambda p: torch.zeros(2, 2).copy_(p),
    "__eq__": lambda p: p == p,
    "deepcopy": lambda p: copy.deepcopy(p),
    "init": lambda p: nn.init.zeros_(p),
}


@each("what", TOUCHES)
def test_reading_or_writing_values_is_noticed(what: str) -> None:
    """A read or write is reported once, and then done on the whole parameter, with the outcome of a plain one."""
    with torch.no_grad():
        plain = nn.Parameter(torch.arange(4.0).view(2, 2))
        keeper = Keeper()
        guarded = keeper.keep("p", nn.Parameter(plain.detach().clone()))
        expected, got = TOUCHES[what](plain), TOUCHES[what](guarded)
    assert [name for name, _ in keeper.touches] == ["p"], "touched once, then it is whole"
    assert type(guarded) is nn.Parameter
    torch.testing.assert_close(guarded.data, plain.data)
    if isinstance(expected, torch.Tensor):
        assert type(got) is type(expected)
        torch.testing.assert_close(got, expected)


def test_the_call_is_named() -> None:
    for what, name in (("add", "add"), ("data", "data"), ("linear", "linear"), ("__getitem__", "__getitem__")):
        keeper = Keeper()
        parameter = keeper.keep("p", nn.Parameter(torch.ones(2, 2)))
        with torch.no_grad():
            TOUCHES[what](parameter)
        assert keeper.touches == [("p", name)]


def test_all_guarded_arguments_are_found_however_nested() -> None:
    keeper = Keeper()
    a, b, c = (keeper.keep(name, nn.Parameter(torch.ones(2))) for name in "abc")
    torch.cat([a, torch.ones(2), b])
    assert keeper.touches == [("a", "cat"), ("b", "cat")]
    for parameter in (a, b):
        guard(parameter)
    torch.add(a, other=c)  # one positional and one keyword argument
    assert keeper.touches[2:] == [("a", "add"), ("c", "add")]

    def call(argument: Any) -> None:
        PartitionedParameter.__torch_function__(lambda tree: None, (), ({"list": [argument], "tuple": (1, [b])},), {})

    keeper.touches.clear()
    guard(c)
    call(c)
    assert [name for name, _ in keeper.touches] == ["c", "b"]


def test_gradients_flow_to_the_parameter_itself() -> None:
    keeper = Keeper()
    parameter = keeper.keep("p", nn.Parameter(torch.ones(3)))
    (parameter * 2).sum().backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [2.0] * 3


def test_repr_names_the_parameter_and_reads_nothing() -> None:
    keeper = Keeper()
    parameter = keeper.keep("layers.3.weight", nn.Parameter(torch.ones(4, 5)))
    told = "PartitionedParameter(layers.3.weight, shape=(4, 5), dtype=torch.float32, device=cpu)"
    assert repr(parameter) == f"Parameter containing:\n{told}"
    assert "layers.3.weight" in str([parameter])
    assert keeper.touches == []


def test_a_parameter_changes_hands() -> None:
    first, second = Keeper(), Keeper()
    parameter = first.keep("old", Scaled(torch.ones(2)))
    second.keep("new", parameter)
    parameter.sum()
    assert (first.touches, second.touches) == ([], [("new", "sum")])
    assert type(parameter) is Scaled, "the class it had before there was any owner"


def test_taking_the_handle_leaves_no_trace() -> None:
    parameter = Keeper().keep("p", nn.Parameter(torch.ones(2)))
    detach_handle(parameter)
    assert handle_of(parameter) is None and type(parameter) is nn.Parameter and not vars(parameter)
    detach_handle(parameter)
    unguard(parameter)


READS: dict[str, Callable[[Awkward], Any]] = {
    "sum": lambda model: model.first.weight.sum(),
    "data": lambda model: model.first.weight.data,
    "item": lambda model: model.first.bias[0].item(),
    "linear": lambda model: F.linear(torch.ones(1, 7, dtype=torch.float64), model.first.weight),
    "deepcopy": lambda model: copy.deepcopy(model.first),
    "xavier": lambda model: nn.init.xavier_uniform_(model.first.weight),
    "state_dict": lambda model: model.first.state_dict(),
    "half": lambda model: model.half(),
}


@each("call", READS)
def test_outside_a_forward_the_user_is_told_what_to_do(call: str) -> None:
    model = make_model()
    engine = engine_around(model, alone())
    with pytest.raises(UsageError) as raised:
        READS[call](model)
    text = str(raised.value)
    assert "outside a forward" in text and "GatheredParameters" in text and " of parameter first." in text
    assert engine.gathered_numel == (0, 0)
    engine.close()
