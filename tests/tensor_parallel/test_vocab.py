"""Embedding and cross-entropy cut by vocabulary rows, against the whole ones, with odd and padded vocabularies."""

import pytest
import torch
import torch.nn.functional as F
from support.models import assemble, context, pieces, put_logical
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor

from megazero.comm.local import LocalCommunicator
from megazero.parallel.param_spec import Init
from megazero.tensor_parallel.vocab import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy

pytestmark = pytest.mark.gloo
HIDDEN = 6
# (vocabulary, padded): odd, a last rank with padding only, no padding
VOCABULARIES = [(13, 16), (5, 16), (16, 16)]


def whole(vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Matrix [V, h], logits [3, 4, V], ids [3, 4], weights of the losses [3, 4]; large logits, to need the maximum."""
    generator = torch.Generator().manual_seed(vocab_size)
    draw = {"dtype": torch.float64, "generator": generator}
    return (
        torch.randn(vocab_size, HIDDEN, **draw),
        torch.randn(3, 4, vocab_size, **draw) * 300,
        torch.randint(vocab_size, (3, 4), generator=generator),
        torch.randn(3, 4, **draw),
    )


def cut_cross_entropy(rank: int, size: int, vocab_size: int, padded: int) -> tuple[Tensor, Tensor]:
    axis = mesh_in_worker(rank, tp=size).axis("tp")
    _, logits, labels, weights = whole(vocab_size)
    filled = F.pad(logits, (0, padded - vocab_size), value=1e4)  # what padding rows say must not matter
    mine = filled.chunk(size, -1)[rank].clone().requires_grad_(True)
    losses = vocab_parallel_cross_entropy(mine, labels, vocab_size=vocab_size, communicator=axis)
    (losses * weights).sum().backward()
    assert mine.grad is not None
    return losses.detach(), mine.grad


@pytest.mark.parametrize(("vocab_size", "padded"), VOCABULARIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_cross_entropy(size: int, vocab_size: int, padded: int) -> None:
    _, logits, labels, weights = whole(vocab_size)
    logits.requires_grad_(True)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, 4)
    (expected * weights).sum().backward()
    results = run_ranks(size, cut_cross_entropy, size, vocab_size, padded)
    for losses, _ in results:
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-13, atol=1e-13)
    grad = torch.cat([result[1] for result in results], dim=-1)
    torch.testing.assert_close(grad[..., :vocab_size], logits.grad, rtol=1e-12, atol=1e-14)
    assert torch.equal(grad[..., vocab_size:], torch.zeros_like(grad[..., vocab_size:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    logits = (torch.randn(64, 5000, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    labels = torch.arange(64)
    ours = logits.clone().requires_grad_(True)
    losses = vocab_parallel_cross_entropy(ours, labels, vocab_size=5000, communicator=LocalCommunicator())
    losses.mean().backward()
    exact = logits.double().requires_grad_(True)
    expected = F.cross_entropy(exact, labels, reduction="none")
    expected.mean().backward()
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert ours.grad is not None and exact.grad is not None and ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-2, atol=1e-6)


def test_walking_the_graph_twice_is_noticed() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([1, 2]), vocab_size=5, communicator=LocalCommunicator())
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def cut_ends(rank: int, size: int, vocab_size: int, padded: int):
    """Embedding output, gradient pieces of the embedding, this rank's logits of an untied head."""
    tp = context(mesh_in_worker(rank, tp=size).axis("tp"))
    shape = {"vocab_size": vocab_size, "padded_vocab_size": padded, "hidden_size": HIDDEN, "init": Init("normal", 1.0)}
    embedding, head = VocabParallelEmbedding(tp, **shape), VocabParallelHead(tp, **shape)
    matrix, _, ids, weights = whole(vocab_size)
    for module in (embedding, head):
        put_logical(module, {"weight": matrix})
    vectors = embedding(ids)
    (vectors * weights.unsqueeze(-1)).sum().backward()
    return vectors.detach(), pieces(embedding, gradients=True), head(vectors.detach()).detach()


@pytest.mark.parametrize(("vocab_size", "padded"), VOCABULARIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_embedding_and_head(size: int, vocab_size: int, padded: int) -> None:
    matrix, _, ids, weights = whole(vocab_size)
    matrix.requires_grad_(True)
    vectors = F.embedding(ids, matrix)
    (vectors * weights.unsqueeze(-1)).sum().backward()
    results = run_ranks(size, cut_ends, size, vocab_size, padded)
    for ours, _, _ in results:
        torch.testing.assert_close(ours, vectors.detach(), rtol=0, atol=0)
    torch.testing.assert_close(assemble(result[1] for result in results)["weight"], matrix.grad)
    logits = torch.cat([result[2] for result in results], dim=-1)
    torch.testing.assert_close(logits[..., :vocab_size], (vectors @ matrix.T).detach())
