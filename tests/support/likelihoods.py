"""Likelihoods token by token, as their definition has them: the reference of `megazero/evaluate`, which has batches."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class Likelihood(NamedTuple):
    """A log-likelihood in nats, and whether every id is the most likely one."""

    value: float
    is_greedy: bool


def likelihood(
    next_logits: Callable[[Sequence[int]], Tensor], ids: Sequence[int], start: int, *, length: int, stride: int
) -> Likelihood:
    """Return the likelihood of ids[start:], each behind the context that its window has.

    next_logits: returns the logits [V] of the id behind ids, of which there are at most `length`.
    """
    value, is_greedy = 0.0, True
    for place in range(start, len(ids)):
        # The first window ends with the first `length` predicted ids, each later one with `stride` more.
        later = math.ceil(max(0, place - start - length + 1) / stride)
        end = min(start + length + later * stride, len(ids))
        logits = next_logits(ids[max(0, end - 1 - length) : place]).double()
        value += float(logits.log_softmax(-1)[ids[place]])
        is_greedy &= int(logits.argmax()) == ids[place]
    return Likelihood(value, is_greedy)
