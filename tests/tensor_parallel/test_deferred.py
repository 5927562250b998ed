"""Gradients that are deferred and accumulated later equal those of a plain backward in values, order and precision."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.tensor_parallel.deferred import DeferredGradients
from megazero.zero.parameters.guard import PartitionedParameter, attach_handle, guard

Use = Callable[[nn.Parameter], Tensor]


class Tied(nn.Module):
    """A model with a matrix that is used first and last; parameters are registered in the order of their use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Parameter(torch.randn(9, 5, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def loss(self, ids: Tensor, use: Use) -> Tensor:
        x = F.embedding(ids, use(self.words))
        x = x + torch.tanh(F.linear(x, use(self.weight), use(self.bias)))
        return F.linear(x, use(self.words)).logsumexp(-1).sum()


def arrivals(model: nn.Module) -> list[str]:
    """Return a list to which the name of each parameter is added when its gradient hook fires."""
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    return fired


def itself(parameter: nn.Parameter) -> Tensor:
    return parameter


def test_three_micro_batches_given_after_each_other() -> None:
    plain, ours = Tied(), Tied()
    deferred, fired, held = DeferredGradients(), arrivals(ours), []
    batches = [torch.tensor([0, 3, 3]), torch.tensor([8, 1, 2]), torch.tensor([4, 4, 4])]
    for ids in batches:
        plain.loss(ids, itself).backward()
        ours.loss(ids, deferred.alias).backward()
        held.append(deferred.collect())
    assert not fired and all(parameter.grad is None for parameter in ours.parameters())
    for part in held:
        part.accumulate()
    assert fired == 3 * ["bias", "weight", "words"]
    for expected, found in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-13, atol=1e-13)
    for part in held:
        part.accumulate()
    assert len(fired) == 9, "given once"


def test_the_order_is_that_of_the_first_use_whatever_backward_does() -> None:
    model, deferred = Tied(), DeferredGradients()
    fired = arrivals(model)
    model.loss(torch.tensor([1]), deferred.alias)  # several forwards before the first backward
    loss = model.loss(torch.tensor([2]), deferred.alias)
    deferred.alias(model.words)  # a second alias in one forward, as recomputation makes it
    deferred.defer(model.bias, lambda: torch.ones(5, dtype=torch.float64))
    loss.backward()
    deferred.collect().accumulate()
    assert fired == ["bias", "weight", "words"]


def test_only_what_has_come_is_given_and_what_is_not_taken_is_not() -> None:
    model, deferred = Tied(), DeferredGradients()
    fired = arrivals(model)
    (deferred.alias(model.bias).sum() + deferred.alias(model.weight).detach().sum()).backward()
    first = deferred.collect()
    deferred.alias(model.words).sum().backward()
    first.accumulate()
    assert fired == ["bias"]
    deferred.collect().accumulate()
    assert fired == ["bias", "words"]
    deferred.collect().accumulate()
    assert fired == ["bias", "words"]


def test_a_graph_that_is_walked_twice_counts_twice() -> None:
    deferred, parameter = DeferredGradients(), nn.Parameter(torch.ones(3))
    loss = (deferred.alias(parameter) * 5).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    deferred.collect().accumulate()
    assert parameter.grad is not None and parameter.grad.tolist() == [10.0, 10.0, 10.0]


def test_frozen_parameters_are_not_set_aside() -> None:
    model, deferred = Tied(), DeferredGradients()
    model.weight.requires_grad_(False)
    assert deferred.alias(model.weight) is model.weight
    fired = arrivals(model)
    model.loss(torch.tensor([1, 2]), deferred.alias).backward()
    deferred.collect().accumulate()
    assert fired == ["bias", "words"] and model.weight.grad is None


def test_an_alias_of_an_alias_is_our_own_bug() -> None:
    deferred = DeferredGradients()
    with pytest.raises(AssertionError, match="an alias has no alias"):
        deferred.alias(deferred.alias(nn.Parameter(torch.ones(2))))


def test_gradients_add_up_in_flat_memory_and_in_their_own_precision() -> None:
    """Contributions in bf16 and fp32, in either order, are added to an fp32 gradient without rounding."""
    small = 2.0**-12
    for first, second in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        deferred, flat = DeferredGradients(), torch.full((6,), 1.0)
        parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
        parameter.grad_dtype = torch.float32
        parameter.grad = flat.view(2, 3)
        for dtype in (first, second):
            value = 1.0 if dtype == torch.bfloat16 else small
            deferred.defer(parameter, lambda dtype=dtype, value=value: torch.full((2, 3), value, dtype=dtype))
        deferred.collect().accumulate()
        assert torch.equal(flat, torch.full((6,), 2 + small))


def test_what_autograd_finds_keeps_the_parameters_gradient_precision() -> None:
    class Third(torch.autograd.Function):
        """A function whose gradient has a higher precision than the weight, as that of the head does."""

        @staticmethod
        def forward(ctx, weight):
            return weight.sum()

        @staticmethod
        def backward(ctx, grad):
            return torch.full((4,), 1 / 3)

    deferred, parameter = DeferredGradients(), nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    Third.apply(deferred.alias(parameter)).backward()
    deferred.collect().accumulate()
    assert parameter.grad is not None and torch.equal(parameter.grad, torch.full((4,), 1 / 3))


def test_a_parameter_without_values_can_be_given_a_gradient() -> None:
    """A parameter between its uses in ZeRO stage 3, without storage and guarded against reads, can get a gradient."""

    class Refuses:
        def touched(self, name: str, call: str) -> None:
            raise AssertionError(f"{call} of {name}")

    deferred, parameter = DeferredGradients(), nn.Parameter(torch.ones(3, 4))
    alias = deferred.alias(parameter)
    assert torch._C._storage_address(alias) == torch._C._storage_address(parameter)
    (alias * 2).sum().backward()
    deferred.defer(parameter, lambda: torch.ones(3, 4))
    fired: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda found: fired.append(found.grad))
    parameter.untyped_storage().resize_(0)
    attach_handle(parameter, "weight", Refuses())
    guard(parameter)
    deferred.collect().accumulate()
    assert type(parameter) is PartitionedParameter and len(fired) == 1
    assert torch.equal(fired[0], torch.full((3, 4), 3.0))


def test_each_gradient_is_made_when_the_one_before_has_been_given_and_none_is_copied() -> None:
    deferred = DeferredGradients()
    events: list[str] = []
    addresses: list[int] = []

    def make(name: str) -> Tensor:
        gradient = torch.ones(100)
        events.append(f"make {name}")
        addresses.append(gradient.data_ptr())
        return gradient

    def given(parameter: Tensor, name: str) -> None:
        assert parameter.grad is not None and parameter.grad.data_ptr() == addresses[-1]
        events.append(f"give {name}")

    parameters = {name: nn.Parameter(torch.zeros(100)) for name in "ab"}
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(partial(given, name=name))
        deferred.defer(parameter, partial(make, name))
    deferred.collect().accumulate()
    assert events == ["make b", "give b", "make a", "give a"]


def test_what_autograd_has_found_is_not_copied_either() -> None:
    deferred, parameter = DeferredGradients(), nn.Parameter(torch.zeros(100))
    made: list[int] = []

    class Ones(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.sum()

        @staticmethod
        def backward(ctx, grad):
            gradient = torch.ones(100)
            made.append(gradient.data_ptr())
            return gradient

    Ones.apply(deferred.alias(parameter)).backward()
    deferred.collect().accumulate()
    assert parameter.grad is not None and parameter.grad.data_ptr() == made[0]
