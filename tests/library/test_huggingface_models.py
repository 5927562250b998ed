"""Tests models of Hugging Face's transformers, made from configurations, against plain PyTorch in float64."""

from typing import Any

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.zero.parameters.gathered import GatheredParameters

STEPS = 2
DP = 2  # one number for all cases, since each process of a pool imports transformers for seconds
LR = 1e-2
VOCABULARY = 31


def make_model(name: str) -> nn.Module:
    """Return a small model without dropout: Bart with one embedding for encoder, decoder and head, or Bert."""
    # Slow to import, so that it is not done while tests are collected.
    from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM

    torch.manual_seed(6)
    if name == "bert":
        sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
        free = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=10, **sizes, **free))
    else:
        sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _SIDES.items()}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
        model = BartForConditionalGeneration(
            BartConfig(vocab_size=VOCABULARY, d_model=12, max_position_embeddings=10, dropout=0.0, **sides, **special)
        )
    return model.double().train()


_SIDES = {"layers": 2, "attention_heads": 3, "ffn_dim": 18}


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.flip(1)}


def train(rank: int, name: str, stage: int, recompute: bool | None) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model; recompute: True for reentrant checkpointing, False for the other kind, None for none."""
    model: Any = make_model(name)
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 500},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": "AdamW", "lr": LR},
    }
    engine = megazero.initialize(model, config, mesh=mesh_in_worker(rank, dp=DP))
    losses = []
    for step in range(STEPS):
        part = {key: value.chunk(DP)[rank] for key, value in batch(step).items()}
        loss = engine(**part).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    with GatheredParameters(model):
        weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    engine.close()
    return losses, weights


def train_plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model = make_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(step)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {key: p.detach() for key, p in model.named_parameters()}


def generate(rank: int) -> tuple[Tensor, float, int]:
    """Generate without an optimizer; return the tokens, the loss of an evaluation, and the elements still gathered."""
    model: Any = make_model("bart").eval()
    config = {"zero": {"zero_stage": 3}, "precision": {"precision": "fp64"}}
    engine: Any = megazero.initialize(model, config, mesh=mesh_in_worker(rank, dp=DP))
    part = {key: value.chunk(DP)[rank] for key, value in batch(0).items()}
    tokens = engine.generate(part["input_ids"], max_new_tokens=6, min_new_tokens=6, num_beams=2, do_sample=False)
    found = tokens, engine(**part).loss.item(), engine.zero_engine.gathered_numel[0]
    engine.close()
    return found


@pytest.mark.gloo
def test_an_engine_without_an_optimizer_generates() -> None:
    pytest.importorskip("transformers")
    model: Any = make_model("bart").eval()
    for rank, (tokens, loss, gathered) in enumerate(run_ranks(DP, generate)):
        part = {key: value.chunk(DP)[rank] for key, value in batch(0).items()}
        ids = part["input_ids"]
        expected = model.generate(ids, max_new_tokens=6, min_new_tokens=6, num_beams=2, do_sample=False)
        assert torch.equal(tokens, expected) and gathered == 0
        torch.testing.assert_close(loss, model(**part).loss.item(), rtol=1e-12, atol=0)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "stage", "recompute"),
    [
        ("bert", 0, None),
        ("bert", 3, True),
        ("bert", 3, False),
        ("bart", 1, None),
        ("bart", 2, True),
        ("bart", 3, None),
        ("bart", 3, True),
    ],
)
def test_transformers(name: str, stage: int, recompute: bool | None) -> None:
    pytest.importorskip("transformers")
    losses, weights = train_plain(name)
    runs = run_ranks(DP, train, name, stage, recompute)
    mean = torch.tensor([run[0] for run in runs], dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses, dtype=torch.float64), rtol=1e-9, atol=0)
    for _, found in runs:
        assert found.keys() == weights.keys()
        for key, value in weights.items():
            # Gradients of the keys' biases are nothing but noise, which AdamW amplifies: they have a bound of their
            # own.
            bound = LR * STEPS * 2 if "k_proj.bias" in key or "key.bias" in key else 1e-8
            torch.testing.assert_close(found[key], value, rtol=1e-8, atol=bound, msg=key)


def narrow(rank: int) -> dict[str, tuple[set[torch.dtype], bool]]:
    """Return the formats of T5's `wo` in fp16, and whether Llama's rotary frequencies are what transformers makes."""
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "num_attention_heads": 2}
    mesh, found = mesh_in_worker(rank, dp=DP), {}
    for stage in (1, 3):
        small = {"d_model": 12, "d_kv": 6, "d_ff": 18, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
        t5: Any = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **small))
        llama: Any = LlamaForCausalLM(LlamaConfig(hidden_size=12, intermediate_size=18, **sizes))
        frequencies = llama.model.rotary_emb.inv_freq.clone()
        for model, precision in ((t5, "fp16"), (llama, "bf16")):
            config = {"zero": {"zero_stage": stage}, "precision": {"precision": precision}, "optimizer": {"lr": LR}}
            engine = megazero.initialize(model, config, mesh=mesh)
            engine.backward(engine(**batch(rank)).loss)
            engine.step()
            engine.close()
        kept = {p.dtype for name, p in t5.named_parameters() if ".wo." in name}
        found[f"stage {stage}"] = kept, torch.equal(llama.model.rotary_emb.inv_freq, frequencies)
    return found


@pytest.mark.gloo
def test_models_keep_what_they_need_wide() -> None:
    for found in run_ranks(DP, narrow):
        assert all(kept == {torch.float32} and is_same for kept, is_same in found.values())
