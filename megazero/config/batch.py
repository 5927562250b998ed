"""Three sizes of a batch that determine each other: samples of a step, of a micro-batch, and micro-batches of a step.

    train = micro x accumulation x data-parallel size

Any two give the third; `train` alone is one micro-batch a process, `micro` alone one micro-batch a step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.nearest import neighbours
from megazero.errors import Problem

# What DeepSpeed calls the three.
KEYS: Mapping[str, str] = MappingProxyType(
    {
        "train": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
    }
)


@dataclass(frozen=True)
class BatchSizes:
    """Samples of a step over all processes, samples of a micro-batch on one, micro-batches of a step on each.

    train and micro are None together: then the program decides, and every micro-batch it runs counts.
    """

    train: int | None
    micro: int | None
    accumulation: int


@dataclass(frozen=True)
class GivenSizes:
    """The sizes that are given, None for the others."""

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None


def solve(given: GivenSizes, data_parallel_size: int, names: Mapping[str, str] = KEYS) -> BatchSizes | Problem:
    """The three sizes on so many data-parallel processes, or why there are none; `names` as the user knows them."""
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
