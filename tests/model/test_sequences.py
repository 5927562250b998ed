"""Tests documents in a row: each attends, and counts its positions, as if it were alone."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from support.families import FAMILIES
from support.models import build_gpt, context, put_logical, small_config
from support.reference import Batch, gradients, mean_loss
from support.training import shape_of
from torch import Tensor

from megazero.activations.recompute import Recomputation
from megazero.activations.recompute_plan import NO_RECOMPUTATION, ActivationPlan
from megazero.data.loader import BatchLayout, MicroBatch, build_step_batch
from megazero.model.gpt import GPT
from megazero.model.initial_values import initial_value
from megazero.model.sequences import Sequences, document_mask
from megazero.parallel.param_spec import named_specs
from megazero.planner.dry.hollow import Hollow
from megazero.tensor_parallel.random import RandomRegions

VOCAB, END, LENGTH = 31, 0, 12
# The places, among a row's 13 tokens, of the tokens END that end its documents.
ROWS = {
    "none": (),
    "several": (3, 7, 9),
    "at both ends": (0, 11),
    "in the label only": (12,),
    "of one token": (4, 5, 6),
    "nothing but ends": tuple(range(13)),
}


class Drawn:
    """A source whose sample k has the document ends of the k-th of ROWS."""

    seq_length = LENGTH

    def loss_mask(self, k: int) -> None:
        """Every token is learnt."""

    def sample(self, k: int) -> object:
        row = torch.randint(1, VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(k))
        row[list(tuple(ROWS.values())[k])] = END
        return row.numpy()


def micro_batch(*, positions: bool = True, attention: bool = True) -> MicroBatch:
    """Return a micro-batch of all ROWS."""
    layout = BatchLayout(len(ROWS), len(ROWS), 0, 1, None, END, positions, attention)
    return build_step_batch(Drawn(), 0, layout).micro_batches[0]


def sequences_of(batch: MicroBatch) -> Sequences:
    return gpt().sequences(LENGTH, positions=batch.positions, documents=batch.documents)


def documents_of(batch: MicroBatch) -> list[tuple[int, Batch]]:
    """Return (row, inputs and labels [1, any length]) of every document, cut at its end without use of `documents`."""
    found = []
    for row, (tokens, labels) in enumerate(zip(batch.tokens, batch.labels, strict=True)):
        ends = [place + 1 for place, token in enumerate(tokens.tolist()) if token == END]
        places = sorted({0, *ends, LENGTH})
        for start, stop in pairwise(places):
            found.append((row, Batch(tokens[None, start:stop], labels[None, start:stop])))
    return found


def weights(**changes: Any) -> dict[str, Tensor]:
    model = build_gpt(small_config(**changes), context(), vocab_size=VOCAB)
    return {spec.name: initial_value(spec, 5).view(spec.full_shape).double() * 4 for spec, _ in named_specs(model)}


def gpt(activations: ActivationPlan = NO_RECOMPUTATION, **changes: Any) -> GPT:
    config = small_config(**changes)
    model = GPT(config, vocab_size=VOCAB, tp=context(), padded_vocab_size=VOCAB, activations=activations)
    put_logical(model, weights(**changes))
    return model


@pytest.mark.parametrize("family", ["gpt2", "llama3", "falcon", "bloom", "nope"])
def test_a_row_of_documents_is_the_documents_alone(family: str) -> None:
    """Losses of documents, and all gradients, equal those of the plain twin that reads one document at a time."""
    model, batch = gpt(**FAMILIES[family]), micro_batch()
    shape = shape_of(small_config(**FAMILIES[family]))
    apart = documents_of(batch)
    assert [sum(row == at for row, _ in apart) for at in range(len(ROWS))] == [1, 4, 2, 1, 4, 12]
    live = {name: value.requires_grad_(True) for name, value in weights(**FAMILIES[family]).items()}
    alone = [mean_loss(live, document, shape) * document.labels.numel() for _, document in apart]

    sequences = model.sequences(LENGTH, positions=batch.positions, documents=batch.documents)
    found = []
    for number, (row, document) in enumerate(apart):
        before = sum(other.labels.numel() for at, other in apart[:number] if at == row)
        only = torch.zeros_like(batch.labels, dtype=torch.float32)
        only[row, before : before + document.labels.numel()] = 1
        found.append(model.summed_loss(batch.tokens, batch.labels, only, sequences))
    assert max(abs(one - other) / other for one, other in zip(found, alone, strict=True)) < 1e-9
    torch.stack(found).sum().backward()
    expected = gradients(torch.stack(alone).sum(), live)
    for spec, parameter in named_specs(model):
        assert parameter.grad is not None
        gradient = expected[spec.name].reshape(parameter.shape)
        assert (parameter.grad - gradient).abs().max() < 1e-9 * gradient.abs().max(), spec.name


def test_the_twin_cuts_documents_as_we_do() -> None:
    batch, live = micro_batch(), weights()
    apart = [mean_loss(live, document) * document.labels.numel() for _, document in documents_of(batch)]
    together = mean_loss(live, Batch(batch.tokens, batch.labels, None, END)) * batch.labels.numel()
    torch.testing.assert_close(together, torch.stack(apart).sum(), rtol=1e-13, atol=0)


def test_each_of_the_two_does_its_part_only() -> None:
    """Resetting attention alone leaves positions shifted; resetting positions alone leaves other documents visible."""
    model, batch = gpt(), micro_batch()
    plain = Sequences(LENGTH)
    losses = {
        name: model.hidden(batch.tokens).detach() if sequences is plain else rows(model, batch, sequences)
        for name, sequences in {
            "plain": plain,
            "positions": sequences_of(micro_batch(attention=False)),
            "attention": sequences_of(micro_batch(positions=False)),
            "both": sequences_of(batch),
        }.items()
    }
    names = list(losses)
    for place, name in enumerate(names):
        for other in names[place + 1 :]:
            apart = (losses[name] - losses[other]).abs().amax(-1)  # [b, s]
            assert not apart[[0, 3]].any(), "a row without ends before its last input is one document"
            assert apart[1, 4:].gt(1e-6).all() and not apart[1, :4].any(), (name, other)


def rows(model: GPT, batch: MicroBatch, sequences: Sequences) -> Tensor:
    """Return the head's input, [b, s, h]."""
    x = model.through(0, model.embed(batch.tokens, sequences), sequences)
    return model.final_norm(x).detach().view(*batch.tokens.shape, -1)


def test_what_follows_or_belongs_to_others_is_out_of_sight() -> None:
    documents = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]], dtype=torch.int32)
    mask = document_mask(documents, torch.bfloat16)
    assert mask.shape == (2, 1, 4, 4) and mask.dtype == torch.bfloat16
    assert mask.isneginf().logical_or(mask == 0).all()
    assert (mask[0, 0] == 0).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert (mask[1, 0] == 0).int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert gpt().sequences(4).mask is None


@pytest.mark.parametrize("granularity", ["none", "full", "selective"])
def test_one_mask_serves_all_layers_and_their_backward(granularity: str) -> None:
    """No layer keeps a mask of its own, which kernels would make of a mask of booleans."""
    random = RandomRegions(1, 0, torch.device("cpu"))
    plan = ActivationPlan(granularity, Recomputation(random) if granularity != "none" else None)
    model, batch = gpt(plan), micro_batch()
    sequences = sequences_of(batch)
    assert sequences.mask is not None
    squares: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.ndim == 4 and tensor.shape[-2:] == (LENGTH, LENGTH):
            squares.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.summed_loss(batch.tokens, batch.labels, None, sequences)
        loss.backward()
    assert set(squares) <= {sequences.mask.untyped_storage().data_ptr()}
    assert len(squares) == (3 if granularity == "none" else 0)  # recomputed layers get it as an argument again
    plainly = gpt()
    assert torch.equal(loss, plainly.summed_loss(batch.tokens, batch.labels, None, sequences))


def test_dropout_within_documents_still_drops() -> None:
    model, batch = gpt(attention_dropout=0.4), micro_batch()
    sequences, found = sequences_of(batch), []
    for first_sample in (0, 4, 0):
        model._tp.random.begin_micro_batch(first_sample)
        found.append(model.summed_loss(batch.tokens, batch.labels, None, sequences).detach())
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    found.append(model.eval().summed_loss(batch.tokens, batch.labels, None, sequences).detach())
    torch.testing.assert_close(
        found[3], gpt().summed_loss(batch.tokens, batch.labels, None, sequences), rtol=1e-12, atol=0
    )


def test_a_mask_takes_the_bytes_it_is_said_to() -> None:
    with Hollow():
        mask = document_mask(torch.zeros(3, 1024, dtype=torch.int32), torch.bfloat16)
        assert mask.untyped_storage().nbytes() == 3 * 1024**2 * 2
