"""Tests of the memory that compiled code has in a dry run, against sums that are made by hand."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from support.each import each
from torch import Tensor

from megazero.command_line.parse import parse
from megazero.memory.ledger import Ledger
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.planner.dry.fused import FusedCode
from megazero.planner.dry.kernels import gpu_kernels
from megazero.planner.dry.rank import DryJob, dry_tensors
from megazero.planner.dry.recorder import Recorder
from megazero.planner.trace import Compute

N, WIDTH = 64, 32  # rows, and columns of every matrix
WHOLE = 4 * N * WIDTH  # bytes of an activation
WEIGHT = 4 * WIDTH**2
_SMALL = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --micro-batch-size 1"
_SMALL += " --mock-data --train-iters 4 --lr 1e-3"


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def gated(x: Tensor, weight: Tensor) -> Tensor:
    return (F.silu(x @ weight) * (x @ weight)) @ weight


def summed_then_normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x + x @ weight, (WIDTH,)) @ weight


def dropped(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(x @ weight, 0.5)


def rescaled(x: Tensor, weight: Tensor) -> Tensor:
    return (x * x.exp()).sum(1)


ROWS = 4 * N
# {code: bytes that its forward leaves alive beside its inputs, the activations at the most}
LEFT: dict[Callable[..., Tensor], tuple[int, str]] = {
    product: (WHOLE, "the result"),
    # SiLU's output is computed again.
    gated: (4 * WHOLE, "two products, their product by elements, which a product reads, and the result"),
    # The sum needs the first product, which is not saved: so the sum is.
    summed_then_normed: (3 * WHOLE + 2 * ROWS, "the sum, its figures, the norm's output and the result"),
    dropped: (WHOLE + WHOLE // 4, "the result and the mask, which cannot be drawn again"),
    rescaled: (ROWS, "the result alone"),
}


def forward(code: Callable[..., Tensor]) -> tuple[int, int, int, list[Any]]:
    """Return the bytes that compiled code leaves, the most in its forward and in all, and what its kernels are."""
    ledger = Ledger(torch.device("cpu"))
    recorder = Recorder(ledger, Topology(tp=1, pp=1, dp=1), 0, Nodes((1,)), is_gpu=True)
    with dry_tensors(ledger, recorder=recorder) as hollow, gpu_kernels(), FusedCode(ledger, recorder, hollow):
        x = torch.zeros(N, WIDTH).requires_grad_()
        weight = torch.zeros(WIDTH, WIDTH).requires_grad_()
        inputs = sum(ledger.live_bytes().values())
        ledger.reset()
        result = torch.compile(code)(x, weight)
        left = sum(ledger.live_bytes().values()) - inputs
        forward_peak = ledger.take().peak_bytes - inputs
        with recorder.part("steady step"):
            result.backward(torch.zeros_like(result))
            most = ledger.take().peak_bytes - inputs
        with torch.no_grad(), recorder.part("evaluation"):
            torch.compile(code)(x, weight)
    kernels = [event.operation for event in recorder.parts["evaluation"] if isinstance(event, Compute)]
    return left, forward_peak, most, kernels


@each("code", LEFT)
def test_compiled_code_leaves_what_backward_cannot_make_again(code: Callable[..., Tensor]) -> None:
    wanted, what = LEFT[code]
    assert forward(code)[0] == wanted, what


def test_no_more_is_alive_in_forward_than_products_read_and_write() -> None:
    _, most, _, _ = forward(gated)
    assert most == 4 * WHOLE
    assert forward(rescaled)[1] == ROWS


def test_backward_has_what_its_products_read_and_write() -> None:
    """The gradient of the code's input is counted, and those between element-wise operations are not."""
    left, _, most, _ = forward(rescaled)
    assert most == left + ROWS + WHOLE, "the result, its gradient, and the input's gradient"


def test_code_without_products_or_backward_is_one_pass() -> None:
    (kernel,) = forward(rescaled)[3]
    assert (kernel.read_bytes, kernel.written_bytes, kernel.flops) == (WHOLE + WEIGHT, ROWS, 0)
    assert len([kernel for kernel in forward(gated)[3] if kernel.flops]) == 3


def test_a_plan_compiles_where_the_run_would() -> None:
    """A laptop needs no compiler to plan for GPUs."""

    def compiles(words: str, *, is_gpu: bool = True) -> bool:
        config = parse(f"{_SMALL} {words}".split(), world_size=1).config
        return DryJob(config, 64, Nodes((1,)), is_gpu=is_gpu).compiles

    curriculum = (
        "--curriculum-learning --curriculum-schedule fixed_linear --curriculum-min-seqlen 8 --curriculum-max-seqlen 16"
        " --curriculum-steps 2 --curriculum-seqlen-step 8"
    )
    assert compiles("") and compiles("--compile max") and not compiles("--compile off")
    assert not compiles("--ledger --ledger-dir ledgers") and not compiles(curriculum)
    assert not compiles("", is_gpu=False)
