"""An embedding and head cut by vocabulary rows equal whole ones, with odd and padded vocabularies."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.models import assemble, context, pieces, put_logical
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor

from megazero.parallel.param_spec import InitialValue
from megazero.tensor_parallel.deferred import DeferredGradients
from megazero.tensor_parallel.head_loss import Targets
from megazero.tensor_parallel.vocab import TiedHead, VocabParallelEmbedding, VocabParallelHead

pytestmark = pytest.mark.gloo
HIDDEN = 6
TOKENS_EACH = 5
# (vocabulary, padded vocabulary): an odd one, one with padding only on the last rank, one without padding
VOCABULARIES = [(13, 16), (5, 16), (16, 16)]


def whole(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a matrix [V, h], ids [3, 4] and weights of the outputs [3, 4]."""
    generator = torch.Generator().manual_seed(vocab_size)
    draw = {"dtype": torch.float64, "generator": generator}
    return (
        torch.randn(vocab_size, HIDDEN, **draw),
        torch.randint(vocab_size, (3, 4), generator=generator),
        torch.randn(3, 4, **draw),
    )


def cut_ends(rank: int, size: int, vocab_size: int, padded: int):
    """Return the embedding's output, the pieces of its gradient and this rank's logits of an untied head."""
    tp = context(mesh_in_worker(rank, tp=size).axis("tp"))
    shape = {
        "vocab_size": vocab_size,
        "padded_vocab_size": padded,
        "hidden_size": HIDDEN,
        "init": InitialValue("normal", 1.0),
    }
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
    """Return the loss and the gradient of the head's input, for a head with its own matrix and for a tied one."""
    tp = context(mesh_in_worker(rank, tp=size).axis("tp"))
    shape = {
        "vocab_size": vocab_size,
        "padded_vocab_size": padded,
        "hidden_size": HIDDEN,
        "init": InitialValue("normal", 1.0),
    }
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


# --- the sequence split, gradients deferred --------------------------------------------------------------------------


def tied(vocab_size: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a matrix [V, h], ids [n] and weights of the tokens [n]."""
    generator = torch.Generator().manual_seed(vocab_size)
    draw = {"dtype": torch.float64, "generator": generator}
    num_tokens = size * TOKENS_EACH
    return (
        torch.randn(vocab_size, HIDDEN, **draw),
        torch.randint(vocab_size, (num_tokens,), generator=generator),
        torch.randn(num_tokens, **draw),
    )


def split_ends(rank: int, size: int, vocab_size: int, padded: int, deferred: bool):
    """Run a tied embedding and head on split tokens; return vectors, logits, bytes sent, loss and summed gradients."""
    mesh = mesh_in_worker(rank, tp=size)
    tp = replace(context(mesh.axis("tp")), splits_sequence=True, deferred=DeferredGradients() if deferred else None)
    shape = {
        "vocab_size": vocab_size,
        "padded_vocab_size": padded,
        "hidden_size": HIDDEN,
        "init": InitialValue("normal", 1.0),
    }
    embedding, head = VocabParallelEmbedding(tp, **shape), TiedHead(tp)
    matrix, ids, weights = tied(vocab_size, size)
    put_logical(embedding, {"weight": matrix})
    fired: list[Tensor] = []
    embedding.weight.register_post_accumulate_grad_hook(fired.append)
    vectors = embedding(ids)
    mesh.meter.reset()
    logits = head(torch.tanh(vectors), embedding.weight)
    traffic = mesh.meter.bytes_by_axis()["tp"]
    columns = slice(rank * padded // size, (rank + 1) * padded // size)
    (F.pad(logit_weights(vocab_size, size), (0, padded - vocab_size))[:, columns] * logits).sum().backward()
    first = tp.deferred.collect() if deferred else None
    x = torch.tanh(embedding(ids))
    loss = head(x, embedding.weight, targets=Targets(ids.flip(0), weights, vocab_size, chunk_bytes=200))
    loss.backward()
    if first is not None:
        assert embedding.weight.grad is None and not fired
        first.accumulate()
        tp.deferred.collect().accumulate()
    assert len(fired) == 2, "one gradient of both ends in each backward"
    return vectors.detach(), logits.detach(), traffic, loss.detach(), pieces(embedding, gradients=True)


def logit_weights(vocab_size: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(size * TOKENS_EACH, vocab_size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("vocab_size", "padded"), [(13, 24), (5, 12), (12, 12)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tied_ends_of_a_split_sequence(size: int, vocab_size: int, padded: int, deferred: bool) -> None:
    matrix, ids, weights = tied(vocab_size, size)
    matrix.requires_grad_(True)
    logits = torch.tanh(F.embedding(ids, matrix)) @ matrix.T
    (logits * logit_weights(vocab_size, size)).sum().backward()
    losses = F.cross_entropy(torch.tanh(F.embedding(ids, matrix)) @ matrix.T, ids.flip(0), reduction="none")
    (losses * weights).sum().backward()
    results = run_ranks(size, split_ends, size, vocab_size, padded, deferred)
    vectors = torch.cat([result[0] for result in results])
    torch.testing.assert_close(vectors, F.embedding(ids, matrix).detach(), rtol=0, atol=0)
    found = torch.cat([result[1] for result in results], dim=-1)[:, :vocab_size]
    torch.testing.assert_close(found, logits.detach(), rtol=1e-12, atol=1e-12)
    for _, _, traffic, loss, _ in results:
        assert traffic == {"all_gather": vectors.numel() * 8 * (size - 1) // size}
        torch.testing.assert_close(loss, (losses * weights).sum().detach(), rtol=1e-12, atol=1e-12)
    gradient = assemble(result[4] for result in results)["weight"]
    torch.testing.assert_close(gradient, matrix.grad, rtol=1e-12, atol=1e-12)


def untied_loss(rank: int, size: int, deferred: bool):
    """Return the gradients of x and of the head's own matrix after a loss over split tokens."""
    mesh = mesh_in_worker(rank, tp=size)
    tp = replace(context(mesh.axis("tp")), splits_sequence=True, deferred=DeferredGradients() if deferred else None)
    head = VocabParallelHead(
        tp, vocab_size=13, padded_vocab_size=24, hidden_size=HIDDEN, init=InitialValue("normal", 1.0)
    )
    matrix, ids, weights = tied(13, size)
    put_logical(head, {"weight": matrix})
    x = F.embedding(ids, matrix)[tp.local_rows(len(ids))].requires_grad_(True)
    head(x, targets=Targets(ids.flip(0), weights, 13, chunk_bytes=700)).backward()
    if tp.deferred is not None:
        tp.deferred.collect().accumulate()
    return x.grad, pieces(head, gradients=True)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_head_of_its_own_reads_a_split_sequence(deferred: bool) -> None:
    size = 3
    matrix, ids, weights = tied(13, size)
    x = F.embedding(ids, matrix).requires_grad_(True)
    matrix.requires_grad_(True)
    (F.cross_entropy(x @ matrix.T, ids.flip(0), reduction="none") * weights).sum().backward()
    results = run_ranks(size, untied_loss, size, deferred)
    torch.testing.assert_close(torch.cat([result[0] for result in results]), x.grad, rtol=1e-12, atol=1e-12)
    gradient = assemble(result[1] for result in results)["weight"]
    torch.testing.assert_close(gradient, matrix.grad, rtol=1e-12, atol=1e-12)
