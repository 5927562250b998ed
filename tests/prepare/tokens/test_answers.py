"""Dialogues become tokens and a mask of the same shape, in which the answers' tokens alone have a 1."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.commands.preprocess import document_rules, parse_arguments
from megazero.console import Console
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import load_sidecar, loss_mask_prefix, sidecar_path
from megazero.data.tokenizers import TokenizerSpec
from megazero.errors import ConfigError, DataError
from megazero.prepare.text.chunks import DocumentRules, Shard
from megazero.prepare.tokens.array_shards import find_prefixes
from megazero.prepare.tokens.merge import merge, open_inputs
from megazero.prepare.tokens.preprocess import PreprocessRequest, preprocess

pytestmark = pytest.mark.pure
END = 256
PAIR = DocumentRules(json_keys=("q", "a"), answers="pair")
CHAT = DocumentRules(json_keys=("messages",), answers="chat")
# Prompt and answer: either may be empty, and text need not be ASCII.
PAIRS = [("2+2?", "4"), ("", "alone"), ("none", ""), ("", ""), ("caf\u00e9", "\u00e9!"), ("long", "x" * 40)]
TALK = [("system", "be brief"), ("user", "hi"), ("assistant", "h\u00f6"), ("user", "bye"), ("assistant", "ok")]


def make(folder: Path, lines: Sequence[dict[str, Any]], rules: DocumentRules, **options: Any) -> str:
    """Preprocess the lines as bytes, and return the corpus's prefix."""
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    request = PreprocessRequest(
        (str(source),), str(folder / "out"), **{"tokenizer": TokenizerSpec("ByteTokenizer"), "rules": rules, **options}
    )
    return preprocess(request, Console(rank=0)).corpora[0].prefix


def documents(prefix: str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(index).tolist() for index in range(dataset.num_documents)]


def pairs() -> list[dict[str, Any]]:
    return [{"q": question, "a": answer, "id": 1} for question, answer in PAIRS]


@pytest.mark.parametrize("ends", [False, True])
def test_prompts_and_answers(tmp_path: Path, ends: bool) -> None:
    prefix = make(tmp_path, pairs(), PAIR, append_eod=ends)
    assert prefix == str(tmp_path / "out_a_document")
    tokens, mask = documents(prefix), documents(loss_mask_prefix(prefix))
    for index, (question, answer) in enumerate(PAIRS):
        last = [END] if ends and question + answer else []
        assert tokens[index] == [*question.encode(), *answer.encode(), *last]
        assert mask[index] == [0] * len(question.encode()) + [1] * (len(answer.encode()) + len(last))
    assert IndexedDataset(loss_mask_prefix(prefix)).dtype == np.uint8
    assert load_sidecar(sidecar_path(prefix)).loss_mask
    assert not sidecar_path(loss_mask_prefix(prefix)).exists()


def test_messages_are_chatml_and_the_assistants_are_answers(tmp_path: Path) -> None:
    talks = [TALK, TALK[:2], []]
    lines = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    prefix = make(tmp_path, lines, CHAT, append_eod=True)
    tokens, mask = documents(prefix), documents(loss_mask_prefix(prefix))
    whole = "\n".join(f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in TALK)
    assert bytes(tokens[0][:-1]).decode() == whole and tokens[0][-1] == END
    learnt = bytes(token for token, is_learnt in zip(tokens[0][:-1], mask[0], strict=False) if is_learnt)
    assert learnt.decode() == "h\u00f6<|im_end|>ok<|im_end|>" and mask[0][-1] == 1
    assert not any(mask[1]), "no answer, so that its end is not learnt either"
    assert len(mask[1]) == len(tokens[1]) > 0
    assert tokens[2] == mask[2] == []


def test_shards_workers_and_pieces_make_the_same_mask(tmp_path: Path) -> None:
    """The mask is cut where the tokens are, and merged with them."""
    options: dict[str, Any] = {"append_eod": True, "split_documents": 7}
    (tmp_path / "whole").mkdir()
    whole = make(tmp_path / "whole", pairs(), PAIR, **options)
    for index in range(2):
        make(tmp_path, pairs(), PAIR, **options, shard=Shard(index, 2), workers=2 - index)
    parts = open_inputs(find_prefixes([str(tmp_path)]), str(tmp_path / "merged"))
    assert len(parts) == 2, "masks are no corpora of their own"
    merge(parts, str(tmp_path / "merged"), lambda _: None)
    for name in (lambda prefix: prefix, loss_mask_prefix):
        for ending in ("bin", "idx"):
            found, expected = (Path(f"{name(prefix)}.{ending}").read_bytes() for prefix in (tmp_path / "merged", whole))
            assert found == expected
    lengths = [IndexedDataset(name).sequence_lengths(0, 9).tolist() for name in (whole, loss_mask_prefix(whole))]
    assert lengths[0] == lengths[1] and max(lengths[0]) == 7


def test_a_plain_corpus_of_the_same_name_has_no_mask(tmp_path: Path) -> None:
    prefix = make(tmp_path, pairs(), PAIR)
    assert make(tmp_path, pairs(), DocumentRules(json_keys=("a",))) == prefix
    assert not list(tmp_path.glob("*loss_mask*")) and not load_sidecar(sidecar_path(prefix)).loss_mask


@pytest.mark.parametrize(
    ("lines", "rules", "message"),
    [
        ([{"q": "why", "a": ""}], PAIR, "without any answer"),
        ([{"q": "", "a": ""}], PAIR, "without any token"),
        ([{"q": "why"}], PAIR, "has the key 'a'"),
        ([{"messages": "hi"}], CHAT, "a list of messages"),
        ([{"messages": [{"role": "user"}]}], CHAT, "has the key 'content'"),
        ([{"talk": []}], CHAT, "has the key 'messages'"),
        ([{"a": ""}], DocumentRules(json_keys=("a", "a"), answers="pair"), "keys of their own"),
    ],
    ids=str,
)
def test_input_without_answers_is_refused(
    tmp_path: Path, lines: list[dict[str, Any]], rules: DocumentRules, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        make(tmp_path, lines, rules)
    assert not list(tmp_path.glob("out*"))


def test_flags() -> None:
    def rules(*words: str) -> DocumentRules:
        fixed = ["--input", "x.jsonl", "--output-prefix", "o", "--tokenizer-type", "ByteTokenizer"]
        return document_rules(parse_arguments([*fixed, *words]))

    assert rules() == DocumentRules()
    assert rules("--prompt-key", "q", "--answer-key", "a") == PAIR
    assert rules("--chat-key", "messages") == CHAT
    for words in (
        ("--prompt-key", "q"),
        ("--answer-key", "a"),
        ("--prompt-key", "q", "--answer-key", "a", "--chat-key", "m"),
        ("--chat-key", "m", "--json-keys", "t"),
    ):
        with pytest.raises(ConfigError, match=words[0]):
            rules(*words)
