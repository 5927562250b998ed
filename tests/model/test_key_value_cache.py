"""Tests of texts that grow in a cache of keys and values: logits are those of the whole texts, for every family."""

from collections.abc import Sequence

import pytest
import torch
from support.families import FAMILIES
from support.models import build_gpt, context, small_config
from torch import Tensor

from megazero.config import derived
from megazero.model.gpt import GPT
from megazero.model.initial_values import initialize_
from megazero.model.key_value_cache import KeyValueCache

VOCAB, POSITIONS = 101, 12
TEXTS = [[5, 17, 99], [1], [2, 4, 6, 8, 10, 12, 14]]


def model_of(family: str) -> GPT:
    model = build_gpt(small_config(init_method_std=0.3, **FAMILIES[family]), context(), vocab_size=VOCAB)
    initialize_(model, 3)
    return model.eval()


def whole(model: GPT, texts: Sequence[list[int]]) -> Tensor:
    """Return the logits [texts, V] behind texts that are computed alone, without a cache."""
    return torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])


def begin(model: GPT, cache: KeyValueCache, texts: Sequence[list[int]]) -> Tensor:
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [100] * (longest - len(text)) for text in texts])
    sequences = model.first_tokens(longest, cache)
    x = model.through(0, model.embed(tokens, sequences), sequences).view(*tokens.shape, -1)
    cache.add([len(text) for text in texts])
    return model.logits(model.final_norm(torch.stack([row[len(text) - 1] for row, text in zip(x, texts, strict=True)])))


def go_on(model: GPT, cache: KeyValueCache, texts: Sequence[list[int]]) -> Tensor:
    """Compute the last tokens of the texts, whose others the cache holds."""
    sequences = model.next_tokens(cache)
    x = model.through(0, model.embed(torch.tensor([text[-1:] for text in texts]), sequences), sequences)
    cache.grow()
    return model.logits(model.final_norm(x))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_grows_has_the_logits_of_the_whole(family: str) -> None:
    """Texts of other lengths are read together, one ends, and a new one takes its place behind the others."""
    model = model_of(family)
    with torch.inference_mode():
        cache = model.new_cache(rows=3, positions=POSITIONS)
        texts = [list(text) for text in TEXTS]
        torch.testing.assert_close(begin(model, cache, texts), whole(model, texts), rtol=1e-10, atol=1e-10)
        for token in (7, 8, 9):
            texts = [[*text, token + row] for row, text in enumerate(texts)]
            torch.testing.assert_close(go_on(model, cache, texts), whole(model, texts), rtol=1e-10, atol=1e-10)
        cache.keep([1, 2])
        fresh = [40, 41, 42, 43]
        torch.testing.assert_close(begin(model, cache, [fresh]), whole(model, [fresh]), rtol=1e-10, atol=1e-10)
        texts = [*texts[1:], fresh]
        for token in (50, 51):
            texts = [[*text, token + row] for row, text in enumerate(texts)]
            torch.testing.assert_close(go_on(model, cache, texts), whole(model, texts), rtol=1e-10, atol=1e-10)
        assert cache.lengths == [6, 12, 6]  # one has reached the last position


@pytest.mark.parametrize("family", ["gpt2", "llama3", "falcon"])
def test_its_bytes_are_the_formulas(family: str) -> None:
    model, config = model_of(family), small_config(**FAMILIES[family])
    cache = model.new_cache(rows=3, positions=7)
    sizes = {"layers": 3, "rows": 3, "positions": 7, "tensor_parallel_size": 1, "element_bytes": 8}
    heads, width = {"gpt2": (12, 5), "llama3": (2, 6), "falcon": (1, 6)}[family]
    assert cache.nbytes == derived.key_value_cache_bytes(config, **sizes) == 2 * 3 * 3 * 7 * heads * width * 8
    held = sum(value.untyped_storage().nbytes() for value in vars(cache).values() if isinstance(value, Tensor))
    assert held == cache.nbytes + 3 * 8  # and the numbers of its rows
    assert f"(2 x 3 layers x 3 texts x 7 tokens x {heads} head" in cache.describe()


def test_a_rank_without_layers_has_an_empty_one() -> None:
    cache = KeyValueCache([], rows=2, positions=4, heads=3, width=5, dtype=torch.float64, device=torch.device("cpu"))
    cache.add([2, 3])
    cache.keep([1])
    assert (cache.nbytes, cache.lengths) == (0, [3])


def test_training_has_none() -> None:
    assert model_of("gpt2").sequences(4).cache is None
