"""Tests the tables of rotary positions and ALiBi's bias against transformers' and by hand."""

import math

import torch
from support.each import each
from support.models import build_gpt, context, small_config

from megazero.model.positions import Positions, alibi_slopes, rotate, rotation_table
from megazero.model.sequences import Rotation
from megazero.planner.dry.hollow import Hollow

CPU = torch.device("cpu")


@each("scaling", [None, 8.0, 32.0])
@each(("base", "width"), [(10_000.0, 128), (500_000.0, 64), (500_000.0, 6)])
def test_frequencies_are_transformers(scaling: float | None, base: float, width: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = {"rope_type": "default"}
    if scaling is not None:
        kind = {"rope_type": "llama3", "factor": scaling, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        kind["original_max_position_embeddings"] = 8192
    theirs = LlamaConfig(head_dim=width, max_position_embeddings=300, rope_parameters={**kind, "rope_theta": base})
    cosine, sine = LlamaRotaryEmbedding(theirs)(torch.zeros(1, dtype=torch.float32), torch.arange(300)[None])
    ours = small_config(
        kv_channels=width,
        max_position_embeddings=300,
        rotary_base=base,
        use_rope_scaling=scaling is not None,
        rope_scaling_factor=scaling or 8.0,
    )
    found = rotation_table(ours, torch.float32, CPU)
    assert torch.equal(found.cosine, cosine[0, :, : width // 2])
    assert torch.equal(found.sine, sine[0, :, : width // 2])


def test_scores_depend_on_distances_alone() -> None:
    table = rotation_table(small_config(kv_channels=10, rotary_percent=0.6), torch.float64, CPU)
    query, key = torch.randn(2, 1, 12, 3, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    query, key = query[:, :1].expand(1, 12, 3, 10), key[:, :1].expand(1, 12, 3, 10)  # the same at every position
    scores = torch.einsum("bqnd,bknd->nqk", rotate(query, table), rotate(key, table))
    for distance in range(12):
        along = scores.diagonal(distance, 1, 2)
        torch.testing.assert_close(along, along[:, :1].expand_as(along), rtol=1e-5, atol=1e-6)
    assert (scores[:, 0, 0] - scores[:, 0, 11]).abs().min() > 1e-3
    assert torch.equal(rotate(query, table)[..., 6:], query[..., 6:]), "the rest is not turned"


def test_slopes() -> None:
    """BLOOM's 112 heads have those of 64, and 48 of those in between."""
    assert alibi_slopes(8) == [2.0**-power for power in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]
    slopes = alibi_slopes(112)
    assert len(set(slopes)) == 112
    assert slopes[:64] == [math.exp2(-(head + 1) / 8) for head in range(64)]
    assert slopes[64:] == [math.exp2(-(2 * head + 1) / 16) for head in range(48)]


def test_one_bias_serves_every_length() -> None:
    positions = Positions(small_config(position_embedding_type="alibi"), context())
    short, long = (positions.sequences(length).mask for length in (5, 9))
    again = positions.sequences(7).mask
    assert short is not None and long is not None and again is not None
    assert (
        long.shape == (1, 12, 9, 9) and torch.equal(again, long[..., :7, :7]) and torch.equal(short, long[..., :5, :5])
    )
    assert again.untyped_storage().data_ptr() == long.untyped_storage().data_ptr()
    for row in range(9):
        assert long[0, 0, row, row] == 0 and long[0, 0, row, row + 1 :].isneginf().all()
        assert torch.equal(long[0, :, row, 0], -row * torch.tensor(alibi_slopes(12), dtype=torch.float64))


def test_positions_given_choose_the_rows_of_the_tables() -> None:
    positions = Positions(small_config(position_embedding_type="rope", kv_channels=6), context())
    given = torch.tensor([[0, 1, 0, 1, 2], [4, 3, 2, 1, 0]])
    whole, chosen = positions.sequences(5).rotation, positions.sequences(5, positions=given).rotation
    assert isinstance(whole, Rotation) and isinstance(chosen, Rotation)
    assert chosen.cosine.shape == (2, 5, 3)
    assert torch.equal(chosen.sine[1], whole.sine.flip(0)) and torch.equal(chosen.cosine[0, 2], whole.cosine[0])


@each("kind", ["learned_absolute", "rope", "alibi", "none"])
def test_without_positions_a_model_sees_a_set_of_earlier_tokens(kind: str) -> None:
    model = build_gpt(small_config(position_embedding_type=kind, kv_channels=6), context(), vocab_size=20)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    last = model(torch.tensor([[3, 5, 7], [5, 3, 7]])).detach()[:, -1]
    # With one layer an order would not show; with several the earlier tokens' own states differ by their order.
    one_token = model(torch.tensor([[7, 7, 7]])).detach()[0]
    same = torch.allclose(one_token[0], one_token[2], rtol=1e-9, atol=1e-9)
    assert same is (kind in ("rope", "alibi", "none")), "equal tokens have equal values, however they are weighted"
    assert not torch.allclose(last[0], last[1], rtol=1e-6, atol=1e-6)


def test_tables_are_made_of_hollow_tensors_too() -> None:
    with Hollow():
        model = build_gpt(small_config(position_embedding_type="alibi"), context(), vocab_size=20)
        sequences = model.sequences(8, documents=torch.zeros(2, 8, dtype=torch.int32))
        assert sequences.mask is not None and sequences.mask.shape == (2, 12, 8, 8)
