"""Restoring the states of torch's default generators makes them draw the same numbers again."""

import pytest
import torch

from megazero.generators import DefaultGenerators
from megazero.planner.dry.hollow import Hollow

CPU = torch.device("cpu")


def test_the_same_numbers_again() -> None:
    generators = DefaultGenerators(CPU)
    torch.rand(3)
    state = generators.get_state()
    first, later = torch.rand(7), torch.randperm(9)
    after = generators.get_state()
    generators.set_state(state)
    assert torch.equal(torch.rand(7), first) and torch.equal(torch.randperm(9), later)
    assert torch.equal(generators.get_state()[0], after[0])


def test_drawing_does_not_change_a_state_that_was_taken() -> None:
    generators = DefaultGenerators(CPU)
    state = generators.get_state()
    copy = [one.clone() for one in state]
    torch.rand(700)
    assert all(torch.equal(one, other) for one, other in zip(state, copy, strict=True))


def test_a_gpu_that_is_not_there_has_none() -> None:
    """Without a GPU a CUDA device, which torch's fake tensors may be on, adds no state."""
    device = torch.device("cpu" if torch.cuda.is_available() else "cuda")
    assert len(DefaultGenerators(device).get_state()) == 1


def test_states_among_hollow_tensors() -> None:
    generators = DefaultGenerators(CPU)
    with Hollow():
        generators.set_state(generators.get_state())
        assert torch.rand(3).shape == (3,)


@pytest.mark.cuda
def test_the_same_numbers_again_on_a_gpu() -> None:
    generators = DefaultGenerators(torch.device("cuda"))
    state = generators.get_state()
    first, on_cpu = torch.rand(7, device="cuda"), torch.rand(7)
    generators.set_state(state)
    assert torch.equal(torch.rand(7, device="cuda"), first) and torch.equal(torch.rand(7), on_cpu)
