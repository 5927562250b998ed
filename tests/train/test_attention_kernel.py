"""The attention kernel is chosen by name or by the time it takes, and the chosen kernel is the one that computes."""

import pytest
import torch
import torch.nn.functional as F
from support.small_runs import tiny_run
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.train.attention_kernel import (
    KERNELS,
    AttentionCall,
    attention_call,
    choose_kernel,
    measure,
    prefer_kernel,
)

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


@pytest.mark.parametrize("name", list(KERNELS))
def test_a_name_is_taken_at_its_word(name: str) -> None:
    assert choose_kernel(name, on(CPU)) == choose_kernel(name, on(GPU)) == name


def test_the_cpu_is_left_to_torch() -> None:
    assert choose_kernel("auto", on(CPU), lambda *_: pytest.fail("measured")) is None


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"flash": 2.0, "fused": 1.0, "efficient": 3.0}, "fused"),
        ({"flash": 2.0, "fused": None, "efficient": 3.0}, "flash"),
        ({"flash": None, "fused": None, "efficient": None}, None),
    ],
)
def test_auto_is_the_fastest_that_can(seconds: dict[str, float | None], chosen: str | None) -> None:
    assert choose_kernel("auto", on(GPU), lambda name, _: seconds[name]) == chosen


def test_flash_is_no_candidate_where_there_is_a_mask() -> None:
    masked = on(GPU)._replace(is_masked=True)
    seconds = {"flash": 1.0, "fused": 3.0, "efficient": 2.0}
    assert choose_kernel("auto", masked, lambda name, _: seconds[name]) == "efficient"
    assert not attention_call(tiny_run(), GPU).is_masked
    assert attention_call(tiny_run(reset_attention_mask=True), GPU).is_masked


@pytest.mark.parametrize(("kernel", "is_flash"), [(None, True), ("flash", True), ("fused", True), ("unfused", False)])
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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_masked", [False, True])
def test_on_a_gpu(is_masked: bool) -> None:
    call = AttentionCall((2, 4, 256, 64), torch.bfloat16, GPU, 0.0, is_masked)
    assert (measure("flash", call) is None) == is_masked
    assert choose_kernel("auto", call) in KERNELS
