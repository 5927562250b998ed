"""Tests token files against the format, and against Megatron-LM's own writer and reader where megatron.core is
installed.

The ids come from the `tokenizers` library, called here; the expected bytes are packed by tests/support from the
format's description, or written by Megatron's builder. The texts are the standard library's sources and documents made
to be awkward.
"""

import json
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.indexed_writing import add_nested
from support.token_files import index_bytes, token_bytes, write_corpus, write_gpt2_files
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from megazero.console import Console
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.tokenizers import TokenizerSpec
from megazero.prepare.tokens.indexed_writer import IndexedDatasetWriter
from megazero.prepare.tokens.preprocess import PreprocessRequest, preprocess

END = "<|endoftext|>"
# From every plane of Unicode: its first and last code points, some letters, and code points without a character.
PLANES = "".join(chr(plane << 16 | low) for plane in range(17) for low in (0, 1, 0x41, 0x2028, 0xFFFD, 0xFFFE, 0xFFFF))
NASTY = [
    "",
    "a",
    END,
    f"a{END}b",
    f" {END} ",
    END * 3,
    "<|endoftext|",
    "",
    "x" * 100_000,
    " " * 20_000,
    "\n" * 5_000,
    "\t \n" * 3_000 + "end",
    "é" * 3_000,
    "0123456789" * 2_000,
    PLANES,
    PLANES[::-1],
    "\0",
    "\ufeffwith a mark\r\nand\rlines\u2028of\u0085all\x0bkinds\x1c",
    "don't DON'T we'll'S 's ' '' \u2019s",
    "e\u0301 \u200d\U0001f469\u200d\U0001f680 \u0645\u0631\u062d\u0628\u0627 \u4f60\u597d",
    "\u00a0\u3000 a \u00a0 b\u3000",
    "letters of late: x\u088fy \u0c5c1 \ua7ce\U00010940 \U00016ebba \U000323b0",
    "",
]
SEQUENCES = [[[1, 2, 3]], [], [[4], [5, 6]], [[7] * 1000], [[119]], []]
PARTS = [SEQUENCES, [[[9]]], [[], [[8, 8]], []]]


class Files(NamedTuple):
    """Files of a byte-level BPE, and the tokenizer that the `tokenizers` library makes of them."""

    vocab: str
    merges: str
    tokenizer: Tokenizer


def library_texts(number: int = 40, most: int = 20_000) -> list[str]:
    """Return small sources of the standard library, the same ones in every run on one machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(folder.glob("*.py")) if path.stat().st_size < most]
    return [path.read_text(encoding="utf-8") for path in paths[:number]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=700, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(library_texts(12), trainer)
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    assert len(merges) > 400
    merges.append(("x", chr(0xE0)))  # joins x to the first byte of some letters, which shows what counts as a letter
    paths = write_gpt2_files(tmp_path_factory.mktemp("bpe"), merges)
    tokenizer = Tokenizer(BPE.from_file(*paths))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    return Files(*paths, tokenizer)


def expected(texts: Sequence[str], files: Files, *, append_eod: bool) -> list[list[list[int]]]:
    """Return the ids of every document as sequences, with no sequence for a document without ids."""
    eod = json.loads(Path(files.vocab).read_text(encoding="utf-8"))[END]
    assert files.tokenizer.encode(END).ids == [eod]
    ids = [files.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [[[*found, *([eod] if append_eod else [])]] if found else [] for found in ids]


def preprocessed(folder: Path, texts: Sequence[str], files: Files, *, append_eod: bool) -> str:
    """Preprocess the texts with megazero and return the prefix of the files."""
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    spec = TokenizerSpec("GPT2BPETokenizer", files.vocab, files.merges)
    request = PreprocessRequest((str(path),), str(folder / "ours"), spec, append_eod=append_eod)
    preprocess(request, Console(rank=0))
    return f"{folder}/ours_text_document"


def both(prefix: str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def joined(sequences: Sequence[Sequence[int]]) -> list[int]:
    return [token for sequence in sequences for token in sequence]


def sequences_of(documents: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    return [list(sequence) for document in documents for sequence in document]


TEXTS = pytest.mark.parametrize("texts", [library_texts(), NASTY], ids=["library", "nasty"])


@TEXTS
@pytest.mark.parametrize("append_eod", [True, False])
def test_files_are_those_of_the_format(tmp_path: Path, files: Files, texts: list[str], append_eod: bool) -> None:
    documents = expected(texts, files, append_eod=append_eod)
    prefix = preprocessed(tmp_path, texts, files, append_eod=append_eod)
    assert both(prefix) == (token_bytes(documents), index_bytes(documents))


@TEXTS
def test_the_reader_reads_what_the_format_says(tmp_path: Path, files: Files, texts: list[str]) -> None:
    documents = expected(texts, files, append_eod=True)
    dataset = IndexedDataset(write_corpus(tmp_path / "c", documents))
    assert [dataset.document(number).tolist() for number in range(len(texts))] == list(map(joined, documents))


@pytest.fixture(scope="module")
def megatron() -> Any:
    """Return Megatron's module of indexed datasets, imported without the many warnings of its imports."""
    with warnings.catch_warnings(action="ignore"):
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def by_megatron(megatron: Any, prefix: Path, documents: Sequence[Sequence[Sequence[int]]], kind: Any) -> str:
    """Write documents with Megatron's builder as its preprocessing does (all ids of a document, then the lengths of its
    sequences), and return the prefix.
    """
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=kind)
    for document in documents:
        builder.add_document(joined(document), [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@TEXTS
@pytest.mark.parametrize("append_eod", [True, False])
def test_the_same_bytes_as_megatron(
    tmp_path: Path, files: Files, texts: list[str], append_eod: bool, megatron: Any
) -> None:
    documents = expected(texts, files, append_eod=append_eod)
    theirs = by_megatron(megatron, tmp_path / "theirs", documents, np.uint16)
    assert both(preprocessed(tmp_path, texts, files, append_eod=append_eod)) == both(theirs)


@TEXTS
def test_each_reads_the_others_files(tmp_path: Path, files: Files, texts: list[str], megatron: Any) -> None:
    documents = expected(texts, files, append_eod=True)
    ours = megatron.IndexedDataset(preprocessed(tmp_path, texts, files, append_eod=True))
    sequences = sequences_of(documents)
    assert len(ours) == len(sequences)
    assert [ours[number].tolist() for number in range(len(ours))] == sequences
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    assert ours.document_indices.tolist() == ends and len(ends) == len(texts) + 1
    theirs = IndexedDataset(by_megatron(megatron, tmp_path / "theirs", documents, np.uint16))
    assert [theirs.sequence(number).tolist() for number in range(len(sequences))] == sequences
    assert theirs.num_documents == len(texts)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_every_type_of_token_is_written_as_megatron_does(tmp_path: Path, kind: Any, megatron: Any) -> None:
    theirs = by_megatron(megatron, tmp_path / "theirs", SEQUENCES, kind)
    with IndexedDatasetWriter(tmp_path / "ours", np.dtype(kind)) as writer:
        add_nested(writer, SEQUENCES)
    assert both(str(tmp_path / "ours")) == both(theirs)
    read = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [read[number].tolist() for number in range(len(read))] == sequences_of(SEQUENCES)


def test_files_put_together_as_megatron_does(tmp_path: Path, megatron: Any) -> None:
    """megazero's writer joins token files into the same bytes as the builder's add_index of Megatron."""
    prefixes = [write_corpus(tmp_path / str(number), documents) for number, documents in enumerate(PARTS)]
    builder = megatron.IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=np.uint16)
    with IndexedDatasetWriter(tmp_path / "ours", np.dtype(np.uint16)) as writer:
        for prefix in prefixes:
            builder.add_index(prefix)
            writer.append(IndexedDataset(prefix))
    builder.finalize(f"{tmp_path}/theirs.idx")
    assert both(f"{tmp_path}/ours") == both(f"{tmp_path}/theirs")
