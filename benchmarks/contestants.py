"""The systems that preprocess text in `corpora.py`: their commands, their output, and how it is compared."""

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
# How a system's output compares with megazero's; only the last one is an error.
SAME, OTHER_INDEX, OTHER_TOKENS = "same", "other .idx", "other tokens"
_ENCODERS = Path(__file__).resolve().with_name("encoders.py")
_BLOCK = 8 << 20
# Libraries that would take more threads get one, and none looks anything up on the network.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Files(NamedTuple):
    """The files that the systems read.

    folder: where commands run and write; text, part, one: the whole text, its front, one document; models:
    SentencePiece's, by kind; megatron: a checkout of Megatron-LM.
    """

    folder: Path
    text: Text
    part: Text
    one: Text
    vocab_file: Path
    merge_file: Path
    models: Mapping[str, Path]
    megatron: Path | None


class Measured(NamedTuple):
    """The figures of one turn.

    cpu, wall: seconds; peak: bytes; tokens: without ends of documents where nothing was written; digests: of the .bin
    and the .idx file, if they were written.
    """

    cpu: float
    wall: float
    peak: int
    tokens: int
    documents: int
    digests: tuple[str, ...] = ()

    def beside(self, base: "Measured") -> str:
        """Compare this output with the base's: SAME, OTHER_INDEX or OTHER_TOKENS.

        A system that encodes alone adds no ends of documents, so their number is added before tokens are compared.
        """
        if not self.digests:
            return SAME if self.tokens + self.documents == base.tokens else OTHER_TOKENS
        if self.digests[0] != base.digests[0]:
            return OTHER_TOKENS
        return SAME if self.digests == base.digests else OTHER_INDEX


@dataclass
class Contestant:
    """A command that preprocesses a text.

    kind: contestants of one kind must have the same output, that of the one with is_base.  words: those of the command,
    to which the text is added.  writes: the command has an output prefix, and its start-up is measured by a run of its
    own; otherwise it prints its seconds of CPU and wall time itself.
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
        """Run the command on one document as a warm-up, and if it writes, once more to measure its start-up."""
        for _ in range(2 if self.writes else 1):
            with self._place() as place:
                usage = self._run(self.files.one, place)
        if self.writes:
            self.first = usage

    def turn(self) -> None:
        """Run the command on its text and append the figures to `turns`."""
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
    """Return how many tokens a written corpus has, which follows from its size, and the digests of its two files."""
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
    """Return all contestants that can run on this machine, in the order of their turns."""
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
    """Return the command of a tool of Megatron-LM, or None where the tool is not there."""
    path = files.megatron and files.megatron / "tools" / tool
    return [sys.executable, str(path)] if path and path.is_file() else None


def _megatron(name: str, kind: str, words: list[str], text: Text, files: Files) -> Contestant:
    # Megatron-LM's own folder must come before an installed megatron-core.
    return Contestant(name, kind, words, text, files, environment={"PYTHONPATH": str(files.megatron)})


def train_pieces(text: Path, kind: str, pieces: int) -> Path:
    """Train a SentencePiece model by tools/train_tokenizer.py and return its path, beside the text.

    Raises CommandFailed.
    """
    model = text.with_name(f"{kind}.model")
    words = [sys.executable, str(TOOLS / "train_tokenizer.py"), "--input", str(text), "--model-type", kind]
    measure([*words, "--vocab-size", str(pieces), "--output", str(model)], model.parent, _ENVIRONMENT)
    return model


def name_gpt2(folder: Path, vocab_file: Path, merge_file: Path) -> None:
    """Make a folder `gpt2`, which Megatron-LM reads in its working folder, whatever tokenizer files it is given."""
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
    """Return the versions of the installed libraries that take part, by name."""
    found = {}
    for name in ("gigatoken", "tokenizers", "tiktoken", "sentencepiece", "orjson"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
