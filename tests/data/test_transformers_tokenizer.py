"""transformers, given the exported files, has the ids and the text of the tokenizer itself."""

import sysconfig
from pathlib import Path
from typing import Any

import pytest
from support.hugging_face_files import write_hugging_face_files
from support.token_files import write_gpt2_files, write_sentence_piece_model

from megazero.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from megazero.data.transformers_tokenizer import files_for_transformers
from megazero.errors import DataError

SOURCE = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
TEXTS = [
    *(SOURCE[:20_000], "", " a", "the  things\n\n\tare  ", "caf\u00e9 \u4f60\u597d \U0001f642\u200d", "\x00\ufeff"),
    *("<|endoftext", "a <mask >", "\u2581x"),
]


def sentence_piece(folder: Path, **options: Any) -> Tokenizer:
    model = write_sentence_piece_model(folder, SOURCE[:50_000], **options)
    return load_tokenizer(TokenizerSpec("SentencePieceTokenizer", tokenizer_model=model))


def gpt2(folder: Path) -> Tokenizer:
    vocab, merges = write_gpt2_files(folder, [("t", "h"), ("th", "e"), ("\u0120", "a"), ("i", "n")])
    return load_tokenizer(TokenizerSpec("GPT2BPETokenizer", vocab, merges))


def of_the_hub(folder: Path) -> Tokenizer:
    write_hugging_face_files(folder, "pieces")
    return load_tokenizer(TokenizerSpec("HuggingFaceTokenizer", tokenizer_model=str(folder)))


KINDS = {
    "bytes": lambda _: load_tokenizer(TokenizerSpec("ByteTokenizer")),
    "byte-level BPE": gpt2,
    "BPE": sentence_piece,
    "unigram": lambda folder: sentence_piece(folder, model_type="unigram"),
    "a prefix": lambda folder: sentence_piece(folder, add_dummy_prefix=True),
    "no end": lambda folder: sentence_piece(folder, eos_id=-1),
    "symbols": lambda folder: sentence_piece(folder, user_defined_symbols=["<x>", "=="], control_symbols=["<mask>"]),
    "normalised": lambda folder: sentence_piece(folder, normalization_rule_name="nfkc"),
    "of the hub": of_the_hub,
    "no bytes": lambda folder: sentence_piece(folder, byte_fallback=False, character_coverage=0.99),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_the_same(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")  # slow to import, so no other test waits for it
    tokenizer = KINDS[kind](tmp_path)
    for name, text in files_for_transformers(tokenizer, longest=32).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (len(loaded), loaded.eos_token_id, loaded.model_max_length) == (tokenizer.vocab_size, tokenizer.eod, 32)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert loaded.encode(text, add_special_tokens=False) == ids, text[:40]
        if kind != "no bytes":  # whose sign of unknown text is another text in either
            assert loaded.decode(ids) == tokenizer.decode(ids)
    ends = [*tokenizer.encode("a"), tokenizer.eod, *tokenizer.encode("a")]
    assert loaded.decode(ends, skip_special_tokens=True).replace(" ", "") == "aa"


def test_what_the_library_encodes_differently_is_refused(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path, normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    with pytest.raises(DataError, match=r"the tokenizer's '.*here.*there"):
        files_for_transformers(tokenizer, longest=32)
