"""Tests of rearranged samples against the documented rule in plain Python, and by putting the text together again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.token_files import byte_symbols

from megazero.data.fill_in import FillIn, FillInSamples
from megazero.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer

SIGNS = ["<|endoftext|>", "<pre>", "<mid>", "<suf>", "<pad>", "<file>"]
TEXTS = [
    "def f(x):\n    return x + 1\n",
    "naïve café: 3 €",
    "a",
    "import os\n\nprint(os.name)\n",
    "    # note\nx = 2\n",
]
LENGTH = 90


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer with a few merges: 256 bytes, the signs, and merged tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    merges = [("r", "e"), ("p", "r"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("pr", "i")]
    tokens = [*byte_symbols().values(), *SIGNS, *("".join(pair) for pair in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    lines = [" ".join(pair) for pair in merges]
    model = {"type": "BPE", "vocab": vocabulary, "merges": lines, "unk_token": None, "fuse_unk": False}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": vocabulary[sign], "content": sign, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for sign in SIGNS
    ]
    content: dict[str, Any] = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    content |= {"version": "1.0", "model": model, "pre_tokenizer": by_bytes, "decoder": by_bytes, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return load_tokenizer(TokenizerSpec("HuggingFaceTokenizer", tokenizer_model=str(folder)))


class Texts:
    """Samples of whole texts with an end behind each, and parts of a text with a sign between, up to LENGTH + 1."""

    seq_length = LENGTH

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def sample(self, k: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        eod, file = (self.tokenizer.token_id(name) for name in ("<|endoftext|>", "<file>"))
        row: list[int] = [eod or 0] * (k % 2)  # an empty document in front
        for number in range(k, k + 9):
            row += self.tokenizer.encode(TEXTS[number % len(TEXTS)])
            row += [file if number % 3 == 0 else eod]
        return np.array(row[: LENGTH + 1], np.int64)


def rule(tokenizer: Tokenizer, **changes: Any) -> FillIn:
    ids = [tokenizer.token_id(name) for name in SIGNS[:5]]
    eod, prefix, middle, suffix, padding = (number for number in ids if number is not None)
    signs = {"prefix": prefix, "middle": middle, "suffix": suffix, "padding": padding, "eod": eod}
    return replace(FillIn(rate=0.5, spm_rate=0.5, fragment_rate=0.5, no_prefix=None, **signs), **changes)


def expected(row: list[int], fim: FillIn, tokenizer: Tokenizer, key: tuple[int, int, int]) -> list[int]:
    """Return the rearranged row by the rule as it is documented, on lists."""
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    signs = {fim.prefix, fim.middle, fim.suffix, fim.padding, fim.eod, fim.split}

    def whole(tokens: list[int], rate: float) -> list[int]:
        if not random.random() < rate:
            return tokens
        text = tokenizer.decode([token for token in tokens if token not in signs])
        if fim.no_prefix is not None and text[: len(fim.no_prefix)] == fim.no_prefix:
            return tokens
        places = random.integers(0, len(text) + 1, size=2)
        low, high = int(min(places)), int(max(places))
        prefix, middle, suffix = (tokenizer.encode(part) for part in (text[:low], text[low:high], text[high:]))
        if random.random() < fim.spm_rate:
            return [fim.prefix, fim.suffix, *suffix, fim.middle, *prefix, *middle]
        return [fim.prefix, *prefix, fim.suffix, *suffix, fim.middle, *middle]

    def document(tokens: list[int]) -> list[int]:
        if fim.split is None or fim.split not in tokens:
            return whole(tokens, fim.rate)
        if not random.random() < fim.rate:
            return tokens
        out: list[int] = []
        for part, sign in parts(tokens, fim.split):
            out += (whole(part, fim.fragment_rate) if part else []) + sign
        return out

    made: list[int] = []
    for part, sign in parts(row, fim.eod):
        made += (document(part) if part else []) + sign
    return (made + [fim.padding] * len(row))[: len(row)]


def parts(tokens: list[int], sign: int) -> list[tuple[list[int], list[int]]]:
    """Return what lies between the tokens `sign`, each with the sign behind it, the last with none."""
    found: list[tuple[list[int], list[int]]] = [([], [])]
    for token in tokens:
        if token == sign:
            found[-1] = (found[-1][0], [sign])
            found.append(([], []))
        else:
            found[-1][0].append(token)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rate": 1.0, "spm_rate": 0.0},
        {"rate": 0.9, "split": 261, "fragment_rate": 0.7},
        {"rate": 1.0, "no_prefix": "    "},
        {"rate": 0.0},
    ],
)
def test_samples_are_what_the_rule_says(changes: dict[str, Any], tokenizer: Tokenizer) -> None:
    fim, source = rule(tokenizer, **changes), Texts(tokenizer)
    samples = FillInSamples(source, fim, tokenizer, seed=7, stream=2)
    rows = [source.sample(k).tolist() for k in range(40)]
    found = [samples.sample(k).tolist() for k in range(40)]
    assert found == [expected(row, fim, tokenizer, (7, 2, k)) for k, row in enumerate(rows)]
    changed = sum(a != b for a, b in zip(found, rows, strict=True))
    assert (changed > 30) == (fim.rate > 0) and samples.seq_length == LENGTH
    assert all(len(row) == LENGTH + 1 for row in found)
    assert [samples.sample(k).tolist() for k in (39, 3, 39)] == [found[k] for k in (39, 3, 39)], "in any order"
    others = [FillInSamples(source, fim, tokenizer, seed=seed, stream=stream) for seed, stream in ((7, 1), (8, 2))]
    for other in others if fim.rate else ():
        assert [other.sample(k).tolist() for k in range(40)] != found


def test_the_text_can_be_put_together_again(tokenizer: Tokenizer) -> None:
    """Of every document that was not cut off at the sample's end, prefix, middle and suffix are the text in order."""
    fim, source = rule(tokenizer, rate=1.0), Texts(tokenizer)
    samples = FillInSamples(source, fim, tokenizer, seed=1, stream=0)
    orders = {"psm": 0, "spm": 0}
    for k in range(200):
        before = [tokenizer.decode(part) for part, _ in parts(source.sample(k).tolist(), fim.eod)]
        for (part, sign), text in zip(parts(samples.sample(k).tolist(), fim.eod), before, strict=False):
            if not part or not sign:
                continue
            assert part[0] == fim.prefix
            if part[1] == fim.suffix:
                orders["spm"] += 1
                at = part.index(fim.middle)
                assert text.endswith(tokenizer.decode(part[2:at]))
                assert text == tokenizer.decode(part[at + 1 :]) + tokenizer.decode(part[2:at])
            else:
                orders["psm"] += 1
                second, third = part.index(fim.suffix), part.index(fim.middle)
                pieces = part[1:second], part[third + 1 :], part[second + 1 : third]
                assert text == "".join(map(tokenizer.decode, pieces))
    assert min(orders.values()) > 0.4 * sum(orders.values()) > 100, "half of them in each order"


def test_what_becomes_shorter_is_filled_with_padding(tokenizer: Tokenizer) -> None:
    """Two tokens of the bytes of one merged token become that token; three signs are added."""

    class Unmerged:
        seq_length = 19

        def sample(self, k: int) -> np.ndarray[Any, np.dtype[np.int64]]:
            return np.array([token for _ in range(10) for token in (*tokenizer.encode("r"), *tokenizer.encode("e"))])

    fim = rule(tokenizer, rate=1.0)
    row = FillInSamples(Unmerged(), fim, tokenizer, seed=0, stream=0).sample(0).tolist()
    assert len(row) == 20 and row[-3:] == [fim.padding] * 3 and fim.padding not in row[:12]


def test_names_of_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert [tokenizer.token_id(name) for name in ("<pre>", "<file>", "no such token")] == [257, 261, None]
    by_bytes = load_tokenizer(TokenizerSpec("ByteTokenizer"))
    assert (by_bytes.token_id("<|endoftext|>"), by_bytes.token_id("a")) == (256, None)
