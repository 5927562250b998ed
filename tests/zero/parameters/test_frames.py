"""Parameters that are used outside their own module's forward, or recomputed or offloaded, get the right gradients.

Most cases run on one rank in this process, with released memory full of nan; the last test runs all of them on two.
"""

import gc
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from support.each import each
from support.irregular_model import (
    alone,
    engine_around,
    owned_gradient,
    released_memory_is_nan,
    take_step,
)
from support.processes import mesh_in_worker, run_ranks
from support.undeclared_parameters import CASES, Answer, Body, D, Parts
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megazero.comm.mesh import Mesh
from megazero.errors import UsageError
from megazero.zero.engine import Engine
from megazero.zero.parameters.frames import on_gradient
from megazero.zero.parameters.guard import PartitionedParameter
from megazero.zero.parameters.unit_memory import UnitBuckets, UnitState

SETTINGS: list[dict[str, Any]] = [
    {},
    {"prefetch_bucket_size": 0, "max_live_parameters": 0},
    {"prefetch_bucket_size": 10**6, "max_reuse_distance": 10**6, "param_persistence_threshold": 6},
    {"memory_efficient_linear": False},
]
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
Loss = Callable[[nn.Module, Tensor], Tensor]


def first_loss(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    if isinstance(output, Answer):
        output = output.values * output.more["list"][0] + output.more["list"][1][0]
    return output.square().sum()


def make(body: Body) -> Parts:
    torch.manual_seed(5)
    return Parts(body).double()


def inputs(step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, D, dtype=torch.float64, generator=generator).requires_grad_()


@cache
def plain_gradients(body: Body, step: int, ranks: int = 1, loss: Loss = first_loss) -> dict[str, Tensor]:
    model = make(body)
    for rank in range(ranks):
        loss(model, inputs(step, rank)).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


class Found(NamedTuple):
    """The results of a pass on a rank: its part of the gradients by name, and the number of elements still gathered."""

    gradients: dict[str, Tensor]
    gathered: int


def passes(body: Body, mesh: Mesh, settings: dict[str, Any], loss: Loss = first_loss, steps: int = 3) -> list[Found]:
    """Run some passes without an update; the first has no record of uses, the others have one."""
    model = make(body)
    engine = engine_around(model, mesh, **settings)
    found = []
    for step in range(steps):
        engine.begin_step()
        engine.backward(loss(model, inputs(step, mesh.rank)), is_last=True)
        engine.finish_reductions()
        owned = {name: owned_gradient(engine, name, p.numel()).view(p.shape) for name, p in model.named_parameters()}
        found.append(Found(owned, engine.gathered_numel[0]))
    check_nothing_is_left(engine)
    engine.close()
    return found


def check_nothing_is_left(engine: Engine) -> None:
    """Check that no frame, hook or held unit is left, and that every partitioned parameter is guarded."""
    assert engine._frames._stack == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    for unit in engine._gather._units.values():
        assert unit.pins == 0 and unit.state is not UnitState.WHOLE
        assert all(type(parameter) is PartitionedParameter for parameter in unit.parameters)


# Every model at the defaults and with one of the other settings, which take turns.
PAIRS = [(name, SETTINGS[which]) for place, name in enumerate(CASES) for which in (0, 1 + place % (len(SETTINGS) - 1))]


@pytest.mark.parametrize(("name", "settings"), PAIRS, ids=str)
def test_gradients_are_those_of_plain_torch(name: str, settings: dict[str, Any]) -> None:
    with released_memory_is_nan():
        found = passes(CASES[name], alone(), settings)
    for step, (gradients, gathered) in enumerate(found):
        torch.testing.assert_close(gradients, plain_gradients(CASES[name], step), rtol=1e-11, atol=1e-12)
        assert gathered == 0


@pytest.mark.parametrize("name", ["touched_outside_its_module", "one_block, non-reentrant", "one_block, reentrant"])
def test_released_memory_is_not_read_either_when_it_is_really_gone(name: str) -> None:
    for step, (gradients, _) in enumerate(passes(CASES[name], alone(), {})):
        torch.testing.assert_close(gradients, plain_gradients(CASES[name], step), rtol=1e-11, atol=1e-12)


def offloaded(model: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu():
        return first_loss(model, x)


def recomputed_whole(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False).square().sum()


def recomputed_whole_reentrant(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True).square().sum()


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss with a gradient penalty, whose backward goes through a backward."""
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.sum() + slope.square().sum()


def two_outputs(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum() + model(x * 2).sum()


@pytest.mark.parametrize("loss", [offloaded, recomputed_whole, recomputed_whole_reentrant, penalised, two_outputs])
@pytest.mark.parametrize("name", ["touched_outside_its_module", "a_module_around_others, non-reentrant"])
def test_what_is_done_around_the_model(name: str, loss: Loss) -> None:
    with released_memory_is_nan():
        found = passes(CASES[name], alone(), {}, loss)
    for step, (gradients, gathered) in enumerate(found):
        torch.testing.assert_close(gradients, plain_gradients(CASES[name], step, loss=loss), rtol=1e-11, atol=1e-12)
        assert gathered == 0


def test_an_engine_inside_another_ones_forward() -> None:
    """The hooks of one engine's model ignore the parameters of another engine's model."""

    def two_models() -> list[Parts]:
        """Make an outer model that calls an inner one, which computes with a parameter of the outer one."""
        outer = make(lambda m, x: m.b(inner(m.a(x))))
        inner = make(lambda m, x: checkpoint(m.own, torch.tanh(m.a(x)), use_reentrant=False) @ outer.lender.weight)
        return [outer, inner]

    plain = two_models()
    first_loss(plain[0], inputs(0)).backward()
    models = two_models()
    with released_memory_is_nan():
        engines = [engine_around(model, alone()) for model in models]
        for engine in engines:
            engine.begin_step()
            engine.begin_backward(is_last=True)
        first_loss(models[0], inputs(0)).backward()
        for engine in engines:
            engine.end_backward()
            engine.finish_reductions()
    for engine, reference in zip(engines, plain, strict=True):
        for name, parameter in reference.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found = owned_gradient(engine, name, parameter.numel()).view(parameter.shape)
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
        check_nothing_is_left(engine)


def used_in_two_recomputations(m: Parts, x: Tensor) -> Tensor:
    return checkpoint(m.a, checkpoint(m.a, x, use_reentrant=True), use_reentrant=True)


@each("zero_stage", [0, 1, 2, 3])
def test_a_gradient_that_comes_in_two_pieces_is_refused(zero_stage: int) -> None:
    """Each reentrant recomputation has its own backward; the gradient's first piece may already be in reduction."""
    model = make(used_in_two_recomputations)
    engine = engine_around(model, alone(), zero_stage=zero_stage)
    engine.begin_step()
    with pytest.raises(UsageError, match=r"second gradient of a\.(weight|bias)(.|\n)*use_reentrant=False"):
        engine.backward(first_loss(model, inputs(0)), is_last=True)


class Interrupted(RuntimeError):
    """An error that a forward raises midway."""


@pytest.mark.parametrize("settings", [{"prefetch_bucket_size": 0}, {}])
@pytest.mark.parametrize("grad", [True, False])
def test_an_error_in_forward_leaves_nothing_held(settings: dict[str, Any], grad: bool) -> None:
    def fails_at_times(m: Parts, x: Tensor) -> Tensor:
        x = m.b(torch.tanh(m.own(x) @ m.lender.weight)) * m.scale
        if m.training:
            return x
        raise Interrupted

    model = make(fails_at_times)
    engine = engine_around(model, alone(), **settings)
    for step in range(3):
        model.eval()
        with pytest.raises(Interrupted), torch.set_grad_enabled(grad):
            model(inputs(step))
        check_nothing_is_left(engine)
        model.train()
        engine.begin_step()
        engine.backward(first_loss(model, inputs(step)), is_last=True)
        engine.finish_reductions()
        expected = plain_gradients(fails_at_times, step)
        for name, parameter in model.named_parameters():
            found = owned_gradient(engine, name, parameter.numel()).view(parameter.shape)
            torch.testing.assert_close(found, expected[name], rtol=1e-11, atol=1e-12)
        assert engine.gathered_numel[0] == 0


class Saving(nn.Module):
    """A model around an operation whose backward reads its own output, or views of it."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 64), nn.Linear(64, 1)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.operation(self.first(x)))


def attends(x: Tensor) -> Tensor:
    heads = x.view(1, -1, 4, 16).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)


def alive() -> int:
    gc.collect()
    return sum(1 for one in gc.get_objects() if isinstance(one, Tensor))


@each(
    "operation",
    [torch.tanh, lambda x: x.softmax(-1), attends, lambda x: x.t().exp().t(), lambda x: x.exp()[:, ::2].repeat(1, 2)],
    ids=["tanh", "softmax", "attention", "a view's output", "a view of the output"],
)
def test_a_forward_without_a_backward_frees_everything(operation: Callable[[Tensor], Tensor]) -> None:
    model = Saving(operation).double()
    engine = engine_around(model, alone())
    for _ in range(2):
        model(inputs(0))
    before = alive()
    for _ in range(3):
        model(inputs(0))
    assert alive() == before
    engine.close()


def changes_what_was_saved(x: Tensor) -> Tensor:
    return torch.tanh(x).mul_(2)


def changes_the_base_of_what_was_saved(x: Tensor) -> Tensor:
    y = x * 1
    z = y[:2].square().sum() + y.sum()
    y[2:].add_(1)
    return x * z


@each("operation", [changes_what_was_saved, changes_the_base_of_what_was_saved])
@each("zero_stage", [2, 3])
def test_a_saved_tensor_that_changes_in_place_is_an_error(operation: Body, zero_stage: int) -> None:
    """As in plain torch; with any hooks of saved tensors torch itself leaves the check out."""
    model = Saving(operation).double()
    engine = engine_around(model, alone(), zero_stage=zero_stage)
    engine.begin_step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.DoubleTensor \[\d, 64\]\]"):
        engine.backward(model(inputs(0)).sum(), is_last=True)
    engine.reset_step()
    engine.close()


def test_a_saved_tensor_may_change_where_plain_torch_lets_it() -> None:
    """A write to what was not saved, and one whose version is preserved, change no gradient and raise nothing."""

    def writes(x: Tensor) -> Tensor:
        y = x.sigmoid() + 1
        return y.add_(3)

    model = Saving(writes).double()
    plain = deepcopy(model)
    plain(inputs(0)).sum().backward()
    engine = engine_around(model, alone())
    engine.begin_step()
    engine.backward(model(inputs(0)).sum(), is_last=True)
    engine.finish_reductions()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        found = owned_gradient(engine, name, parameter.numel()).view(parameter.shape)
        torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-14)
    engine.close()


def test_views_that_leave_the_model_keep_their_values() -> None:
    """Views in the outermost forward's output keep their values after the parameters are released."""

    def lends(m: Parts, x: Tensor) -> Tensor:
        return torch.stack([m.lender(slice(2)), m.lender(slice(2))])[0], m.lender(slice(2, 4)), m.lender(slice(1))

    model = make(lends)
    expected = model.lender.weight.detach().clone()
    engine = engine_around(model, alone())
    outputs = []
    for _ in range(2):
        with torch.no_grad():
            outputs.append(model(inputs(0)))
    for _, lower, upper in outputs:
        assert torch.equal(lower, expected[2:4]) and torch.equal(upper, expected[:1])
    check_nothing_is_left(engine)
    assert engine.gathered_numel[0] == 0


def test_views_from_a_module_are_gathered_once() -> None:
    """Parameters of which a module returns views stay gathered for the forward that uses the views."""
    model = make(CASES["views_from_a_module"])
    engine = engine_around(model, alone(), prefetch_bucket_size=0)
    launched: list[str] = []
    launch = engine._gather.memory.launch

    def noting(*groups: UnitBuckets) -> None:
        launched.extend(unit.name for unit, *_ in groups)
        launch(*groups)

    engine._gather.memory.launch = noting
    with torch.no_grad():
        model(inputs(0))
    assert launched == ["the model", "lender"]


class Shell(nn.Module):
    """A module without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"first": nn.Linear(D, D), "second": nn.Linear(D, D)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inside["first"](x)) @ self.inside["second"].weight


def test_a_module_without_parameters_may_touch_those_of_others() -> None:
    torch.manual_seed(2)
    plain = Shell().double()
    torch.manual_seed(2)
    model = Shell().double()
    engine = engine_around(model, alone())
    expected = plain(inputs(0)).square().sum()
    expected.backward()
    engine.begin_step()
    engine.backward(model(inputs(0)).square().sum(), is_last=True)
    engine.finish_reductions()
    for name, parameter in plain.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(owned_gradient(engine, name, parameter.numel()).view(parameter.shape), gradient)


def test_what_is_saved_of_other_tensors_goes_where_the_user_wants_it() -> None:
    """A user's saved-tensor hooks around the model get the activations and no parameter."""
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    model = make(CASES["several_calls_of_one_module"])
    engine_around(model, alone())
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        first_loss(model, inputs(0))
    assert set(packed) == {(3, D)}, "parameters are [4, 4] and [4]"


def test_close_takes_the_hooks_off() -> None:
    model = make(CASES["one_block, reentrant"])
    engine = engine_around(model, alone())
    engine.close()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def on_two_ranks(rank: int) -> dict[str, list[Found]]:
    mesh = mesh_in_worker(rank, dp=2)
    with released_memory_is_nan():
        return {name: passes(body, mesh, {}, steps=2) for name, body in CASES.items()}


@pytest.mark.gloo
def test_the_same_on_two_ranks() -> None:
    found = run_ranks(2, on_two_ranks)
    for name, body in CASES.items():
        for step in range(2):
            expected = plain_gradients(body, step, ranks=2)
            summed = {key: sum(rank[name][step].gradients[key] for rank in found) for key in expected}
            torch.testing.assert_close(
                summed, expected, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: name + text
            )


def test_an_update_is_seen_by_the_next_forward() -> None:
    model = make(CASES["touched_outside_its_module"])
    engine = engine_around(model, alone(), prefetch_bucket_size=10**6, max_reuse_distance=10**6)
    losses = []
    for _ in range(4):
        engine.begin_step()
        loss = first_loss(model, inputs(0))
        losses.append(loss.item())
        engine.backward(loss, is_last=True)
        take_step(engine)
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4


def test_every_trainable_parameter_reports_once_a_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].bias.requires_grad_(False)
    model[1].weight = model[0].weight  # tied: one parameter
    ready: list[str] = []
    handles = on_gradient(dict(model.named_parameters()), lambda name, _: ready.append(name))
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    assert sorted(ready) == ["0.weight", "0.weight", "1.bias", "1.bias"]
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert len(ready) == 4
