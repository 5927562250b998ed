"""Who preprocesses in `corpora.py`: the commands, what comes out of them, and how that is compared."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from corpus_text import Text
from usage import Usage, measure

from megazero.data.indexed_dataset import HEADER, INTEGER_TYPES

TOOLS = Path(__file__).resolve().parents[1] / "tools"
# What came out beside megazero's: the last is wrong.
SAME, OTHER_INDEX, OTHER_TOKENS = "same", "other .idx", "other tokens"
_ENCODERS = Path(__file__).resolve().with_name("encoders.py")
_BLOCK = 8 << 20
# One thread wherever a library would take more; nothing is looked up in the net.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Files(NamedTuple):
    """What everybody reads.  folder: where commands run and write; models: SentencePiece's, by kind."""

    folder: Path
    text: Text
    part: Text
    one: Text
    vocab_file: Path
    merge_file: Path
    models: Mapping[str, Path]
    megatron: Path | None


class Measured(NamedTuple):
    """A turn.  tokens: without ends of documents where nothing was written; digests: of .bin and .idx, if written."""

    cpu: float
    wall: float
    peak: int
    tokens: int
    documents: int
    digests: tuple[str, ...] = ()

    def beside(self, base: "Measured") -> str:
        """Whether the same came out of the same text; whoever encodes alone adds no ends of documents."""
        if not self.digests:
            return SAME if self.tokens + self.documents == base.tokens else OTHER_TOKENS
        if self.digests[0] != base.digests[0]:
            return OTHER_TOKENS
        return SAME if self.digests == base.digests else OTHER_INDEX


@dataclass
class Contestant:
    """A command on a text.

    kind: results of the same kind must be the same; is_base: with this one's.  words: of the command, to which the
    text is added; writes: has an output prefix, and so a start-up of its own; otherwise it prints its own seconds.
    """

    name: str
    kind: str
    words: list[str]
    text: Text
    files: Files
    writes: bool = True
    is_base: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    first: Usage | None = None
    turns: list[Measured] = field(default_factory=list)
    refused: str = ""

    def start(self) -> None:
        """On one document, to be warm, and once more for what starting takes."""
        for _ in range(2 if self.writes else 1):
            with self._place() as place:
                usage = self._run(self.files.one, place)
        if self.writes:
            self.first = usage

    def turn(self) -> None:
        """On its text."""
        with self._place() as place:
            usage = self._run(self.text, place)
            cpu, wall, digests = usage.cpu, usage.wall, ()
            if self.writes:
                tokens, digests = _written(Path(place))
            else:
                said = json.loads(usage.said.strip().splitlines()[-1])
                cpu, wall, tokens = said["cpu"], said["wall"], said["tokens"]
        self.turns.append(Measured(cpu, wall, usage.peak, tokens, self.text.documents, digests))

    def _place(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(dir=self.files.folder)

    def _run(self, text: Text, place: str) -> Usage:
        words = [*self.words, "--input", str(text.path)]
        if self.writes:
            words += ["--output-prefix", str(Path(place, "out")), "--append-eod"]
        return measure(words, self.files.folder, {**_ENVIRONMENT, **self.environment})


def _written(place: Path) -> tuple[int, tuple[str, ...]]:
    """How many tokens a corpus has, by its size, and digests of its two files."""
    data, index = (place / f"out_text_document{ending}" for ending in (".bin", ".idx"))
    code = HEADER.unpack(index.read_bytes()[: HEADER.size])[2]
    return data.stat().st_size // np.dtype(INTEGER_TYPES[code]).itemsize, (_digest(data), _digest(index))


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def line_up(files: Files, workers: int) -> list[Contestant]:
    """All that can run here, in the order of their turns."""
    return [*_bpe(files, workers), *_pieces(files)]


def _bpe(files: Files, workers: int) -> Iterator[Contestant]:
    bpe = ["--vocab-file", str(files.vocab_file), "--merge-file", str(files.merge_file)]
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", *bpe]
    for number in sorted({1, 2, workers}):
        name = f"megazero, {number} worker{'s' * (number > 1)}"
        yield Contestant(name, "text", _ours(tokenizer, number), files.text, files, is_base=number == 1)
    alone = [sys.executable, str(_ENCODERS)]
    if find_spec("gigatoken"):
        words = [*alone, "gigatoken", *bpe]
        yield Contestant("gigatoken alone", "text", words, files.text, files, writes=False)
        read = [*words, "--count-reading"]
        yield Contestant("gigatoken alone, read", "text", read, files.text, files, writes=False)
    if (fast := _theirs(files, "preprocess_data_fast.py")) is not None:
        words = [*fast, *tokenizer, "--use-gigatoken"]
        yield _megatron("Megatron-LM, gigatoken", "text", words, files.text, files)
        yield _megatron("Megatron-LM, gigatoken, front", "part", words, files.part, files)
    yield Contestant("megazero, front", "part", _ours(tokenizer, 1), files.part, files, is_base=True)
    for library in ("tiktoken", "tokenizers"):
        if find_spec(library):
            yield Contestant(f"{library} alone", "part", [*alone, library, *bpe], files.part, files, writes=False)
    if (slow := _theirs(files, "preprocess_data.py")) is not None:
        yield _megatron("Megatron-LM", "part", [*slow, *tokenizer, "--workers", "1"], files.part, files)


def _pieces(files: Files) -> Iterator[Contestant]:
    for kind, model in files.models.items():
        name = {"bpe": "BPE", "unigram": "unigram"}[kind]
        tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]
        ours = _ours(tokenizer, 1)
        yield Contestant(f"megazero, SentencePiece {name}", kind, ours, files.part, files, is_base=True)
        if (slow := _theirs(files, "preprocess_data.py")) is not None:
            words = [*slow, *tokenizer, "--workers", "1"]
            yield _megatron(f"Megatron-LM, SentencePiece {name}", kind, words, files.part, files)


def _ours(tokenizer: list[str], workers: int) -> list[str]:
    return [sys.executable, str(TOOLS / "preprocess_data.py"), *tokenizer, "--workers", str(workers)]


def _theirs(files: Files, tool: str) -> list[str] | None:
    """Megatron-LM's tool, where there is one."""
    path = files.megatron and files.megatron / "tools" / tool
    return [sys.executable, str(path)] if path and path.is_file() else None


def _megatron(name: str, kind: str, words: list[str], text: Text, files: Files) -> Contestant:
    # Its own folder comes before an installed megatron-core.
    return Contestant(name, kind, words, text, files, environment={"PYTHONPATH": str(files.megatron)})


def train_pieces(text: Path, kind: str, pieces: int) -> Path:
    """A SentencePiece model, beside the text, by tools/train_tokenizer.py; raises CommandFailed."""
    model = text.with_name(f"{kind}.model")
    words = [sys.executable, str(TOOLS / "train_tokenizer.py"), "--input", str(text), "--model-type", kind]
    measure([*words, "--vocab-size", str(pieces), "--output", str(model)], model.parent, _ENVIRONMENT)
    return model


def name_gpt2(folder: Path, vocab_file: Path, merge_file: Path) -> None:
    """A folder `gpt2`, which Megatron-LM wants to find where it runs, whatever files it is told."""
    place = folder / "gpt2"
    place.mkdir()
    shutil.copy(vocab_file, place / "vocab.json")
    shutil.copy(merge_file, place / "merges.txt")
    (place / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    signs = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    (place / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2TokenizerFast", **signs}), encoding="utf-8"
    )


def versions() -> dict[str, str]:
    """Of the libraries that have a part in it."""
    found = {}
    for name in ("gigatoken", "tokenizers", "tiktoken", "sentencepiece", "orjson"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
