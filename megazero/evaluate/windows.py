"""Requests for likelihoods, and the windows in which a model with a limited length computes them.  Pure.

A request is a row of ids of which those from `start` on are *predicted*, each once.  The model reads at most `length`
ids at a time, so a long request takes several windows:

    ids             0 1 2 3 4 5 6 7 8 9         start 1, length 4, stride 2
    first window    0 1 2 3 -> 1 2 3 4          as many as the length allows
    then                3 4 5 6 ->     5 6      the next `stride` ones, each behind all the context there is room for
                            5 6 7 8 ->     7 8
    the last one              6 7 8 9 ->     9  ids behind a window's end are left for the next

The smaller the stride, the more context the predicted ids have, and the more windows there are.  With the stride of the
length, these are the windows of lm-evaluation-harness' loglikelihood_rolling; those of Megatron-LM's `overlapping_eval`
differ in the last window alone, which has less context there.
"""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from megazero.data.tokenizers import Tokenizer


class Request(NamedTuple):
    """Ids, those from `start` (at least 1) on predicted; with no id there, the likelihood is that of nothing, 1."""

    ids: "array[int]"
    start: int


class Window(NamedTuple):
    """A window of request number `request`: the model reads ids[begin : end - 1], and ids[first:end] are predicted."""

    request: int
    begin: int
    first: int
    end: int

    @property
    def length(self) -> int:
        """The number of ids that the model reads."""
        return self.end - 1 - self.begin


def windows(number: int, request: Request, *, length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of request `number`, in order.  length: of the model; stride: 1 to length."""
    first, most = request.start, length
    while first < len(request.ids):
        end = min(first + most, len(request.ids))
        yield Window(number, max(0, end - 1 - length), first, end)
        first, most = end, stride


def whole(tokenizer: Tokenizer, text: str) -> Request:
    """Return the request for all of a text; its first id is predicted from the end-of-document id."""
    return Request(array("q", (tokenizer.eod, *tokenizer.encode(text))), 1)


def continuation(tokenizer: Tokenizer, context: str, text: str) -> Request:
    """Return the request for a text (not empty) behind a context, which may be empty.

    Blanks at the context's end belong to the text, since tokenizers join them to the word that follows.  Ids are those
    of both together, cut where those of the context alone would end; so lm-evaluation-harness does it.
    """
    kept = context.rstrip()
    context, text = kept, context[len(kept) :] + text
    before = tokenizer.encode(context) if context else []
    both = tokenizer.encode(context + text)
    if not before and both[:1] == [tokenizer.eod] and len(both) > 1:
        return Request(array("q", both), 1)
    # Where the text's beginning joins the context's last id, there may be no id behind it: that one is predicted then.
    cut = min(len(before), len(both) - 1)
    start = before[:cut] or [tokenizer.eod]
    return Request(array("q", (*start, *both[cut:])), len(start))
