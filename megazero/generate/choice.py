"""The choice of the next tokens by all ranks of a mesh, from logits that the ranks of the last pipeline stage have.

logits [b, Vp / t] on each rank of the last stage -> [b, V] -> tokens [b] on one of them -> every rank
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.comm.interface import Communicator
from megazero.comm.mesh import Mesh
from megazero.generate.sampling import Sampling, next_tokens


def whole_rows(logits: Tensor, tp: Communicator, vocab_size: int) -> Tensor:
    """Gather this rank's logits [b, Vp / t] to whole rows without padding, [b, V]."""
    parts = logits.new_empty((tp.size, *logits.shape))
    tp.all_gather_into(parts.view(-1), logits.contiguous().view(-1)).wait()
    return parts.transpose(0, 1).flatten(1)[:, :vocab_size]


def choose(mesh: Mesh, logits: Tensor | None, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """Return a token for each of the generators, the same on every rank; a collective call.

    logits: [b, V]; None before the last pipeline stage.  The first rank of that stage draws, and broadcasts.
    """
    chosen = torch.zeros(len(generators), dtype=torch.int64)
    if logits is not None:
        chosen = next_tokens(logits, sampling, generators)
    chosen = chosen.to(mesh.device)
    mesh.world.broadcast(chosen, mesh.topology.rank_of(pp=mesh.topology.pp - 1)).wait()
    return chosen.tolist()
