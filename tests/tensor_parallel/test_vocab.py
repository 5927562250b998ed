"""Embedding and head cut by vocabulary rows, against the whole ones, with odd and padded vocabularies."""

import pytest
import torch
import torch.nn.functional as F
from support.models import assemble, context, pieces, put_logical
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor

from megazero.parallel.param_spec import Init
from megazero.tensor_parallel.head_loss import Targets
from megazero.tensor_parallel.vocab import TiedHead, VocabParallelEmbedding, VocabParallelHead

pytestmark = pytest.mark.gloo
HIDDEN = 6
# (vocabulary, padded): odd, a last rank with padding only, no padding
VOCABULARIES = [(13, 16), (5, 16), (16, 16)]


def whole(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Matrix [V, h], ids [3, 4], weights of the outputs [3, 4]."""
    generator = torch.Generator().manual_seed(vocab_size)
    draw = {"dtype": torch.float64, "generator": generator}
    return (
        torch.randn(vocab_size, HIDDEN, **draw),
        torch.randint(vocab_size, (3, 4), generator=generator),
        torch.randn(3, 4, **draw),
    )


def cut_ends(rank: int, size: int, vocab_size: int, padded: int):
    """Embedding output, gradient pieces of the embedding, this rank's logits of an untied head."""
    tp = context(mesh_in_worker(rank, tp=size).axis("tp"))
    shape = {"vocab_size": vocab_size, "padded_vocab_size": padded, "hidden_size": HIDDEN, "init": Init("normal", 1.0)}
    embedding, head = VocabParallelEmbedding(tp, **shape), VocabParallelHead(tp, **shape)
    matrix, ids, weights = whole(vocab_size)
    for module in (embedding, head):
        put_logical(module, {"weight": matrix})
    vectors = embedding(ids)
    (vectors * weights.unsqueeze(-1)).sum().backward()
    return vectors.detach(), pieces(embedding, gradients=True), head(vectors.detach()).detach()


@pytest.mark.parametrize(("vocab_size", "padded"), VOCABULARIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_embedding_and_head(size: int, vocab_size: int, padded: int) -> None:
    matrix, ids, weights = whole(vocab_size)
    matrix.requires_grad_(True)
    vectors = F.embedding(ids, matrix)
    (vectors * weights.unsqueeze(-1)).sum().backward()
    results = run_ranks(size, cut_ends, size, vocab_size, padded)
    for ours, _, _ in results:
        torch.testing.assert_close(ours, vectors.detach(), rtol=0, atol=0)
    torch.testing.assert_close(assemble(result[1] for result in results)["weight"], matrix.grad)
    logits = torch.cat([result[2] for result in results], dim=-1)
    torch.testing.assert_close(logits[..., :vocab_size], (vectors @ matrix.T).detach())


def cut_losses(rank: int, size: int, vocab_size: int, padded: int) -> list[tuple[Tensor, Tensor]]:
    """Loss and gradient of what the head has read: by a matrix of its own, and by one it is given."""
    tp = context(mesh_in_worker(rank, tp=size).axis("tp"))
    shape = {"vocab_size": vocab_size, "padded_vocab_size": padded, "hidden_size": HIDDEN, "init": Init("normal", 1.0)}
    own, tied = VocabParallelHead(tp, **shape), TiedHead(tp)
    matrix, ids, weights = whole(vocab_size)
    put_logical(own, {"weight": matrix})
    found = []
    for head, given in ((own, ()), (tied, (own.weight,))):
        x = F.embedding(ids, matrix).requires_grad_(True)
        loss = head(x, *given, targets=Targets(ids, weights, vocab_size, chunk_bytes=200))
        loss.backward()
        found.append((loss.detach(), x.grad))
    return found


@pytest.mark.parametrize(("vocab_size", "padded"), VOCABULARIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_heads_with_targets_give_the_loss(size: int, vocab_size: int, padded: int) -> None:
    matrix, ids, weights = whole(vocab_size)
    x = F.embedding(ids, matrix).requires_grad_(True)
    losses = F.cross_entropy((x @ matrix.T).flatten(0, 1), ids.flatten(), reduction="none")
    expected = (losses * weights.flatten()).sum()
    expected.backward()
    for result in run_ranks(size, cut_losses, size, vocab_size, padded):
        for loss, gradient in result:
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradient, x.grad, rtol=1e-12, atol=1e-12)
