"""What a model is told of a micro-batch besides its tokens: where the documents in its rows begin and end.

Rows of s tokens hold text end to end, several *documents* or parts of them.  Usually the model doesn't care: positions
count from the row's first token, and a token attends to everything before it.  A row can also be taken for what it is:

    tokens       a  b  #  c  #  #  d  e       #: end of document, the last token of its document
    documents    0  0  0  1  1  2  3  3
    positions    0  1  2  0  1  0  0  1       --reset-position-ids
    d attends to                   d  .       --reset-attention-mask: c and what comes before are out of sight

b = micro-batch, s = sequence.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sequences:
    """Rows of `length` tokens; the same object goes through all layers, whose recomputation keeps it as it is.

    positions: int64 [b, s], the number of every token's position; None: 0 to s - 1 in every row.
    mask: [b, 1, s, s], what is added to the scores of attention: 0 where the token of a row attends to that of a
    column, -inf elsewhere; None: it attends to itself and all before it.
    """

    length: int
    positions: Tensor | None = None
    mask: Tensor | None = None

    @classmethod
    def of(cls, length: int, *, positions: Tensor | None, documents: Tensor | None, dtype: torch.dtype) -> Self:
        """Rows whose tokens attend within their own document; documents: [b, s], None: wherever they are.

        dtype: of activations.
        """
        return cls(length, positions, None if documents is None else document_mask(documents, dtype))


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """documents [b, s] to the `mask` of causal attention within each, b s^2 elements of the activations' dtype.

    Of booleans torch's kernels would make such a tensor in every layer anew, and keep it until backward.
    """
    attends = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril_()  # [b, s, s]: row attends to column
    mask = torch.zeros(attends.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(attends.logical_not_(), -torch.inf).unsqueeze(1)
