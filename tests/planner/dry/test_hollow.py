"""Tests that hollow tensors are as real ones in everything but their values."""

import gc
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.errors import UsageError
from megazero.memory.ledger import Ledger
from megazero.planner.dry.hollow import FIRST_BYTES, RESERVED_BYTES, Hollow

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")
TIB = 1 << 40


@pytest.fixture
def hollow() -> Iterator[None]:
    with Hollow():
        yield


class Watch(TorchDispatchMode):
    """Records the form of every result, and which of the storages so far it lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self._storages: dict[int, int] = {}
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if not isinstance(one, Tensor):
                continue
            self._kept.append(one)
            storage = one.untyped_storage()
            number = self._storages.setdefault(storage._cdata, len(self._storages))
            form = one.dtype, one.device, tuple(one.shape), one.stride(), one.storage_offset(), storage.nbytes()
            self.seen.append((str(func), number, *form))
        return result


def products() -> Tensor:
    x, w = torch.randn(3, 5, 7, requires_grad=True), torch.randn(11, 7, requires_grad=True)
    y = F.linear(x, w).transpose(0, 1)[1:, :, ::2]
    y.contiguous().view(-1, 6).square().sum().backward()
    assert x.grad is not None
    return x.grad


def in_place() -> Tensor:
    total, part = torch.zeros(4, 6, dtype=torch.bfloat16), torch.ones(6)
    total.add_(part, alpha=2).t_().mul_(0.5)[1:3].copy_(torch.ones(2, 4, dtype=torch.int64))
    out = torch.empty(6, 6)
    torch.mm(torch.randn(6, 4), torch.randn(4, 6), out=out)
    torch._foreach_add_([out, part], 1.0)
    torch._foreach_mul([out, part], 2)
    return out.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 6))


def block() -> Tensor:
    x = torch.randn(2, 3, 8, 4, dtype=torch.bfloat16, requires_grad=True)
    y = F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).reshape(2, 8, 12)
    norm = nn.LayerNorm(12, dtype=torch.bfloat16)
    nn.LayerNorm(12)(y.detach()) + F.layer_norm(y.detach(), (12,))
    z = F.dropout(F.gelu(norm(y), approximate="tanh"), 0.25).float()
    F.cross_entropy(z.view(-1, 12), torch.zeros(16, dtype=torch.int64)).backward()
    return z


def looked_up() -> Tensor:
    table = nn.Embedding(9, 4)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    table(torch.arange(5)).matmul(torch.eye(4)).masked_fill(mask[:, :4], -1.0).softmax(-1).sum().backward()
    assert table.weight.grad is not None
    return torch.cat([*table.weight.grad.split(4), torch.stack([torch.arange(4.0)] * 3)]).cumsum(0)


def update() -> Tensor:
    """Take a step of AdamW as torch's fused optimizer does, in a span of the profiler."""
    weights, gradients, means, squares = ([torch.ones(n) for n in (1, 7)] for _ in range(4))
    steps = [torch.ones(()) for _ in weights]
    with torch.autograd.profiler.record_function("update"):
        torch._foreach_add_(steps, 1)
        scale = torch.stack(torch._foreach_norm(gradients)).norm().reciprocal().clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        flags = {"amsgrad": False, "maximize": False}
        torch._fused_adamw_(weights, gradients, means, squares, [], steps, **options, **flags)
    return weights[0]


def alike() -> Tensor:
    """Call operators twice with what differs in nothing but strides, or the type of a number."""
    square, whole = torch.ones(4, 4), torch.ones(4, dtype=torch.int64)
    return torch.stack([square.clone()[0], square.t().clone()[0], whole + 1, whole + 1.0, whole + True])


@pytest.mark.parametrize("program", [alike, products, in_place, block, looked_up, update])
def test_operations_make_what_real_ones_do(program: Callable[[], Tensor]) -> None:
    with Hollow(), Watch() as hollow_one:
        program()
    with Watch() as real_one:
        program()
    assert hollow_one.seen == real_one.seen


@pytest.mark.usefixtures("hollow")
def test_storages_have_any_size_and_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large = torch.zeros(TIB // 4)
    (large.mul_(2) + large).copy_(large)
    assert large.nbytes == large.untyped_storage().nbytes() == TIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB


@pytest.mark.usefixtures("hollow")
def test_addresses_are_apart_until_they_are_given_back() -> None:
    one, other = torch.empty(1000), torch.empty(1000)
    assert one[10:].data_ptr() - one.data_ptr() == 40 and one.view(10, 100).data_ptr() == one.data_ptr()
    assert abs(one.data_ptr() - other.data_ptr()) >= 4000
    address = other.data_ptr()
    del other
    again = torch.empty(999)
    assert again.data_ptr() == address
    again.untyped_storage().resize_(0)
    assert torch.empty(1000).data_ptr() == address
    assert torch.empty(0).data_ptr() == 0


@pytest.mark.usefixtures("hollow")
def test_storages_are_resized_where_they_are() -> None:
    flat = torch.empty(12)
    view, storage = flat[3:9].view(2, 3), flat.untyped_storage()
    storage.resize_(0)
    assert view.untyped_storage().nbytes() == 0 and view.shape == (2, 3) and storage.resizable()
    storage.resize_(48)
    assert storage.nbytes() == 48 and view.data_ptr() - flat.data_ptr() == 12
    single = torch.ones(1)
    single.untyped_storage().resize_(0)
    assert single.mul_(2) is single  # it has no address, and values neither
    grown = torch.empty(0, dtype=torch.uint8).resize_(100)
    assert grown.shape == (100,) and grown.untyped_storage().nbytes() == 100
    assert grown.resize_(3, 5).untyped_storage().nbytes() == 100


def test_real_storages_are_resized_too() -> None:
    real = torch.ones(4)
    with Hollow():
        real.untyped_storage().resize_(8)
        assert real[:2].tolist() == [1.0, 1.0] and real.untyped_storage().resizable()


def test_torch_is_as_before_when_a_mode_ends() -> None:
    with Hollow():
        assert "resize_" in vars(torch.UntypedStorage)
    assert not {"resize_", "resizable"} & vars(torch.UntypedStorage).keys()
    assert torch.ones(2).tolist() == [1.0, 1.0]


def test_a_ledger_counts_what_is_resized_at_once() -> None:
    ledger = Ledger(CPU)
    with Hollow(ledger.storage_resized), ledger:
        kept = torch.empty(100)
        assert ledger.live_bytes()["temporary"] == 400
        kept.untyped_storage().resize_(0)
        assert ledger.live_bytes()["temporary"] == 0


@pytest.mark.usefixtures("hollow")
def test_numbers_are_counted_and_hollow_ones_are_0() -> None:
    """A torch optimizer counts its steps in such a tensor; what depends on more values than one is refused."""
    steps = torch.tensor(3.5)
    steps += 1
    torch._foreach_add_([steps], 1)
    assert steps.item() == 5.5 and (torch.add(1, other=steps) * 2).view(1).item() == 13.0
    assert (steps * torch.ones(2)).sum().item() == torch.ones(1).item() == 0.0
    with pytest.raises(Exception, match="nonzero"):
        torch.ones(3).nonzero()


@pytest.mark.usefixtures("hollow")
def test_what_would_change_a_result_in_place_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mm\.out, which changes the shape"):
        torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(0))


@pytest.mark.usefixtures("hollow")
def test_meta_tensors_stay() -> None:
    meta = torch.empty(3, 4, device="meta")
    assert (meta @ meta.t()).device.type == "meta" and (meta + meta).stride() == (4, 1)


def test_memory_reads_as_zeros_also_behind_the_context() -> None:
    with Hollow():
        kept = torch.ones(3)
        assert kept.numpy().tolist() == [0.0, 0.0, 0.0]
    gc.collect()
    assert str(kept) == "tensor([0., 0., 0.])"


def test_contexts_follow_one_another_while_their_tensors_are_kept() -> None:
    """So many reserve more addresses than a process has."""
    assert 34 * FIRST_BYTES > 1 << 47
    kept = []
    for _ in range(34):
        with Hollow():
            kept.append(torch.ones(5))
    assert [one.tolist() for one in kept] == [[0.0] * 5] * 34
    kept.clear()
    with Hollow():
        small = torch.ones(2)
        assert torch.empty(RESERVED_BYTES // 8).nbytes == RESERVED_BYTES // 2 > FIRST_BYTES
        assert small.sum().item() == torch.ones(2).sum().item() == 0.0  # hollow before and behind it
