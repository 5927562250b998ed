"""Tests generation with a cache of keys and values: every family and layout, batches, and transformers' own tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support import reference
from support.checkpoints import run_config, save_checkpoint
from support.families import FAMILIES, GROUPED, LLAMA
from support.models import small_config
from support.processes import mesh_in_worker, run_ranks
from support.training import shape_of
from torch import Tensor, nn

from megazero.checkpoint.hugging_face.conversion import export_model
from megazero.checkpoint.reader import open_checkpoint
from megazero.config import derived
from megazero.config.model import ModelConfig
from megazero.generate.sampling import Sampling
from megazero.generate.session import Session, load_session

VOCAB, WINDOW = 101, 12
GREEDY = Sampling(greedy=True)
# Of one token, of several, as long as the model's positions, and longer.
PROMPTS = [[5, 17, 99], [1], list(range(40, 40 + WINDOW)), [2, 4, 6, 8, 10, 12, 14], [3, 1] * WINDOW]
SHORT = [prompt for prompt in PROMPTS if len(prompt) < WINDOW]


def config_of(family: str) -> ModelConfig:
    # The weights have a large spread, so that the best token is clearly the best.
    return small_config(init_method_std=0.3, **FAMILIES[family])


def load(folder: Path, config: ModelConfig, rank: int = 0, *, tp: int = 1, pp: int = 1) -> Session:
    return load_session(run_config(config), open_checkpoint(folder), mesh_in_worker(rank, tp=tp, pp=pp))


def tokens_of(session: Session, prompts: Sequence[list[int]], **settings: Any) -> list[list[list[int]]]:
    found = session.generate(prompts, **{"sampling": GREEDY, "max_new_tokens": WINDOW, **settings})
    return [[continuation.tokens for continuation in samples] for samples in found]


class Twin(NamedTuple):
    """The plain reference as a generator: it computes all of a text for every token."""

    weights: dict[str, Tensor]
    shape: reference.Shape

    def logits(self, text: Sequence[int]) -> Tensor:
        return reference.logits(self.weights, torch.tensor([text[-WINDOW:]]), self.shape)[0, -1]

    def continued(self, prompt: Sequence[int], count: int) -> list[int]:
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.logits(text).argmax()))
        return text[len(prompt) :]


class Seen(NamedTuple):
    """A session's logits after a batch of prompts and each of four more tokens, and its texts; and its cache's bytes.

    layers: how many of the model's are on its rank.
    """

    logits: list[Tensor | None]
    tokens: list[list[list[int]]]
    cache_bytes: int
    layers: int


def seen(session: Session, more: Sequence[list[int]]) -> Seen:
    """more: the tokens behind each prompt of SHORT, [text][step]."""
    cache = session.cache(len(SHORT), WINDOW)
    logits = [session.first_logits(SHORT, cache)]
    logits += [session.more_logits(list(tokens), cache) for tokens in zip(*more, strict=True)]
    tokens = tokens_of(session, PROMPTS, max_new_tokens=6, batch_size=3)
    return Seen(logits, tokens, cache.nbytes, len(session.model.layers))


def seen_on_rank(rank: int, folder: Path, tp: int, pp: int, more: dict[str, list[list[int]]]) -> list[Seen]:
    return [seen(load(folder / family, config_of(family), rank, tp=tp, pp=pp), more[family]) for family in more]


@pytest.mark.gloo
def test_every_family_and_layout_computes_the_references_logits_and_tokens(tmp_path: Path) -> None:
    """Prompts of several lengths are read together; of 4 ranks, two families have fewer groups, and one has 6."""
    more, tokens, logits = {}, {}, {}
    for family in FAMILIES:
        weights = save_checkpoint(tmp_path / family, run_config(config_of(family)), vocab_size=VOCAB, tp=1)
        twin = Twin(weights, shape_of(config_of(family)))
        tokens[family] = [[twin.continued(prompt, 6)] for prompt in PROMPTS]
        more[family] = [found[:4] for (found,), prompt in zip(tokens[family], PROMPTS, strict=True) if prompt in SHORT]
        texts = list(zip(SHORT, more[family], strict=True))
        logits[family] = [torch.stack([twin.logits([*text, *new[:step]]) for text, new in texts]) for step in range(5)]
    for tp, pp, families in (
        (1, 1, list(FAMILIES)),
        (2, 2, ["gpt2", "qwen3", "bloom"]),
        (4, 1, ["llama3", "falcon", "nope"]),
    ):
        given = (tmp_path, tp, pp, {family: more[family] for family in families})
        ranks = [seen_on_rank(0, *given)] if tp * pp == 1 else run_ranks(tp * pp, seen_on_rank, *given)
        for rank, found in enumerate(ranks):
            for family, each in zip(families, found, strict=True):
                assert each.tokens == tokens[family], (family, tp, pp)
                expected = logits[family] if rank >= tp * (pp - 1) else [None] * 5
                torch.testing.assert_close(each.logits, expected, rtol=1e-10, atol=1e-10)
                sizes = {"layers": each.layers, "rows": len(SHORT), "positions": WINDOW, "tensor_parallel_size": tp}
                assert each.cache_bytes == derived.key_value_cache_bytes(config_of(family), **sizes, element_bytes=8)


def test_a_batch_is_its_prompts_alone(tmp_path: Path) -> None:
    """Texts end at different tokens, and waiting ones take their rows; draws are those of a prompt alone too."""
    config = config_of("qwen3")
    save_checkpoint(tmp_path, run_config(config), vocab_size=VOCAB, tp=1)
    session = load(tmp_path, config)
    drawn = {"sampling": Sampling(temperature=1.2, top_k=60), "num_samples": 3, "seed": 4, "max_new_tokens": 9}
    for settings in ({}, drawn):
        greedy = tokens_of(session, PROMPTS, **settings)
        (ended,) = {tuple(greedy[1][0][3:4])}
        settings = {**settings, "eod": ended[0]}
        alone = [tokens_of(session, [prompt], **settings)[0] for prompt in PROMPTS]
        lengths = {len(tokens) for samples in alone for tokens in samples}
        assert len(lengths) > 1, "some texts end before others"
        for batch_size in (1, 2, 4, 100):
            assert tokens_of(session, PROMPTS, batch_size=batch_size, **settings) == alone
        assert tokens_of(session, PROMPTS[::-1], **settings) == alone[::-1]


EXPORTED = {
    "gpt2": {},
    "llama": {**LLAMA, **GROUPED, "kv_channels": 6},
    # Transformers' slopes are of float32, which has those of a power of two heads as they are.
    "bloom": {**FAMILIES["bloom"], "hidden_size": 40, "num_attention_heads": 8},
}


@pytest.mark.parametrize("family", EXPORTED)
def test_tokens_and_logits_are_those_of_transformers_generate(tmp_path: Path, family: str) -> None:
    """Transformers has a cache of its own; it computes some parts in float32, in whose place torch's own stand here."""
    transformers = pytest.importorskip("transformers")
    config = small_config(init_method_std=0.3, max_position_embeddings=40, **EXPORTED[family])
    save_checkpoint(tmp_path / "run", run_config(config), vocab_size=VOCAB, tp=1)
    export_model(open_checkpoint(tmp_path / "run"), config, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float64, attn_implementation="eager"
    ).eval()
    for module in list(theirs.modules()):
        for key, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape, child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, key, norm)
            elif type(child).__name__ == "BloomGelu":
                setattr(module, key, nn.GELU(approximate="tanh"))
    session = load(tmp_path / "run", config)
    for prompt in SHORT:
        with patch.object(F, "softmax", lambda x, dim, dtype=None: x.softmax(dim)), torch.inference_mode():
            whole = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            # Those that generate returns are rounded to float32.
            expected = theirs(whole).logits[0, len(prompt) - 1 : -1]
        tokens = whole[0, len(prompt) :].tolist()
        assert len(tokens) == 20
        assert tokens_of(session, [prompt], max_new_tokens=20) == [[tokens]]
        cache = session.cache(1, 40)
        logits = [session.first_logits([prompt], cache)]
        logits += [session.more_logits([token], cache) for token in tokens[:-1]]
        torch.testing.assert_close(torch.cat(logits), expected, rtol=1e-10, atol=1e-10)
