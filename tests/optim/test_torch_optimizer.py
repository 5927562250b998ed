"""Tests torch optimizers on flat runs against the same optimizer on the model itself, and those that are refused."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.each import each
from support.optimizers import (
    CountsInGroup,
    CountsInItself,
    InBlocks,
    InOneType,
    KeepsGradient,
    KeepsList,
    Lion,
    NeedsMore,
    Noisy,
    Scaled,
    TrustRatio,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from megazero.errors import CheckpointError, ConfigError
from megazero.optim.torch_optimizer import FlatRun, RunState, TorchOptimizer, check_elementwise

STEPS = 5
Groups = list[dict[str, Any]]

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD, Nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD, dampened": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "foreach": True}),
    "Adam": (torch.optim.Adam, {"betas": (0.8, 0.95)}),
    "Adam, AMSGrad, fused": (torch.optim.Adam, {"amsgrad": True, "fused": True}),
    "AdamW": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, capturable": (torch.optim.AdamW, {"capturable": True}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.2, "lr_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"betas": (0.9, 0.8)}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {"maximize": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 2.0}),
}


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def groups(net: nn.Module) -> Groups:
    """Return two groups: weights with a decay, and biases without one and with another rate."""
    named = list(net.named_parameters())
    weights = [p for name, p in named if name.endswith("weight")]
    biases = [p for name, p in named if name.endswith("bias")]
    return [{"params": weights, "lr": 0.03}, {"params": biases, "lr": 0.01, "weight_decay": 0.0}]


def loss(net: nn.Module, step: int) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return net(x).square().sum()


@dataclass
class FlatModel:
    """A model whose parameters are also one flat tensor per group, which is cut into uneven runs."""

    net: nn.Module
    template: Optimizer
    flats: list[Tensor]
    optimizer: TorchOptimizer
    runs: list[tuple[int, slice]]

    @classmethod
    def of(cls, make: Callable[[Groups], Optimizer]) -> "FlatModel":
        net = model()
        template = make(groups(net))
        optimizer = TorchOptimizer(template)
        flats = [nn.utils.parameters_to_vector(group["params"]).detach() for group in template.param_groups]
        runs = []
        for index, flat in enumerate(flats):
            cuts = [0, 1, flat.numel() // 3, flat.numel()]
            runs += [(index, slice(a, b)) for a, b in pairwise(cuts)]
        optimizer.bind([FlatRun(flats[index][part], index) for index, part in runs])
        return cls(net, template, flats, optimizer, runs)

    def step(self, number: int, *, lr: float | None = None) -> None:
        """Compute the model's gradients, update the runs from one lent buffer, and copy the new values to the model."""
        self.net.zero_grad()
        loss(self.net, number).backward()
        gradients = [flat_gradient(group["params"]) for group in self.template.param_groups]
        buffer = torch.empty(64, dtype=torch.float64)
        for run, (index, part) in enumerate(self.runs):
            lent = buffer[: part.stop - part.start].copy_(gradients[index][part])
            self.optimizer.step_run(run, lent, lr=lr)
            buffer.fill_(torch.nan)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        for flat, group in zip(self.flats, self.template.param_groups, strict=True):
            nn.utils.vector_to_parameters(flat.clone(), group["params"])


def flat_gradient(parameters: Iterable[nn.Parameter]) -> Tensor:
    found = [p.grad for p in parameters]
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def plain_step(net: nn.Module, optimizer: Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss(net, number).backward()
    optimizer.step()


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def maker(name: str) -> Callable[[Groups], Optimizer]:
    kind, options = OPTIMIZERS[name]
    decay = {} if name == "Rprop" else {"weight_decay": 0.1}
    return lambda parameters: kind(parameters, **decay, **options)


@each("name", OPTIMIZERS)
def test_runs_equal_the_model(name: str) -> None:
    """Two groups, cut into uneven runs down to one element, follow a scheduler that moves both groups' rates."""
    flat, plain = FlatModel.of(maker(name)), model()
    # Only the flat twin drops "capturable" by itself; torch refuses it on a CPU.
    optimizer = maker(name)(groups(plain))
    for group in optimizer.param_groups:
        group["capturable"] = False
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.3) for each in (flat.template, optimizer)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(STEPS):
            flat.step(number)
            plain_step(plain, optimizer, number)
            for scheduler in schedulers:
                scheduler.step()
    assert flat.template.param_groups[0]["lr"] == 0.03 * 0.3**2
    assert_equal(flat.net, plain)


def test_every_option_of_the_template_acts() -> None:
    """A schedule of betas and weight decay takes effect, not one of the rate alone."""
    flat, plain = FlatModel.of(maker("AdamW")), model()
    optimizer = maker("AdamW")(groups(plain))
    for number in range(STEPS):
        for group in (*flat.template.param_groups, *optimizer.param_groups):
            group["betas"] = (0.9 - 0.1 * number, 0.99)
            group["weight_decay"] = 0.2 * number
        flat.step(number)
        plain_step(plain, optimizer, number)
    assert_equal(flat.net, plain)


def test_the_rate_of_a_step_may_be_given() -> None:
    """The given rate holds for that step only."""
    flat, plain = FlatModel.of(maker("Adam")), model()
    optimizer = maker("Adam")(groups(plain))
    for number, rate in enumerate((0.5, None, 0.0, 0.02, None)):
        flat.step(number, lr=rate)
        for group, own in zip(optimizer.param_groups, (0.03, 0.01), strict=True):
            group["lr"] = own if rate is None else rate
        plain_step(plain, optimizer, number)
    assert_equal(flat.net, plain)


def test_a_tensor_as_the_rate() -> None:
    parameters = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    rate, twin = torch.tensor(0.1), torch.tensor(0.1)
    optimizer = TorchOptimizer(torch.optim.AdamW(parameters[:1], lr=rate, foreach=False))
    plain = torch.optim.AdamW(parameters[1:], lr=twin, foreach=False)
    master = torch.ones(3, dtype=torch.float64)
    optimizer.bind([FlatRun(master, 0)])
    for number in range(3):
        if number == 1:
            rate = optimizer.template.param_groups[0]["lr"] = torch.tensor(0.0)
        rate.fill_(0.1 * number)
        twin.fill_(0.1 * number)
        optimizer.step_run(0, torch.full((3,), 0.5 - number, dtype=torch.float64))
        parameters[1].grad = torch.full((3,), 0.5 - number, dtype=torch.float64)
        plain.step()
    torch.testing.assert_close(master, parameters[1].detach(), rtol=1e-12, atol=1e-12)


def test_other_runs_stay_untouched_and_gradients_are_not_kept() -> None:
    flat = FlatModel.of(maker("Adam"))
    before = [each.clone() for each in flat.flats]
    gradient = torch.ones(flat.runs[1][1].stop - 1, dtype=torch.float64)
    flat.optimizer.step_run(1, gradient)
    index, part = flat.runs[1]
    changed = flat.flats[index] != before[index]
    assert changed[part].all() and changed.sum() == gradient.numel()
    assert torch.equal(flat.flats[1], before[1])
    assert [bool(flat.optimizer.state_of(run).tensors) for run in range(3)] == [False, True, False]
    kept = weakref.ref(gradient)
    gradient.fill_(torch.nan)
    del gradient
    assert kept() is None
    assert all(tensor.isfinite().all() for tensor in flat.optimizer.state_of(1).tensors.values())


def test_groups_of_parameters() -> None:
    net = model()
    stranger = nn.Parameter(torch.zeros(2))
    optimizer = TorchOptimizer(torch.optim.SGD(groups(net)))
    found = [optimizer.group_of(p) for p in (*net.parameters(), stranger)]
    assert found == [0, 1, 0, 1, None]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_on_elsewhere(name: str) -> None:
    """A new optimizer over the same runs takes the state over after two steps, and continues equal to the bit."""
    straight, first, second = (FlatModel.of(maker(name)) for _ in range(3))
    for number in range(STEPS):
        straight.step(number)
    for number in range(2):
        first.step(number)
    for ours, theirs in zip(second.flats, first.flats, strict=True):
        ours.copy_(theirs)
    second.publish()
    for run in range(len(second.runs)):
        state = copy.deepcopy(first.optimizer.state_of(run))
        second.optimizer.set_state(run, state)
        for tensor in state.tensors.values():
            tensor.fill_(torch.nan)
    for number in range(2, STEPS):
        second.step(number)
    for ours, theirs in zip(second.flats, straight.flats, strict=True):
        assert torch.equal(ours, theirs)


def test_state_by_name() -> None:
    """Tensors and numbers are distinguished even in a run of one element; the tensors are the optimizer's own."""
    flat = FlatModel.of(maker("Adam"))
    assert flat.optimizer.state_of(0) == RunState({}, {})
    assert flat.optimizer.state_names(0) == ("exp_avg", "exp_avg_sq")
    flat.step(0)
    flat.step(1)
    state = flat.optimizer.state_of(0)
    assert list(state.tensors) == ["exp_avg", "exp_avg_sq"] and state.numbers == {"step": 2.0}
    assert state.tensors["exp_avg"].shape == (1,)
    state.tensors["exp_avg"].zero_()
    assert flat.optimizer.state_of(0).tensors["exp_avg"].item() == 0.0
    flat.optimizer.set_state(0, RunState({}, {}))
    assert flat.optimizer.state_of(0) == RunState({}, {})


def test_state_of_another_optimizer_is_refused() -> None:
    adam, sgd = FlatModel.of(maker("Adam")), FlatModel.of(maker("SGD, Nesterov"))
    adam.step(0)
    with pytest.raises(CheckpointError, match=r"exp_avg, exp_avg_sq, step(?s:.*)SGD keeps momentum_buffer"):
        sgd.optimizer.set_state(1, adam.optimizer.state_of(1))


USERS: dict[str, Callable[[Groups], Optimizer]] = {
    "Lion": lambda parameters: Lion(parameters, 0.1),
    "Lion, momentum in bf16": lambda parameters: Lion(parameters, 0.1, kept_in=torch.bfloat16),
    "count in the group": CountsInGroup,
    "setting of its own": lambda parameters: Scaled(parameters, scale=0.3),
}


@pytest.mark.parametrize("make", USERS.values(), ids=USERS.keys())
def test_elementwise_optimizers_of_users(make: Callable[[Groups], Optimizer]) -> None:
    """Elementwise optimizers of users pass, equal themselves on the whole model, and continue from a saved state."""
    flat, resumed, plain = FlatModel.of(make), FlatModel.of(make), model()
    optimizer = make(groups(plain))
    for number in range(STEPS):
        flat.step(number)
        plain_step(plain, optimizer, number)
        if number == 1:
            for run in range(len(flat.runs)):
                resumed.optimizer.set_state(run, flat.optimizer.state_of(run))
            for ours, theirs in zip(resumed.flats, flat.flats, strict=True):
                ours.copy_(theirs)
            resumed.publish()
        if number > 1:
            resumed.step(number)
    assert_equal(flat.net, plain)
    assert_equal(resumed.net, plain)


def test_state_keeps_its_own_dtype() -> None:
    flat, other = (FlatModel.of(lambda parameters: Lion(parameters, 0.1, kept_in=torch.bfloat16)) for _ in range(2))
    flat.step(0)
    other.optimizer.set_state(1, flat.optimizer.state_of(1))
    for either in (flat, other):
        assert either.optimizer.state_of(1).tensors["average"].dtype == torch.bfloat16


def test_numbers_of_a_group_are_state() -> None:
    flat = FlatModel.of(CountsInGroup)
    flat.step(0)
    flat.step(1)
    assert flat.optimizer.state_of(2) == RunState({}, {"group.step": 2.0})


REFUSED: dict[str, tuple[type[Optimizer], dict[str, Any], str]] = {
    "LBFGS": (torch.optim.LBFGS, {}, "asks for a closure"),
    "Adafactor": (torch.optim.Adafactor, {}, "state 'row_var' has shape [6, 1] for a parameter of shape [6, 5]"),
    "Muon": (torch.optim.Muon, {}, "raises ValueError on a flat piece: Muon only supports 2D parameters"),
    "SparseAdam": (torch.optim.SparseAdam, {}, "SparseAdam does not support dense gradients"),
    "differentiable": (torch.optim.Adam, {"differentiable": True}, "raises RuntimeError"),
    "trust ratio": (TrustRatio, {}, "elements of a flat piece differ from the same ones of a matrix by up to"),
    # With the template's rate nothing would move, and so nothing would differ.
    "trust ratio in a warm-up": (TrustRatio, {"lr": 0.0}, "elements of a flat piece differ"),
    "gradient kept": (KeepsGradient, {}, "keeps the gradient itself"),
    "list kept": (KeepsList, {}, "state 'history' is a list"),
    "count outside the state": (CountsInItself, {}, "does not suffice to go on"),
    "integers in blocks": (InBlocks, {}, "its state 'momentum' of 16384 elements is a Tensor of torch.int8"),
    "other precision": (InOneType, {}, "its state 'momentum' of 16384 elements is a Tensor of torch.bfloat16"),
    "noise": (Noisy, {}, "elements of a flat piece differ"),
    "more than options": (NeedsMore, {"horizon": 3}, "missing 1 required positional argument: 'horizon'"),
}


@each("name", REFUSED)
def test_refused_with_what_was_seen(name: str) -> None:
    kind, options, seen = REFUSED[name]
    template = kind([nn.Parameter(torch.ones(3, 4))], **options)
    before = torch.get_rng_state()
    with pytest.raises(ConfigError) as caught:
        TorchOptimizer(template)
    (problem,) = caught.value.problems
    assert seen in problem.given and kind.__name__ in problem.given
    assert check_elementwise(kind, template.defaults) == problem
    assert torch.equal(torch.get_rng_state(), before)


def test_each_group_is_tried() -> None:
    net = model()
    parameters = groups(net)
    parameters[1]["differentiable"] = True
    with pytest.raises(ConfigError, match="RuntimeError"):
        TorchOptimizer(torch.optim.Adam(parameters))
    assert check_elementwise(torch.optim.Adam, {"lr": 0.1}) is None


@pytest.mark.parametrize("name", ["SGD, Nesterov", "Adam", "Adagrad"])
def test_an_optimizer_that_has_stepped_is_refused(name: str) -> None:
    net = model()
    optimizer = maker(name)(groups(net))
    plain_step(net, optimizer, 0)
    with pytest.raises(ConfigError, match="state already"):
        TorchOptimizer(optimizer)


def test_state_that_the_template_was_made_with_is_freed() -> None:
    """Adagrad makes its accumulators at once, as large as the model, so they are freed."""
    flat = FlatModel.of(maker("Adagrad"))
    assert len(flat.template.state) == 0
