"""Initial values that do not depend on the layout: value = f(seed, name, full shape), nothing else.

The logical tensor is seen as [rows, columns] (all dims but the last, the last) and cut into *blocks* of rows of about a
million elements.  Each block has a random generator of its own, seeded by (seed, name, number of the block), so a rank
draws only the blocks that touch its box, copies its rows and columns of each, and never holds more than one block
beyond its own slice; for a GPU several threads draw, each two blocks ahead.  Values are drawn in float32 on the CPU
whatever the device and dtype, so that runs on all of them start equal.

    blocks           logical rows        the rank's rows (heads 2-3 of a fused QKV)
    0: |xxxxxxxx|    query head 0..3     . . x x
    1: |xxxxxxxx|    key   head 0..3     . . x x
    2: |xxxxxxxx|    value head 0..3     . . x x
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megazero.config.model import ModelConfig
from megazero.parallel.param_spec import InitialValue, ParamSpec, named_specs

BLOCK_NUMEL = 1 << 20


def output_init(config: ModelConfig) -> InitialValue:
    """Return the initialisation of a block's two matrices that write into the residual stream."""
    # Smaller than the others, so that the residual stream's variance stays near 1.
    return InitialValue("normal", config.init_method_std / math.sqrt(2.0 * config.num_layers))


class _Slice(NamedTuple):
    """Successive rows of one block that this rank holds, one behind the other."""

    block: Tensor  # [rows of the block, columns], all of it
    rows: slice  # those of its rows
    local_rows: slice  # the rows of the local tensor for them


class _Run(NamedTuple):
    """Successive logical rows within one block, which are successive rows of the local tensor too."""

    block: int
    start: int  # the first one's number in the block
    local_start: int
    length: int


def initialize_(model: nn.Module, seed: int) -> None:
    """Write the initial values of all parameters of `model`, in their dtype and on their device."""
    for spec, parameter in named_specs(model):
        with torch.no_grad():
            fill_initial_(parameter.detach().view(-1), spec, seed)


def initial_value(spec: ParamSpec, seed: int, *, like: Tensor | None = None) -> Tensor:
    """Return the initial value of this rank's tensor, [spec.numel], with dtype and device of `like` (float32, CPU)."""
    target = torch.empty(spec.numel) if like is None else torch.empty(spec.numel, dtype=like.dtype, device=like.device)
    fill_initial_(target, spec, seed)
    return target


def fill_initial_(target: Tensor, spec: ParamSpec, seed: int) -> None:
    """Write the initial value of `spec` into target [spec.numel]; padding becomes zero, as is all of a meta tensor."""
    target.zero_()
    if target.is_meta or spec.init.kind == "zeros":
        return
    local = target.view(-1, spec.local_shape[-1])
    first, width = spec.box.offset[-1], spec.box.lengths[-1]
    # A GPU has many of the host's cores to itself.  What is drawn is the same by one thread and by many.
    threads = torch.get_num_threads() if target.is_cuda else 1
    for block, rows, local_rows in _slices(spec, seed, threads):
        local[local_rows, :width].copy_(block[rows, first : first + width])


def _slices(spec: ParamSpec, seed: int, threads: int) -> Iterator[_Slice]:
    """Yield the rows of this rank's box, block after block, while `threads` draw the blocks that follow."""
    columns, num_rows = spec.full_shape[-1], math.prod(spec.full_shape[:-1])
    height = max(1, BLOCK_NUMEL // columns)
    runs: dict[int, list[_Run]] = {}
    for run in _runs(spec, height):
        runs.setdefault(run.block, []).append(run)

    def draw(index: int) -> Tensor:
        return _draw(spec, seed, index, (min(height, num_rows - index * height), columns))

    for held, block in zip(runs.values(), _ahead(draw, [*runs], threads), strict=True):
        for _, start, local_start, length in held:
            yield _Slice(block, slice(start, start + length), slice(local_start, local_start + length))


def _runs(spec: ParamSpec, height: int) -> Iterator[_Run]:
    """Yield the runs of rows of this rank's box, in the order of the logical rows, cut between blocks of `height`."""
    full, local, offset, lengths = spec.full_shape[:-1], spec.local_shape[:-1], spec.box.offset, spec.box.lengths
    dims = len(full)  # the first ones select a run; the others lie in it, where all but one are whole and not padded
    length = 1
    while dims and length == math.prod(full[dims:]) == math.prod(local[dims:]):
        dims -= 1
        length *= lengths[dims]
    for indices in product(*map(range, lengths[:dims])):
        begins = [base + index for base, index in zip(offset, indices, strict=False)]
        start = _row_number((*begins, *offset[dims:-1]), full)
        local_start = _row_number((*indices, *(0 for _ in full[dims:])), local)
        end = start + length
        while start < end:
            taken = min(end, (start // height + 1) * height) - start
            yield _Run(start // height, start % height, local_start, taken)
            start, local_start = start + taken, local_start + taken


def _row_number(indices: Sequence[int], shape: Sequence[int]) -> int:
    """Return the row-major number of a row within `shape`."""
    number = 0
    for index, size in zip(indices, shape, strict=True):
        number = number * size + index
    return number


def _ahead(draw: Callable[[int], Tensor], numbers: Sequence[int], threads: int) -> Iterator[Tensor]:
    """Yield draw(number) of all numbers, in order; with several threads, at most two for each are ahead."""
    if threads == 1 or len(numbers) == 1:
        yield from map(draw, numbers)
        return
    with ThreadPoolExecutor(threads) as pool:
        ahead = deque(pool.submit(draw, number) for number in numbers[: 2 * threads])
        for place in range(len(numbers)):
            block = ahead.popleft().result()
            if place + 2 * threads < len(numbers):
                ahead.append(pool.submit(draw, numbers[place + 2 * threads]))
            yield block


def _draw(spec: ParamSpec, seed: int, index: int, shape: tuple[int, int]) -> Tensor:
    """Draw block number `index` of the logical tensor."""
    if spec.init.kind == "ones":
        return torch.ones(shape)
    digest = hashlib.blake2b(f"initial value {seed} {spec.name} {index}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape).normal_(0.0, spec.init.std, generator=generator)
