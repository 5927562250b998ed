"""Tests the GPT against transformers' GPT-2 and the plain reference: logits, losses and gradients, at every tp."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import reference
from support.each import each
from support.models import Piece, assemble, build_gpt, context, pieces, put_logical, small_config
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import megazero.model.gpt as gpt
from megazero.config.model import ModelConfig
from megazero.model.initial_values import initialize_
from megazero.parallel.layer_split import chunks_of, cut
from megazero.parallel.param_spec import named_specs
from megazero.planner.dry.rank import dry_tensors

VOCAB, DIVISIBLE_BY = 101, 8
CONV1D = {  # names of a block's layers in transformers and here; transformers' matrices are [in, out]
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.projection",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
NORMS = {"ln_1": "input_norm", "ln_2": "post_attention_norm"}


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(4))
    return ids[:, :-1], ids[:, 1:]


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Return full logical weights, all of them non-zero, biases too."""
    generator = torch.Generator().manual_seed(9)
    return {
        spec.name: 0.1 * torch.randn(spec.full_shape, generator=generator, dtype=torch.float64)
        for spec, _ in named_specs(build_gpt(config, context(), vocab_size=VOCAB))
    }


def logits_and_gradients(rank: int, size: int, weights: dict[str, Tensor], untied: bool) -> tuple[Tensor, list[Piece]]:
    """Return this rank's logits, and its pieces of the gradients of the mean loss."""
    tp = context(mesh_in_worker(rank, tp=size).axis("tp"))
    config = small_config(untie_embeddings_and_output_weights=untied)
    model = build_gpt(config, tp, vocab_size=VOCAB, divisible_by=DIVISIBLE_BY)
    put_logical(model, weights)
    tokens, labels = batch()
    (model.summed_loss(tokens, labels) / labels.numel()).backward()
    return model(tokens).detach(), pieces(model, gradients=True)


def transformers_gpt2(weights: dict[str, Tensor]) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": 60, "n_layer": 3, "n_head": 12, "n_positions": 12, "vocab_size": VOCAB}
    theirs = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()
    for name, parameter in theirs.named_parameters():
        parameter.data.copy_(to_theirs(name, weights))
    return theirs


def to_theirs(name: str, weights: dict[str, Tensor]) -> Tensor:
    """Return the value of transformers' parameter `name`, made from megazero's weights."""
    top = {"wte": "embedding.word", "wpe": "embedding.position", "ln_f": "final_norm"}
    parts = name.removeprefix("transformer.").split(".")
    if parts[0] in top:
        return weights[f"{top[parts[0]]}.{parts[1]}"]
    layer, key, kind = f"layers.{parts[1]}", ".".join(parts[2:-1]), parts[-1]
    if key in NORMS:
        return weights[f"{layer}.{NORMS[key]}.{kind}"]
    value = weights[f"{layer}.{CONV1D[key]}.{kind}"]
    return value.flatten() if kind == "bias" else value.flatten(0, -2).T


@pytest.mark.gloo
@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_and_gradients_are_those_of_transformers_gpt2(size: int) -> None:
    weights = random_weights(small_config())
    theirs = transformers_gpt2(weights)
    tokens, labels = batch()
    expected = theirs(tokens).logits
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    results = run_ranks(size, logits_and_gradients, size, weights, False)
    logits = torch.cat([logits for logits, _ in results], dim=-1)[..., :VOCAB]
    torch.testing.assert_close(logits, expected.detach(), rtol=1e-11, atol=1e-12)
    gradients = assemble(pieces for _, pieces in results)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(to_theirs(name, gradients), parameter.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.gloo
@pytest.mark.parametrize("untied", [False, True])
def test_losses_and_gradients_are_the_references(untied: bool) -> None:
    weights = random_weights(small_config(untie_embeddings_and_output_weights=untied))
    assert ("head.weight" in weights) is untied
    live = {name: value.clone().requires_grad_(True) for name, value in weights.items()}
    expected = reference.gradients(reference.mean_loss(live, reference.Batch(*batch())), live)
    gradients = assemble(pieces for _, pieces in run_ranks(2, logits_and_gradients, 2, weights, untied))
    assert set(gradients) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-10, atol=1e-13)


def dropped_losses(rank: int, size: int, attention: float, hidden: float) -> list[Tensor]:
    tp = context(mesh_in_worker(rank, tp=size).axis("tp"))
    config = small_config(attention_dropout=attention, hidden_dropout=hidden)
    model = build_gpt(config, tp, vocab_size=VOCAB, divisible_by=DIVISIBLE_BY)
    initialize_(model, seed=2)
    found = []
    for first_sample in (0, 4, 0):
        tp.random.begin_micro_batch(first_sample)
        found.append(model.summed_loss(*batch()).detach())
    return found


@pytest.mark.gloo
def test_dropout_repeats_by_sample_and_keeps_ranks_together() -> None:
    ranks = run_ranks(2, dropped_losses, 2, 0.3, 0.3)
    for first, other, again in ranks:
        assert torch.equal(first, again) and not torch.equal(first, other)
    torch.testing.assert_close(ranks[0], ranks[1], rtol=0, atol=0)


@pytest.mark.gloo
def test_residual_dropout_is_the_same_at_every_tensor_parallel_size() -> None:
    alone, pair = run_ranks(1, dropped_losses, 1, 0.0, 0.3)[0], run_ranks(2, dropped_losses, 2, 0.0, 0.3)[0]
    torch.testing.assert_close(alone, pair, rtol=1e-12, atol=0)


def mixed_heads(rank: int, dropout: float) -> Tensor:
    """Return the output of the first block's heads on this rank, when both ranks' heads have the same weights."""
    tp = context(mesh_in_worker(rank, tp=2).axis("tp"))
    model = build_gpt(small_config(attention_dropout=dropout), tp, vocab_size=VOCAB, divisible_by=DIVISIBLE_BY)
    weights = random_weights(small_config())
    for kind in ("weight", "bias"):
        matrix = weights[f"layers.0.attention.qkv.{kind}"]
        matrix[:, 6:] = matrix[:, :6]
    put_logical(model, weights)
    seen: list[Tensor] = []
    model.layers["0"].attention.projection.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    tp.random.begin_micro_batch(0)
    model(batch()[0])
    return seen[0]


@pytest.mark.gloo
def test_ranks_drop_different_attention_weights() -> None:
    torch.testing.assert_close(*run_ranks(2, mixed_heads, 0.0), rtol=0, atol=0)
    first, second = run_ranks(2, mixed_heads, 0.3)
    assert (first != second).any(-1).double().mean() > 0.9


class CountingCopies(TorchDispatchMode):
    """A mode that lists the operations inside it that copy tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("clone", "copy_", "stack", "cat", "_to_copy"):
            self.copies.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_gradients_of_query_key_and_value_are_copied_once(is_masked: bool) -> None:
    """That copy is the gradient of the linear layer's output, in its layout."""
    model = build_gpt(small_config(), context(), vocab_size=VOCAB)
    documents = torch.arange(12).div(5, rounding_mode="floor").expand(2, 12) if is_masked else None
    sequences = model.sequences(12, documents=documents)
    qkv = torch.randn(24, 180, dtype=torch.float64, requires_grad=True)
    attention = model.layers["0"].attention
    mixed = attention.core(attention.qkv.bias, sequences, qkv)
    with CountingCopies() as mode:
        [gradient] = torch.autograd.grad(mixed, qkv, torch.ones_like(mixed))
    assert gradient.is_contiguous() and mode.copies == ["stack"]


def test_evaluation_draws_nothing() -> None:
    model = build_gpt(small_config(attention_dropout=0.3, hidden_dropout=0.3), context(), vocab_size=VOCAB).eval()
    initialize_(model, seed=2)
    before = torch.get_rng_state()
    model(batch()[0])
    assert torch.equal(before, torch.get_rng_state())


def test_units_hold_every_parameter_once_in_order_of_use() -> None:
    for untied in (False, True):
        config = small_config(untie_embeddings_and_output_weights=untied)
        model = build_gpt(config, context(), vocab_size=VOCAB)
        units = model.units()
        names = ["embedding.word", "embedding.position", "layers.0", "layers.1", "layers.2", "final_norm"]
        assert [unit.name for unit in units] == names + ["head"] * untied
        listed = [name for unit in units for name in unit.parameters]
        assert sorted(listed) == sorted(name for name, _ in model.named_parameters())
        for unit in units:
            mine = {id(parameter) for parameter in unit.consumers[0].parameters()}
            assert mine == {id(model.get_parameter(name)) for name in unit.parameters}


def test_the_head_is_tied_to_the_embedding() -> None:
    model = build_gpt(small_config(), context(), vocab_size=VOCAB)
    initialize_(model, seed=1)
    before = model(batch()[0])
    with torch.no_grad():
        model.embedding.word.weight[VOCAB - 1] *= 2  # an id that does not occur in the batch
    assert VOCAB - 1 not in batch()[0]
    changed = (model(batch()[0]) - before).abs().amax(dim=(0, 1)) > 0
    assert changed.nonzero().flatten().tolist() == [VOCAB - 1]


def test_hollow_tensors_go_forward_and_backward_with_dropout() -> None:
    with dry_tensors():
        tp = context()
        model = build_gpt(small_config(attention_dropout=0.1, hidden_dropout=0.1), tp, vocab_size=VOCAB)
        initialize_(model, seed=1)
        tp.random.begin_micro_batch(0)
        loss = model.summed_loss(torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.long))
        loss.backward()
        assert loss.shape == ()
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.bfloat16, 3e-2)])
def test_a_gpu_gives_the_same_losses_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    found = []
    for tp in (context(), context(dtype=dtype, device=torch.device("cuda"))):
        model = build_gpt(small_config(), tp, vocab_size=VOCAB, divisible_by=DIVISIBLE_BY)
        initialize_(model, seed=1)
        tokens, labels = (ids.to(tp.device) for ids in batch())
        loss = model.summed_loss(tokens, labels) / labels.numel()
        loss.backward()
        gradients = torch.cat([each.values.flatten().double().cpu() for each in pieces(model, gradients=True)])
        found.append((loss.detach().double().cpu(), gradients))
    (loss, gradients), (gpu_loss, gpu_gradients) = found
    torch.testing.assert_close(gpu_loss, loss, rtol=tolerance, atol=0)
    assert (gpu_gradients - gradients).norm() <= tolerance * gradients.norm()


@pytest.mark.cuda
def test_dropout_repeats_by_sample_on_a_gpu() -> None:
    tp = context(dtype=torch.bfloat16, device=torch.device("cuda"))
    model = build_gpt(small_config(attention_dropout=0.3, hidden_dropout=0.3), tp, vocab_size=VOCAB)
    initialize_(model, seed=1)
    tokens, labels = (ids.cuda() for ids in batch())
    found = []
    for first_sample in (0, 4, 0):
        tp.random.begin_micro_batch(first_sample)
        found.append(model.summed_loss(tokens, labels).detach())
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_gpt_itself_does_not_communicate() -> None:
    tree = ast.parse(Path(gpt.__file__).read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    verbs = {"all_reduce", "all_reduce_scalars", "all_gather_into", "reduce_scatter_into", "broadcast", "barrier"}
    assert not names & verbs
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not any(name.startswith(("megazero.comm", "torch.distributed")) for name in imported)


def cut_gpt(split: tuple[int, ...], stage: int, num_stages: int, **changes: object) -> gpt.GPT:
    """Return one pipeline stage of the small model."""
    chunks = chunks_of(cut(split), stage=stage, num_stages=num_stages)
    config = small_config(num_layers=sum(split), **changes)
    return gpt.GPT(config, vocab_size=VOCAB, tp=context(), padded_vocab_size=VOCAB, chunks=chunks)


def test_stages_together_have_every_parameter_and_the_tied_one_twice() -> None:
    whole = [spec for spec, _ in named_specs(build_gpt(small_config(num_layers=5), context(), vocab_size=VOCAB))]
    stages = [[spec for spec, _ in named_specs(cut_gpt((2, 2, 1), stage, 3))] for stage in range(3)]
    names = [spec.name for stage in stages for spec in stage]
    assert sorted(names) == sorted([spec.name for spec in whole] + ["embedding.word.weight"])
    ends = [[spec.name for spec in stage if spec.summed_over] for stage in stages]
    assert ends == [["embedding.word.weight"], [], ["embedding.word.weight"]]
    counted = [
        spec.name
        for stage, specs in enumerate(stages)
        for spec in specs
        if spec.is_counted_on({"tp": 0, "ends": int(stage == 2)})
    ]
    assert sorted(counted) == sorted(spec.name for spec in whole)


def test_an_untied_head_has_no_copy() -> None:
    stages = [
        [name for name, _ in cut_gpt((2, 1), stage, 2, untie_embeddings_and_output_weights=True).named_parameters()]
        for stage in range(2)
    ]
    assert "embedding.word.weight" not in stages[1] and "head.weight" in stages[1]


@each(("split", "num_stages"), [((3,), 1), ((2, 1), 2), ((0, 3), 2), ((3, 0), 2), ((1, 1, 0, 1), 2), ((1, 1, 1), 3)])
def test_chunks_one_after_the_other_are_the_whole_model(split: tuple[int, ...], num_stages: int) -> None:
    weights = random_weights(small_config())
    stages = [cut_gpt(split, stage, num_stages) for stage in range(num_stages)]
    for model in stages:
        put_logical(model, {spec.name: weights[spec.name] for spec, _ in named_specs(model)})
    whole = build_gpt(small_config(), context(), vocab_size=VOCAB)
    put_logical(whole, weights)
    tokens, labels = batch()
    sequences = stages[0].sequences(tokens.shape[1])
    x = stages[0].embed(tokens, sequences)
    for chunk in range(len(split)):
        x = stages[chunk % num_stages].through(chunk // num_stages, x, sequences)
        assert tuple(x.shape) == stages[0].activation_shape(tokens.numel())
    assert torch.equal(stages[-1].loss(x, labels), whole.summed_loss(tokens, labels))


def test_units_stand_in_the_order_of_use_chunk_by_chunk() -> None:
    units = [(unit.name, unit.part) for unit in cut_gpt((1, 1, 1, 2), 0, 2).units()]
    assert units == [("embedding.word", 0), ("embedding.position", 0), ("layers.0", 0), ("layers.2", 1)]
    last = [(unit.name, unit.part) for unit in cut_gpt((1, 1, 1, 2), 1, 2).units()]
    # Backward needs the tied matrix first, so it stands last.
    assert last == [
        ("layers.1", 0),
        ("layers.3", 1),
        ("layers.4", 1),
        ("final_norm", 1),
        ("embedding.word", 1),
    ]
    names = [name for name, _ in cut_gpt((1, 1, 1, 2), 1, 2).named_parameters()]
    assert names[-1] == "embedding.word.weight", "parameters are registered in that order too"


def split_logits_and_gradients(rank: int, size: int, weights: dict[str, Tensor]) -> tuple[float, list[Piece]]:
    """Return the loss and the gradients with the sequence split; partial gradients are summed here."""
    axis = mesh_in_worker(rank, tp=size).axis("tp")
    tp = replace(context(axis), splits_sequence=True)
    model = build_gpt(small_config(), tp, vocab_size=VOCAB, divisible_by=DIVISIBLE_BY)
    put_logical(model, weights)
    tokens, labels = batch()
    loss = model.summed_loss(tokens, labels) / labels.numel()
    loss.backward()
    for spec, parameter in named_specs(model):
        assert parameter.grad is not None
        assert ("tp" in spec.summed_over) == ("tp" not in spec.sharded_axes), spec.name
        if "tp" in spec.summed_over:
            axis.all_reduce(parameter.grad).wait()
    return loss.item(), pieces(model, gradients=True)


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_split_sequence_changes_nothing(size: int) -> None:
    """The 24 tokens are in rows of 12, so with 3 ranks a rank's part begins inside a sequence."""
    weights = random_weights(small_config())
    whole = build_gpt(small_config(), context(), vocab_size=VOCAB)
    put_logical(whole, weights)
    tokens, labels = batch()
    expected = whole.summed_loss(tokens, labels) / labels.numel()
    expected.backward()
    reference_gradients = assemble([pieces(whole, gradients=True)])
    results = run_ranks(size, split_logits_and_gradients, size, weights)
    found = assemble(rank for _, rank in results)
    for loss, _ in results:
        assert abs(loss - expected.item()) < 1e-12
    for name, gradient in reference_gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)
