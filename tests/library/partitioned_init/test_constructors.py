"""Tests which constructors count as running, and where calls of torch functions begin and end."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megazero.library.partitioned_init.constructors import ConstructorCalls, innermost, is_running, under_construction
from megazero.zero.parameters.guard import attach_handle, detach_handle, guard


class Telling(nn.Module):
    """A module that records, at several places of its constructor, which modules are under construction."""

    def __init__(self, ask: Callable[[], set[int]]) -> None:
        super().__init__()
        self.during = ask()
        self.inner = next(ask() for _ in range(1))
        later = lambda: self  # noqa: E731  # makes `self` a cell, as `super()` without arguments does
        self.after = ask() if later() is self else set()


def test_constructors_that_are_running() -> None:
    made = Telling(under_construction)
    assert all(id(made) in asked for asked in (made.during, made.inner, made.after))
    assert id(made) not in under_construction()
    outer: list[set[int]] = []
    inner = Telling(lambda: outer.append(under_construction()) or under_construction())
    assert all(id(inner) in asked for asked in outer)


def test_functions_that_are_running() -> None:
    asked: list[bool] = []
    nn.Linear(1, 1).apply(lambda module: asked.append(is_running(nn.Module.apply)))
    assert asked == [True] and not is_running(nn.Module.apply)


class Diary:
    """Hooks that record their calls and hand out parameters that are whole in fact."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.parameters: dict[str, nn.Parameter] = {}

    def release_unused(self) -> None:
        self.entries.append("release_unused")

    def call_ended(self) -> None:
        self.entries.append("ended")

    def touched(self, name: str, call: str) -> None:
        self.entries.append(f"{call} of {name}")
        self.parameters[name].__class__ = nn.Parameter

    def lists_partitioned(self) -> bool:
        return False

    def guarded(self, name: str) -> nn.Parameter:
        self.parameters[name] = parameter = nn.Parameter(torch.ones(2))
        attach_handle(parameter, name, self)
        guard(parameter)
        return parameter


def test_calls_are_told() -> None:
    diary = Diary()
    first, second = diary.guarded("first"), diary.guarded("second")
    with torch.no_grad(), ConstructorCalls(diary):
        first.copy_(second)
        assert diary.entries == ["release_unused", "copy_ of first", "copy_ of second", "ended"]
        diary.entries.clear()
        first.add_(1)
        torch.arange(3).sum()
        assert diary.entries == [], "nothing guarded, and no memory for parameters"
        torch.empty(3)
        assert diary.entries == ["release_unused"]
    diary.entries.clear()
    torch.empty(3)
    assert diary.entries == []


def test_a_call_that_fails_is_no_end() -> None:
    diary = Diary()
    parameter = diary.guarded("p")
    with ConstructorCalls(diary), pytest.raises(RuntimeError):
        parameter.add_(1)  # a leaf that requires a gradient
    assert diary.entries == ["release_unused", "add_ of p"]


def test_a_parameter_made_of_a_guarded_one() -> None:
    """A guarded parameter can be wrapped in a new one, as torch.nn.utils.parametrize does."""
    diary = Diary()
    parameter = diary.guarded("p")
    with ConstructorCalls(diary):
        other = nn.Parameter(parameter, requires_grad=False)
    assert type(other) is nn.Parameter and not other.requires_grad and other.data_ptr() == parameter.data_ptr()
    detach_handle(parameter)


def test_the_innermost_hooks() -> None:
    outer, inner = Diary(), Diary()
    assert innermost() is None
    with ConstructorCalls(outer):
        assert innermost() is outer
        with ConstructorCalls(inner), torch.device("cpu"):
            assert innermost() is inner
        assert innermost() is outer
