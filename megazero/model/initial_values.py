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
from itertools import pairwise
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
    """The rows of one block that this rank holds."""

    block: Tensor  # [rows of the block, columns], all of it
    rows: Tensor  # the indices of those of its rows that are held here
    local_rows: Tensor  # the row of the local tensor for each


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
    box = spec.box
    local = target.view(-1, spec.local_shape[-1])
    first, width = box.offset[-1], box.lengths[-1]
    # A GPU has many of the host's cores to itself.  What is drawn is the same by one thread and by many.
    threads = torch.get_num_threads() if target.is_cuda else 1
    for block, rows, local_rows in _slices(spec, seed, threads):
        for taken, written in zip(*(_runs(numbers, rows, local_rows) for numbers in (rows, local_rows)), strict=True):
            local[written, :width].copy_(block[taken, first : first + width])


def _runs(numbers: Tensor, *both: Tensor) -> Iterator[slice]:
    """Yield the runs of successive numbers, cut wherever one of `both`, as many numbers, is not successive."""
    cuts = [
        0,
        *(torch.stack([each.diff() != 1 for each in both]).any(0).nonzero().flatten() + 1).tolist(),
        len(numbers),
    ]
    for start, end in pairwise(cuts):
        yield slice(int(numbers[start]), int(numbers[start]) + end - start)


def _slices(spec: ParamSpec, seed: int, threads: int) -> Iterator[_Slice]:
    """Yield the blocks that touch this rank's box, one after the other, while `threads` draw those that follow."""
    columns = spec.full_shape[-1]
    num_rows = math.prod(spec.full_shape[:-1])
    height = max(1, BLOCK_NUMEL // columns)
    logical = _row_numbers(spec.box.offset[:-1], spec.box.lengths[:-1], spec.full_shape[:-1])
    local = _row_numbers((0,) * (len(spec.full_shape) - 1), spec.box.lengths[:-1], spec.local_shape[:-1])
    owner = logical // height

    def draw(index: int) -> Tensor:
        return _draw(spec, seed, index, (min(height, num_rows - index * height), columns))

    numbers = torch.unique(owner).tolist()
    for index, block in zip(numbers, _ahead(draw, numbers, threads), strict=True):
        here = owner == index
        yield _Slice(block, logical[here] - index * height, local[here])


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


def _row_numbers(offset: tuple[int, ...], lengths: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Return row-major numbers, within `shape`, of the rows of a box, in the box's own order."""
    numbers = torch.zeros(1, dtype=torch.int64)
    for start, length, size in zip(offset, lengths, shape, strict=True):
        numbers = (numbers[:, None] * size + torch.arange(start, start + length)).flatten()
    return numbers


def _draw(spec: ParamSpec, seed: int, index: int, shape: tuple[int, int]) -> Tensor:
    """Draw block number `index` of the logical tensor."""
    if spec.init.kind == "ones":
        return torch.ones(shape)
    digest = hashlib.blake2b(f"initial value {seed} {spec.name} {index}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape).normal_(0.0, spec.init.std, generator=generator)
