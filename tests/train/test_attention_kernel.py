"""The attention kernel is chosen by name or by the time it takes, and the chosen kernel is the one that computes."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from support.small_runs import core_on_rank, reference_batch, tiny_run
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, list_flash_attention_impls
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.comm.local import LocalCommunicator
from megazero.data.loader import MicroBatch, StepBatch
from megazero.errors import ConfigError
from megazero.train import attention_kernel
from megazero.train.attention_kernel import (
    KERNELS,
    AttentionCall,
    KernelChoice,
    attention_call,
    check_attention,
    choose_for_run,
    choose_kernel,
    computing_kernel,
    largest,
    measure,
    prefer_kernel,
    reported,
)
from megazero.train.build import step_context
from megazero.train.step import StepControls, training_step

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = (1, 2, 8, 4)


def on(device: torch.device) -> AttentionCall:
    return AttentionCall(SHAPE, torch.bfloat16, device, 0.0)


class Operators(TorchDispatchMode):
    """A dispatch mode that collects the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@each("name", list(KERNELS))
def test_a_name_is_taken_at_its_word(name: str) -> None:
    assert choose_kernel(name, on(CPU), list) == choose_kernel(name, on(GPU), list) == name


def test_the_cpu_is_left_to_torch() -> None:
    assert choose_kernel("auto", on(CPU), list, lambda *_: pytest.fail("measured")) is None
    assert choose_for_run(tiny_run(), CPU, LocalCommunicator()) == KernelChoice(None, "")


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"flash": 2.0, "fused": 1.0, "efficient": 3.0}, "fused"),
        ({"flash": 2.0, "fused": None, "efficient": 3.0}, "flash"),
        ({"flash": None, "fused": None, "efficient": None}, None),
    ],
)
def test_auto_is_the_fastest_that_can(seconds: dict[str, float | None], chosen: str | None) -> None:
    assert choose_kernel("auto", on(GPU), list, lambda name, _: seconds[name]) == chosen


def test_a_deterministic_run_measures_nothing() -> None:
    """What was fastest could differ when the run is resumed, so the order is fixed, without cuDNN's kernel."""
    call = attention_call(tiny_run(deterministic_mode=True), GPU)
    assert call.is_deterministic and not on(GPU).is_deterministic
    assert choose_kernel("auto", call, list, lambda *_: pytest.fail("measured")) == "flash"


def test_all_ranks_take_the_kernel_that_is_fastest_on_its_slowest_rank() -> None:
    """The times of two ranks disagree on the fastest, and one rank lacks a kernel; both ranks choose the same."""
    ranks = [{"flash": 2.0, "fused": 1.0, "efficient": 0.1}, {"flash": 2.5, "fused": 3.0, "efficient": None}]

    def slowest(_: Sequence[float]) -> list[float]:
        return [max(math.inf if (s := rank[name]) is None else s for rank in ranks) for name in ranks[0]]

    for rank in ranks:
        assert choose_kernel("auto", on(GPU), slowest, lambda name, _, rank=rank: rank[name]) == "flash"


def largest_on_rank(rank: int) -> list[float]:
    world = mesh_in_worker(rank, dp=2).world
    return largest(world, CPU, [2.0 + rank, 3.0 - rank, math.inf if rank else 1.0])


@pytest.mark.gloo
def test_times_are_compared_over_all_ranks() -> None:
    assert run_ranks(2, largest_on_rank) == [[3.0, 3.0, math.inf]] * 2
    assert largest(LocalCommunicator(), CPU, [2.0, math.inf]) == [2.0, math.inf]


def test_flash_is_no_candidate_where_there_is_a_mask() -> None:
    masked = on(GPU)._replace(is_masked=True)
    seconds = {"flash": 1.0, "fused": 3.0, "efficient": 2.0}
    assert choose_kernel("auto", masked, list, lambda name, _: seconds[name]) == "efficient"
    assert not attention_call(tiny_run(), GPU).is_masked
    assert attention_call(tiny_run(reset_attention_mask=True), GPU).is_masked


@each(("kernel", "is_flash"), [(None, True), ("flash", True), ("fused", True), ("unfused", False)])
def test_what_is_preferred_computes(kernel: str | None, is_flash: bool) -> None:
    """The preferred kernel computes; a CPU has flash and plain products, and a kernel that it lacks is skipped."""
    query = torch.randn(SHAPE)
    with prefer_kernel(kernel), Operators() as operators:
        mixed = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert any("flash" in name for name in operators.names) is is_flash
    torch.testing.assert_close(mixed, F.scaled_dot_product_attention(query, query, query, is_causal=True))


def test_the_shape_is_that_of_one_rank() -> None:
    config = tiny_run(tensor_model_parallel_size=2)
    model = config.model
    call = attention_call(config, CPU)
    heads, head_dim = model.num_attention_heads // 2, model.hidden_size // model.num_attention_heads
    assert call.shape == (config.training.micro_batch_size, heads, model.seq_length, head_dim)


def test_operands_have_the_strides_of_the_model() -> None:
    """The measured tensors are laid out as the model's, which are views of what one linear layer has made."""
    config, given = tiny_run(), []

    def attend(*operands: torch.Tensor, **rest: Any) -> torch.Tensor:
        given.extend(operands)
        return original(*operands, **rest)

    original = F.scaled_dot_product_attention
    core = core_on_rank(0, config)
    with patch.object(F, "scaled_dot_product_attention", attend):
        batch = reference_batch(0, 2, masked=False)
        core.model.summed_loss(batch.tokens, batch.labels)
    core.engine.end_walk(ends_pass=True)
    core.engine.close()
    mine = attention_call(config, CPU).operands()
    for theirs, ours in zip(given, mine, strict=False):
        assert (theirs.shape, theirs.stride(), theirs.dtype) == (ours.shape, ours.stride(), ours.dtype)
        assert ours.requires_grad and ours.untyped_storage().data_ptr() == mine[0].untyped_storage().data_ptr()


@each(
    ("wanted", "settings", "computing"),
    [
        ("flash", {}, "flash"),
        ("unfused", {}, "unfused"),
        ("fused", {}, "flash"),  # a CPU has no cuDNN
        ("flash", {"attention_dropout": 0.1}, "unfused"),
        ("efficient", {"reset_attention_mask": True}, "flash"),
    ],
)
def test_the_reported_kernel_is_the_one_that_computes(wanted: str, settings: dict[str, Any], computing: str) -> None:
    config = tiny_run(attention_backend=wanted, **settings)
    kernel, line = choose_for_run(config, CPU, LocalCommunicator())
    assert kernel == wanted and line.startswith(f"attention: kernel {computing}")
    assert (f"since {wanted} cannot compute [2, 4, 8, 4] in float64 on cpu" in line) == (computing != wanted)


def test_torch_sets_its_own_order_before_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's first choice of a process overwrites the order of kernels, so it comes before the run's order is set."""
    order, chosen = ["unfused"], []

    def torchs_choice(*_: object, **__: object) -> int:
        order[:] = order if chosen else ["fused"]
        chosen.append(order[0])
        return int(KERNELS[order[0]])

    @contextmanager
    def using(backends: list[SDPBackend], **_: object) -> Iterator[None]:
        before, order[:] = list(order), [next(name for name, kernel in KERNELS.items() if kernel == backends[0])]
        yield
        order[:] = before

    monkeypatch.setattr(attention_kernel, "_torchs_choice", torchs_choice)
    monkeypatch.setattr(attention_kernel, "_using", using)
    found = choose_for_run(tiny_run(attention_backend="flash"), CPU, LocalCommunicator())
    assert found == KernelChoice("flash", "attention: kernel flash") and chosen == ["fused", "flash"]


@pytest.mark.parametrize(
    ("package", "capability", "rule"),
    [(None, (9, 0), "flash_attn_interface is not installed"), ("x", (8, 0), "is no Hopper GPU"), ("x", (9, 0), "")],
)
def test_flash_attention_3_is_refused_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch, package: str | None, capability: tuple[int, int], rule: str
) -> None:
    monkeypatch.setattr(attention_kernel, "find_spec", lambda _: package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    for wanted, device in (("flash", GPU), ("flash3", CPU)):
        check_attention(wanted, device)
    if not rule:
        return check_attention("flash3", GPU)
    with pytest.raises(ConfigError, match=rule):
        check_attention("flash3", GPU)


@pytest.mark.parametrize(
    ("device", "calls", "line"),
    [
        (GPU, ["FA3", "choose", "choose"], "attention: kernel flash3"),
        (CPU, ["choose", "choose"], "attention: kernel flash, since flash3 cannot compute"),
    ],
    ids=str,
)
def test_flash_attention_3_takes_the_place_of_torchs_own(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, calls: list[str], line: str
) -> None:
    """On a GPU it is activated before torch chooses, and reported as what computes; on a CPU it is not there."""
    found: list[str] = []

    def choice(*_: object, **__: object) -> int:
        found.append("choose")
        return int(KERNELS["flash"])

    monkeypatch.setattr(attention_kernel, "_activate", found.append)
    monkeypatch.setattr(attention_kernel, "_torchs_choice", choice)
    monkeypatch.setattr(AttentionCall, "operands", lambda _: (torch.empty(SHAPE),) * 3)
    chosen = choose_for_run(tiny_run(attention_backend="flash3"), device, LocalCommunicator())
    assert found == calls and chosen.kernel == "flash" and chosen.line.startswith(line)


def test_torch_has_flash_attention_3_under_that_name() -> None:
    assert attention_kernel._FLASH3_IMPLEMENTATION in list_flash_attention_impls()
    assert attention_kernel._activate is activate_flash_attention_impl


def test_a_report_names_the_call_that_a_kernel_cannot_compute() -> None:
    masked = AttentionCall(SHAPE, torch.float32, GPU, 0.0, is_masked=True)
    assert reported("auto", "efficient", masked) == "attention: kernel efficient"
    assert reported("fused", "fused", masked) == "attention: kernel fused"
    assert reported("flash", "efficient", masked) == (
        "attention: kernel efficient, since flash cannot compute [1, 2, 8, 4] in float32 on cuda, masked"
    )


def test_steps_compute_with_the_kernel_of_the_run() -> None:
    """Whatever takes a step (a training run, a verification, a benchmark) uses the kernel that the run has chosen."""
    config = tiny_run(attention_backend="unfused")
    core = core_on_rank(0, config)
    batch = reference_batch(0, 2, masked=False)
    with Operators() as operators:
        step = StepBatch(0, [MicroBatch(0, batch.tokens, batch.labels, None)])
        training_step(step_context(config, core), step, StepControls(1e-2, 1.0))
    core.engine.close()
    assert not any("flash" in name for name in operators.names)
    assert computing_kernel(attention_call(config, CPU)) == "flash", "outside of a step the user's own choice counts"


@pytest.mark.cuda
@pytest.mark.parametrize("is_masked", [False, True])
def test_on_a_gpu(is_masked: bool) -> None:
    call = AttentionCall((2, 4, 256, 64), torch.bfloat16, GPU, 0.0, is_masked)
    assert (measure("flash", call) is None) == is_masked
    assert choose_kernel("auto", call, list) in KERNELS


@pytest.mark.cuda
@pytest.mark.parametrize("wanted", ["flash", "efficient", "unfused"])
def test_a_name_is_what_computes_on_a_gpu(wanted: str) -> None:
    config = tiny_run(attention_backend=wanted, precision="bf16", hidden_size=64)
    kernel, line = choose_for_run(config, GPU, LocalCommunicator())
    assert (kernel, line) == (wanted, f"attention: kernel {wanted}")
