"""Tests the ledger against hand counts, PyTorch's profiler, hollow tensors, and a GPU's allocator if there is one."""

import gc

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megazero.memory.ledger import Ledger, open_ledger
from megazero.memory.ledger_figures import CATEGORIES, Category, StepMemory
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.planner.dry.hollow import Hollow

CPU = torch.device("cpu")
F32 = 4


def nonzero(bytes_by_category: dict[Category, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in bytes_by_category.items() if nbytes}


def check_sums(step: StepMemory) -> None:
    """Check the relations between figures that hold for every step."""
    totals = step.timeline.totals
    assert sum(step.at_peak.values()) == step.peak_bytes == totals.max()
    assert (step.timeline.live >= 0).all()
    assert all(step.peaks[name] >= step.at_peak[name] for name in CATEGORIES)
    assert (step.timeline.operations[1:] >= step.timeline.operations[:-1]).all()


def test_a_storage_counts_once_however_many_views_it_has() -> None:
    with Ledger(CPU) as ledger:
        flat = torch.zeros(100)
        views = [flat[:50], flat[50:].view(5, 10), flat.detach(), flat[::2]]
        assert nonzero(ledger.live_bytes()) == {"temporary": 400}
        del flat
        assert nonzero(ledger.live_bytes()) == {"temporary": 400}
        del views
        assert nonzero(ledger.live_bytes()) == {}
    step = ledger.take()
    assert (step.peak_bytes, step.timeline.totals.tolist()) == (400, [0, 400, 0])
    check_sums(step)


def test_in_place_operations_and_outputs_given_make_nothing() -> None:
    with Ledger(CPU) as ledger:
        a, b = torch.ones(64), torch.ones(64)
        ledger.reset()
        a.add_(b).mul_(2).zero_()
        torch.add(a, b, out=a)
        a[3:7].fill_(1.0)
        a.copy_(b)
        step = ledger.take()
    assert step.timeline.totals.tolist() == [512]
    assert step.timeline.num_operations > 5


def test_a_temporary_that_is_freed_in_between_is_in_the_peak() -> None:
    with Ledger(CPU) as ledger:
        a = torch.ones(10, dtype=torch.float64)
        b = a + (a * 2)  # a 80, a * 2 80, b 80
        assert nonzero(ledger.live_bytes()) == {"temporary": 160}
    step = ledger.take()
    assert step.timeline.totals.tolist() == [0, 80, 160, 240, 160]
    assert (step.peak_bytes, step.peak_operation) == (240, 3)
    assert b.shape == (10,)


def test_every_output_of_an_operation_counts() -> None:
    with Ledger(CPU) as ledger:
        x = torch.arange(12.0).view(3, 4)
        ledger.reset()
        values, indices = x.sort(dim=1)
        assert sum(ledger.live_bytes().values()) == 48 + values.nbytes + indices.nbytes
        parts = list(x.split(2))  # views of one storage
        stacked = torch.stack(parts[:1])
        assert sum(ledger.live_bytes().values()) == 48 + 48 + 96 + stacked.nbytes


def test_reference_cycles_count_until_they_are_collected() -> None:
    with Ledger(CPU) as ledger:
        cycle: list[object] = [torch.zeros(8)]
        cycle.append(cycle)
        del cycle
        assert sum(ledger.live_bytes().values()) in (0, 32)
        gc.collect()
        assert sum(ledger.live_bytes().values()) == 0
    assert ledger.take().peak_bytes == 32


def test_a_storage_resized_in_place_counts_with_its_new_size() -> None:
    with Ledger(CPU) as ledger:
        gathered = torch.zeros(1000)
        ledger.tag(gathered, "gathered_parameters")
        ledger.reset()
        for _ in range(2):
            gathered.untyped_storage().resize_(0)
            ledger.resized(gathered)
            assert nonzero(ledger.live_bytes()) == {}
            gathered.untyped_storage().resize_(4000)
            ledger.resized(gathered)
            ledger.resized(gathered)  # a second report is not counted again
            assert nonzero(ledger.live_bytes()) == {"gathered_parameters": 4000}
        step = ledger.take()
    assert step.timeline.totals.tolist() == [4000, 0, 4000, 0, 4000]


def test_a_resize_by_an_operation_needs_no_telling() -> None:
    with Ledger(CPU) as ledger:
        grows = torch.empty(0)
        torch.arange(5.0, out=grows)
        assert sum(ledger.live_bytes().values()) == 20
        grows.resize_(50)
        assert sum(ledger.live_bytes().values()) == 200
        grows.untyped_storage().resize_(400)
        grows.zero_()  # noticed at the next operation at the latest
        assert sum(ledger.live_bytes().values()) == 400


def test_what_was_there_before_is_entered_by_its_tag() -> None:
    flat = torch.zeros(30)
    ledger = Ledger(CPU)
    ledger.tag(flat[10:], "parameters")
    with ledger:
        assert nonzero(ledger.live_bytes()) == {"parameters": 120}
        ledger.tag(flat, "parameters")
        assert nonzero(ledger.live_bytes()) == {"parameters": 120}
    del flat
    assert nonzero(ledger.live_bytes()) == {}


def test_a_tag_holds_from_birth_and_a_second_one_from_now() -> None:
    with Ledger(CPU) as ledger:
        made = torch.zeros(5)
        torch.zeros(7)
        ledger.tag(made, "master")
        step = ledger.take()
        assert (step.peaks["master"], step.peaks["temporary"]) == (20, 28)
        assert step.timeline.live[1].tolist() == [20 if name == "master" else 0 for name in CATEGORIES]
        ledger.tag(made, "moments")
        step = ledger.take()
    assert step.timeline.live[0].sum() == 20
    assert (step.peaks["master"], step.peaks["moments"], step.peak_bytes) == (20, 20, 20)
    assert nonzero(ledger.live_bytes()) == {"moments": 20}
    check_sums(step)


def test_an_unnamed_storage_of_an_earlier_step_changes_sides_now() -> None:
    """A storage tagged in a later step changes its category then; the figures of the earlier step stay."""
    with Ledger(CPU) as ledger:
        old = torch.zeros(5)
        assert ledger.take().peaks["temporary"] == 20
        ledger.tag(old, "gradients")
        del old
        step = ledger.take()
    check_sums(step)
    assert nonzero(dict(step.peaks)) == {"temporary": 20, "gradients": 20}
    assert step.timeline.live[-1].sum() == 0


def test_the_innermost_category_counts() -> None:
    with Ledger(CPU) as ledger:
        with ledger.category("moments"):
            a = torch.zeros(1)
            with ledger.category("communication_buffers"):
                b = torch.zeros(2)
            c = torch.zeros(4)
        d = torch.zeros(8)
        assert nonzero(ledger.live_bytes()) == {"moments": 20, "communication_buffers": 8, "temporary": 32}
        with pytest.raises(ZeroDivisionError), ledger.category("moments"):
            raise ZeroDivisionError
        e = torch.zeros(16)
        assert nonzero(ledger.live_bytes()) == {"moments": 20, "communication_buffers": 8, "temporary": 96}
    assert all(tensor is not None for tensor in (a, b, c, d, e))


def test_activations_are_what_a_forward_leaves_alive() -> None:
    """Backward of x W keeps x and W, and that of gelu its input, of [10, 6] and [6, 6] floats."""
    weight = torch.zeros(6, 6, requires_grad=True)
    ledger = Ledger(CPU)
    ledger.tag(weight, "parameters")
    with ledger:
        x = torch.ones(10, 6)
        ledger.reset()
        ledger.phase("forward")
        y = nn.functional.gelu(x @ weight)
        loss = y.sum()
        del y
        assert nonzero(ledger.live_bytes()) == {"parameters": 144, "temporary": 240 + 240 + 4}
        ledger.phase("backward")
        assert nonzero(ledger.live_bytes()) == {"parameters": 144, "temporary": 240, "activations": 240 + 4}
        loss.backward()
        assert weight.grad is not None
        ledger.tag(weight.grad, "gradients")
        del loss
        assert nonzero(ledger.live_bytes()) == {"parameters": 144, "temporary": 240, "gradients": 144}
    step = ledger.take()
    check_sums(step)
    # Activations count from birth: at the moment gelu's output exists, its input already counts as an activation.
    forward = step.timeline.live[step.timeline.operations <= step.timeline.phases[1].operation]
    assert forward[:, CATEGORIES.index("activations")].max() == 244
    assert step.peaks["temporary"] >= 480
    assert [mark.phase for mark in step.timeline.phases] == ["forward", "backward"]


def test_a_tagged_checkpoint_is_no_activation() -> None:
    with Ledger(CPU) as ledger:
        ledger.phase("forward")
        kept = torch.zeros(3)
        ledger.tag(kept, "activation_checkpoints")
        other = torch.zeros(2)
        ledger.phase("backward")
        assert nonzero(ledger.live_bytes()) == {"activation_checkpoints": 12, "activations": 8}
        ledger.phase("forward")  # recomputation inside backward
        again = torch.zeros(5)
        del other
        ledger.phase("backward")
        assert nonzero(ledger.live_bytes()) == {"activation_checkpoints": 12, "activations": 20}
        del again
    check_sums(ledger.take())


def test_what_is_elsewhere_is_not_counted_whatever_happens_to_it() -> None:
    with Ledger(CPU) as ledger:
        host, device = torch.zeros(25), torch.zeros(10)
        ledger.elsewhere(host)
        assert nonzero(ledger.live_bytes()) == {"temporary": 40}
        ledger.tag(host[3:], "moments")
        ledger.phase("forward")
        host.add_(1).resize_(50)
        ledger.resized(host)
        ledger.phase("backward")
        ledger.elsewhere(host)  # a second report is not counted again
        assert (nonzero(ledger.live_bytes()), ledger.elsewhere_bytes()) == ({"temporary": 40}, 200)
        device.copy_(host[:10])
        step = ledger.take()
        check_sums(step)
        assert step.timeline.totals.tolist() == [0, 100, 140, 40]  # as counted before the report
        assert step.elsewhere == {"pinned_host": 0, "host": 200}
        ledger.elsewhere(device, is_pinned=True)  # a tensor of an earlier step
        assert (nonzero(ledger.live_bytes()), ledger.elsewhere_bytes()) == ({}, 240)
        assert ledger.elsewhere_by_kind() == {"pinned_host": 40, "host": 200}
        del host, device
        assert ledger.elsewhere_bytes() == 0
        step = ledger.take()
    assert step.timeline.totals.tolist() == [40, 0]
    check_sums(step)


def test_a_named_storage_goes_elsewhere() -> None:
    moments = torch.zeros(8)
    ledger = Ledger(CPU)
    ledger.tag(moments, "moments")
    ledger.elsewhere(moments)
    on_meta = torch.zeros(3, device="meta")  # not on this ledger's device anyway, and yet elsewhere
    ledger.elsewhere(on_meta)
    assert (nonzero(ledger.live_bytes()), ledger.elsewhere_bytes()) == ({}, 32 + 12)
    assert ledger.take().timeline.totals.tolist() == [0, 32, 0]


def test_other_devices_and_layouts_are_left_out() -> None:
    with Ledger(CPU) as ledger:
        on_meta = torch.zeros(100, device="meta")
        sparse = torch.eye(3).to_sparse()
        assert sum(ledger.live_bytes().values()) >= 0
        del sparse
        assert sum(ledger.live_bytes().values()) == 0
    assert on_meta.is_meta


def test_a_gpu_gives_out_multiples_of_512_bytes() -> None:
    """The sizes are counted on torch's fake tensors, which need no GPU."""
    cuda = torch.device("cuda", 0)
    with FakeTensorMode(), Ledger(cuda, allocator=lambda: 0) as ledger:
        tensors = [torch.empty(numel, dtype=torch.uint8, device=cuda) for numel in (0, 1, 512, 513)]
        on_host = torch.empty(1000)
        assert sum(ledger.live_bytes().values()) == 0 + 512 + 512 + 1024
    assert len(tensors) == 4 and on_host.device == CPU


def test_samples_compare_with_an_allocator() -> None:
    answers = iter([100, 190, 400])
    with Ledger(CPU, allocator=lambda: next(answers)) as ledger:
        a = torch.empty(25)
        ledger.phase("forward")
        b = torch.empty(25)
        ledger.phase("backward")
        c = torch.empty(50)
        step = ledger.take()
    assert [tuple(sample) for sample in step.allocator] == [(100, 100), (200, 190), (400, 400)]
    assert step.allocator_gap == pytest.approx(10 / 190)
    assert a.numel() + b.numel() == c.numel()


class Block(nn.Module):
    """A block of width 24: layer norm, two matrices and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 96)
        self.down = nn.Linear(96, 24)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


def train_a_step(ledger: AnyLedger, steps: int = 2) -> list[StepMemory | None]:
    """Train a small model with AdamW; the operations are the same with every ledger."""
    model = nn.Sequential(Block(), Block(), Block())
    for parameter in model.parameters():
        ledger.tag(parameter, "parameters")
        parameter.register_post_accumulate_grad_hook(lambda p: ledger.tag(p.grad, "gradients"))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    taken = []
    for _ in range(steps):
        ledger.reset()
        x = torch.ones(40, 24)
        ledger.phase("forward")
        loss = model(x).square().mean()
        ledger.phase("backward")
        loss.backward()
        del loss
        ledger.phase("update")
        optimizer.step()
        for state in optimizer.state.values():
            ledger.tag(state["exp_avg"], "moments")
            ledger.tag(state["exp_avg_sq"], "moments")
        optimizer.zero_grad()
        taken.append(ledger.take())
    return taken


PARAMETERS = 3 * (24 + 24 + 24 * 96 + 96 + 96 * 24 + 24)


def test_a_training_loop_by_hand() -> None:
    with Ledger(CPU) as ledger:
        _, step = train_a_step(ledger)
    assert step is not None
    check_sums(step)
    assert step.at_peak["parameters"] == step.peaks["parameters"] == F32 * PARAMETERS
    assert step.peaks["moments"] == 2 * F32 * PARAMETERS
    assert step.peaks["gradients"] == F32 * PARAMETERS
    # A block keeps the norm's output and its two statistics per row, up's output, gelu's output, and its own output
    # (the next one's input); the last one's output is kept by the square, whose own output `mean` does not need.
    kept = 3 * F32 * 40 * (24 + 1 + 1 + 96 + 96 + 24)
    loss = F32
    assert step.peaks["activations"] == kept + loss


def test_hollow_tensors_give_the_same_ledger_to_the_byte() -> None:
    with Ledger(CPU) as ledger:
        real = train_a_step(ledger)
    with Hollow(), Ledger(CPU) as ledger:
        hollow = train_a_step(ledger)
    for one, other in zip(real, hollow, strict=True):
        assert one is not None and other is not None
        assert other.timeline.live.tolist() == one.timeline.live.tolist()
        assert other.timeline.operations.tolist() == one.timeline.operations.tolist()
        assert (other.peak_bytes, other.timeline.phases) == (one.peak_bytes, one.timeline.phases)


def test_resizes_of_hollow_storages() -> None:
    with Hollow(), Ledger(CPU) as ledger:
        x = torch.empty(1000)
        x.untyped_storage().resize_(0)
        ledger.resized(x)
        assert sum(ledger.live_bytes().values()) == 0
        x.untyped_storage().resize_(4000)
        ledger.resized(x)
        assert sum(ledger.live_bytes().values()) == 4000
        del x
        assert sum(ledger.live_bytes().values()) == 0


def test_beside_the_allocators_own_events() -> None:
    """The allocator's peak exceeds the ledger's only by scratch memory inside kernels."""
    with Ledger(CPU) as ledger:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(profile_memory=True, activities=activities) as profile:
            steps = train_a_step(ledger, steps=3)
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    ours = max(step.peak_bytes for step in steps if step is not None)
    assert ours <= live.max() <= 1.01 * ours
    assert live[-1] == sum(ledger.live_bytes().values())


def test_a_ledger_watches_while_it_is_entered() -> None:
    assert isinstance(open_ledger(CPU, kept=False), NullLedger)
    with open_ledger(CPU, kept=True) as ledger:
        assert _get_current_dispatch_mode() is not None
        kept = torch.zeros(3)
    assert _get_current_dispatch_mode() is None
    unseen = torch.zeros(3)
    step = ledger.take()
    assert step is not None and (step.peak_bytes, kept.nbytes + unseen.nbytes) == (12, 24)


@pytest.mark.cuda
def test_within_two_percent_of_the_cuda_allocator() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    nn.Linear(64, 64, device=device)(torch.ones(64, 64, device=device)).sum().backward()  # libraries take workspaces
    before = torch.cuda.memory_allocated(device)
    with Ledger(device, allocator=lambda: torch.cuda.memory_allocated(device) - before) as ledger:
        model = nn.Sequential(*(nn.Linear(2048, 2048, device=device) for _ in range(8)))
        for parameter in model.parameters():
            ledger.tag(parameter, "parameters")
            parameter.register_post_accumulate_grad_hook(lambda p: ledger.tag(p.grad, "gradients"))
        ledger.phase("forward")
        loss = model(torch.ones(512, 2048, device=device)).square().mean()
        ledger.phase("backward")
        loss.backward()
        ledger.phase("update")
        step = ledger.take()
    check_sums(step)
    _, backward, update = step.timeline.phases
    assert update.operation - backward.operation > 16  # the mode was active in the engine's own thread too
    assert step.allocator_gap is not None and step.allocator_gap <= 0.02
