"""The documents in a micro-batch's rows: where they begin and end, as positions and an attention mask.

Rows of s tokens hold text end to end, several *documents* or parts of them.  Usually the model ignores that: positions
count from the row's first token, and a token attends to everything before it.  Documents can also be kept apart:

    tokens       a  b  #  c  #  #  d  e       #: end of document, the last token of its document
    documents    0  0  0  1  1  2  3  3
    positions    0  1  2  0  1  0  0  1       --reset-position-ids
    d attends to                   d  .       --reset-attention-mask: not to c and the tokens before

b = micro-batch, s = sequence.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.model.key_value_cache import KeyValueCache


class Rotation(NamedTuple):
    """Cosine and sine of the angles of r rotated elements, each [b, s, r / 2], or [s, r / 2] for all rows."""

    cosine: Tensor
    sine: Tensor


@dataclass(frozen=True, eq=False)
class Sequences:
    """The rows of a micro-batch, `length` tokens each; one object that all layers and their recomputation share.

    positions: int64 [b, s], the number of every token's position; None: 0 to s - 1 in every row.
    mask: [b, 1, s, s], or [1 or b, a/t, s, s] with a bias of every head (ALiBi), added to the scores of attention: -inf
    where the token of a row doesn't attend to that of a column; None: it attends to itself and all before it.
    rotation: that of queries and keys, None if they aren't rotated.
    cache: where the keys and values of earlier tokens are, and these tokens' are stored; None: there is none, as in
    training.  Tokens with a cache and positions go on its texts, and the mask's columns are the texts' tokens.
    """

    length: int
    positions: Tensor | None = None
    mask: Tensor | None = None
    rotation: Rotation | None = None
    cache: KeyValueCache | None = None


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the `mask` of causal attention within documents [b, s]: b s^2 elements of the activations' dtype.

    From booleans torch's kernels would make such a tensor anew in every layer, and save it for backward.
    """
    attends = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril_()  # [b, s, s]: row attends to column
    mask = torch.zeros(attends.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(attends.logical_not_(), -torch.inf).unsqueeze(1)
