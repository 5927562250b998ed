"""The work of the processes that tests of worker pools start.

Each process imports the module of its work: this one needs no numpy and no pytest, whose imports would take most of the
time of a test.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

from megazero.errors import DataError, Problem


def square(number: int) -> int:
    time.sleep(0.01 * (number % 3 == 0))  # tasks do not finish in the order they are given out in
    return number * number


def start_square() -> Callable[[int], int]:
    return square


def reverse(content: bytes) -> bytes:
    return content[::-1]


def start_reverse() -> Callable[[bytes], bytes]:
    return reverse


def fail_at(kind: str, place: int, number: int) -> Any:
    if number < place:
        return number
    if kind == "user":
        raise DataError(Problem(f"task {number}", "is a good one"), Problem("another", "rule"))
    if kind == "bug":
        raise KeyError(f"planted {number}")
    if kind == "unpicklable":
        return lambda: number
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def start_failing(kind: str, place: int) -> Callable[[int], int]:
    return partial(fail_at, kind, place)


def fail_to_start() -> Callable[[int], int]:
    raise DataError(Problem("the tokenizer", "can be loaded"))


def own_id(_: int) -> int:
    return os.getpid()


def time_ids(_: int) -> Callable[[int], int]:
    return own_id


def range_forever() -> Iterator[int]:
    return count()
