"""Tests Adafactor's three passes over parts of a parameter against torch's on the whole one."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from support.each import each
from torch import Tensor, nn

from megazero.config.choices import defaults_of
from megazero.config.optimizers import OPTIMIZERS
from megazero.errors import ConfigError
from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.adafactor import Adafactor
from megazero.optim.factors import Factors
from megazero.optim.grouping import DECAYED
from megazero.optim.inner import ElementRun, StepInputs
from megazero.parallel.param_spec import ParamSpec

LR = 0.03
OPTIONS: list[dict[str, Any]] = [
    {},
    {"beta2_decay": -0.3, "weight_decay": 0.2, "d": 2.5},
    {"eps": (1e-2, 0.5), "maximize": True},
    {"eps": (0.3, 1e-9)},  # above the root of every variance
]
SHAPES: list[tuple[int, ...]] = [(), (1,), (9,), (7, 5), (1, 6), (6, 1), (2, 3, 4), (3, 2, 1, 4)]
CUT = (1, 4, 13)


def train(shape: tuple[int, ...], options: dict[str, Any], *, by_torch: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Train one parameter by torch, or in parts as several ranks would that have one each; return it, and the state."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(5))
    if by_torch:
        parameter = nn.Parameter(start)
        reference = torch.optim.Adafactor([parameter], lr=LR, **options)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            reference.step()
        state = {kind: value for kind, value in reference.state[parameter].items() if kind != "step"}
        return parameter.detach(), state
    optimizer = Adafactor(defaults_of(OPTIMIZERS["Adafactor"].params) | options)
    factors = Factors(ParamSpec("w", shape, shape, (0,) * len(shape)), shape, DECAYED)
    optimizer.begin([factors], torch.float64, torch.device("cpu"))
    buffers, master = FusedBuffers(1 << 16, torch.device("cpu")), start.flatten().clone()
    cuts = [0, *(cut for cut in CUT if cut < master.numel()), master.numel()]
    for number, gradient in enumerate(gradients):
        step, factor = torch.tensor(number + 1.0), torch.tensor([4.0], dtype=torch.float64)
        run = ElementRun(master, gradient.flatten() / 4.0, {}, DECAYED, "w")
        parts = [run.part(*ends) for ends in pairwise(cuts)]
        inputs = StepInputs(LR, factor, None)
        for place in range(optimizer.num_passes):
            local = torch.zeros(optimizer.num_figures(place, "w"), dtype=torch.float64)
            for part in parts:
                optimizer.measure(place, part, step, inputs, local, buffers=buffers)
                optimizer.measure(place, part, step, inputs, None, buffers=buffers)  # what another rank counts
            whole = optimizer.whole_figures(place, "w", local)
            optimizer.finish_pass(place, {"w": whole}, {"w": step})
            inputs = inputs._replace(figures=(*inputs.figures, whole))
        for part in parts:
            optimizer.update(0, part, step, inputs, buffers=buffers)
    assert buffers.num_buffers == 2
    return master.view(shape), {kind: value for kind, (_, value) in optimizer.state_of("w").items()}


@each("shape", SHAPES)
def test_steps_and_state_are_torchs(shape: tuple[int, ...]) -> None:
    for options in OPTIONS:
        (found, state), (expected, theirs) = (train(shape, options, by_torch=by) for by in (False, True))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13, msg=str(options))
        assert state.keys() == theirs.keys()
        for kind, value in theirs.items():
            torch.testing.assert_close(state[kind], value, rtol=1e-12, atol=1e-15, msg=f"{kind} {options}")


def test_a_parameter_that_takes_no_step_keeps_its_averages() -> None:
    optimizer = Adafactor(defaults_of(OPTIMIZERS["Adafactor"].params))
    specs = [ParamSpec(name, (2, 3), (2, 3), (0, 0)) for name in "ab"]
    optimizer.begin([Factors(spec, (2, 3), DECAYED) for spec in specs], torch.float32, torch.device("cpu"))
    ones = torch.ones(6, dtype=torch.float64)
    optimizer.finish_pass(0, {"a": ones, "b": ones}, {"a": torch.tensor(1.0)})
    assert [bool(value.any()) for name in "ab" for _, value in optimizer.state_of(name).values()] == [True] * 2 + [
        False
    ] * 2
    (memory,) = optimizer.own_memory
    assert memory.numel() == 2 * (2 + 3)


def test_one_that_has_stepped_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    template = torch.optim.Adafactor([parameter])
    parameter.grad = torch.ones(2, 2)
    template.step()
    with pytest.raises(ConfigError, match="has state already"):
        Adafactor({}, template=template)
