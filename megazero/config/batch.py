"""Solves for the three sizes of a batch: samples per step, samples per micro-batch, and micro-batches per step.

    train = micro x accumulation x data-parallel size

Any two determine the third.  `train` alone means one micro-batch per process and step; `micro` alone means one
micro-batch per step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.nearest import neighbours
from megazero.errors import Problem

# DeepSpeed's names of the three sizes.
KEYS: Mapping[str, str] = MappingProxyType(
    {
        "train": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
    }
)


@dataclass(frozen=True)
class BatchSizes:
    """The three sizes of a batch, solved.

    train: samples per step over all processes.  micro: samples per micro-batch on one process.  accumulation:
    micro-batches per step on each process.  When train is None, so is micro: then the caller's program sets the sizes.
    """

    train: int | None
    micro: int | None
    accumulation: int


@dataclass(frozen=True)
class GivenSizes:
    """The sizes of a batch that the user has given; None for each of the others."""

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None


def solve(given: GivenSizes, data_parallel_size: int, names: Mapping[str, str] = KEYS) -> BatchSizes | Problem:
    """Return the three sizes on this many data-parallel processes, or the problem if no sizes fit.

    names: the user's names of the three sizes, for the problem's text.
    """
    train, micro, accumulation = given.train, given.micro, given.accumulation
    if train is None:
        count = accumulation or 1
        return BatchSizes(None if micro is None else micro * count * data_parallel_size, micro, count)
    if micro is not None and accumulation is not None and train != micro * accumulation * data_parallel_size:
        return _contradiction(given, data_parallel_size, names)
    fixed = (micro or 1) * (accumulation or 1) * data_parallel_size
    if train % fixed:
        return _does_not_divide(given, data_parallel_size, names)
    rest = train // fixed
    if micro is None:
        return BatchSizes(train, rest, accumulation or 1)
    return BatchSizes(train, micro, accumulation or rest)


def _given(given: GivenSizes, parts: Iterable[str], data_parallel_size: int, names: Mapping[str, str]) -> str:
    values = [f"{names[part]} {getattr(given, part)}" for part in parts if getattr(given, part) is not None]
    return f"{', '.join(values)} on {data_parallel_size} data-parallel processes"


def _contradiction(given: GivenSizes, data_parallel_size: int, names: Mapping[str, str]) -> Problem:
    assert given.train is not None and given.micro is not None and given.accumulation is not None
    legal = [f"{names['train']} {given.micro * given.accumulation * data_parallel_size}"]
    for part, other in (("accumulation", given.micro), ("micro", given.accumulation)):
        if given.train % (other * data_parallel_size) == 0:
            legal.append(f"{names[part]} {given.train // (other * data_parallel_size)}")
    return Problem(
        _given(given, ("train", "micro", "accumulation"), data_parallel_size, names),
        "a step's samples are micro-batch size x accumulation x data-parallel size:"
        f" {given.micro} x {given.accumulation} x {data_parallel_size} is not {given.train}",
        ", ".join(legal),
    )


def _does_not_divide(given: GivenSizes, data_parallel_size: int, names: Mapping[str, str]) -> Problem:
    assert given.train is not None
    known = [size for size in (given.micro, given.accumulation) if size is not None]
    step = data_parallel_size * (known[0] if known else 1)
    product = " x ".join(str(size) for size in (*known, data_parallel_size))
    return Problem(
        _given(given, ("train", "micro", "accumulation"), data_parallel_size, names),
        f"every process has an equal share of a step's samples: {product} divides {names['train']}",
        ", ".join(f"{names['train']} {count}" for count in neighbours(given.train, step)),
    )
