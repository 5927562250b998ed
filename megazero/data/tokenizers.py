"""Converts text to ids and back, with thin adapters over the `tokenizers` and `sentencepiece` libraries.

Every tokenizer has an *end-of-document* id (eod), which preprocessing appends to a document on request.

    GPT2BPETokenizer         byte-level BPE from --vocab-file and --merge-file; eod is <|endoftext|>, and that literal
                             text inside a document becomes the id as well (as in Megatron-LM)
    SentencePieceTokenizer   --tokenizer-model; eod is the model's end-of-sentence piece; if it has none, a piece
                             called <|endoftext|>, <eod> or <EOD>; if it has none of these, one id more than the model
    ByteTokenizer            the 256 bytes of UTF-8; eod is 256
    HuggingFaceTokenizer     --tokenizer-model: a tokenizer.json, or a folder that has one; eod is the eos_token of
                             the tokenizer_config.json beside it, else a token called <|endoftext|>, </s> and so on;
                             signs that the file's template would put around a text are left out
    TikTokenizer             --tokenizer-model: a file of ranks (rank_files.py), whose words are cut as
                             --tiktoken-pattern names; eod is its </s>, <|endoftext|> or <|end_of_text|>
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from megazero.data.rank_files import AT_END, read_vocabulary, tokenizer_of, used_settings
from megazero.errors import DataError, Problem, first_line, raise_problems
from megazero.files import cannot_read, parse_json, read_bounded
from megazero.rules.files import JSON_FILE, TOKENIZER_FILES, tokenizer_file

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

GPT2_BPE = "GPT2BPETokenizer"
SENTENCE_PIECE = "SentencePieceTokenizer"
BYTE = "ByteTokenizer"
HUGGING_FACE = "HuggingFaceTokenizer"
TIKTOKEN = "TikTokenizer"
NUM_SPECIAL_TOKENS = 1000
# {type of tokenizer: names of the flags of the files it reads}
FILES = MappingProxyType(dict(TOKENIZER_FILES))

_MAX_FILE_BYTES = 64 << 20  # ten times what vocabularies of 250,000 tokens take

END_OF_TEXT = "<|endoftext|>"
OUTSIDE = "\ufffd"
EOD_PIECES = (END_OF_TEXT, "<eod>", "<EOD>")
# Names of the end of a document in tokenizers of Hugging Face's hub, whose configuration names none.
_EOD_TOKENS = (*EOD_PIECES, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """A tokenizer; ids are in [0, vocab_size), and eod is one of them."""

    @property
    def vocab_size(self) -> int:
        """The number of ids, eod included."""
        ...

    @property
    def eod(self) -> int:
        """The end-of-document id."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without any added id."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids: eod as <|endoftext|>, foreign ids and bytes that are no UTF-8 as U+FFFD."""
        ...

    def token_bytes(self) -> list[int]:
        """Return the UTF-8 bytes of text that every id stands for [vocab_size]; 0 for eod and other signs."""
        ...

    def token_id(self, name: str) -> int | None:
        """Return the id of the token of this name; None if there is none."""
        ...


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer's type and files, as the tokenizer flags set them; the last two are of TikTokenizer alone."""

    type: str
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = NUM_SPECIAL_TOKENS

    def files(self) -> dict[str, Path]:
        """Return the files this type reads, by field name; raises DataError for an unknown type or missing files."""
        raise_problems(DataError, self.problems())
        return {name: tokenizer_file(Path(getattr(self, name))) for name in FILES[self.type]}

    def problems(self) -> list[Problem]:
        """Return the problem of an unknown type, or of every file that is not given or missing."""
        if self.type not in FILES:
            return [Problem(f"--tokenizer-type {self.type}", "is a known tokenizer", ", ".join(FILES))]
        found = [_file_problem(self.type, name, getattr(self, name)) for name in FILES[self.type]]
        return [problem for problem in found if problem]

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file, in hexadecimal, and what else ids depend on, by field name."""
        content = {name: _content(path) for name, path in self.files().items()}
        digests = {name: hashlib.sha256(each).hexdigest() for name, each in content.items()}
        if self.type != TIKTOKEN:
            return digests
        beside = (self.tiktoken_pattern, self.tiktoken_num_special_tokens)
        return {**digests, **used_settings(content["tokenizer_model"], *beside)}

    @classmethod
    def recorded(cls, kind: str, paths: Mapping[str, Path], digests: Mapping[str, str]) -> "TokenizerSpec":
        """Return the tokenizer of a type whose `digests` were recorded, with its files at these paths."""
        number = digests.get("tiktoken_num_special_tokens", "")
        return cls(
            kind,
            **{name: str(path) for name, path in paths.items()},
            tiktoken_pattern=digests.get("tiktoken_pattern"),
            tiktoken_num_special_tokens=int(number) if number.isdecimal() else NUM_SPECIAL_TOKENS,
        )

    def paths(self) -> dict[str, str]:
        """Return the whole path of every file by field name, which is the same in any working directory."""
        return {name: str(path.resolve()) for name, path in self.files().items()}


def load_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Load the tokenizer of `spec`; raises DataError for an unknown type and for missing or damaged files."""
    files = spec.files()
    if spec.type == GPT2_BPE:
        return Gpt2BpeTokenizer(files["vocab_file"], files["merge_file"])
    if spec.type == SENTENCE_PIECE:
        return SentencePieceTokenizer(files["tokenizer_model"])
    if spec.type == HUGGING_FACE:
        return JsonTokenizer(files["tokenizer_model"])
    if spec.type == TIKTOKEN:
        return RankTokenizer(files["tokenizer_model"], spec.tiktoken_pattern, spec.tiktoken_num_special_tokens)
    return ByteTokenizer()


class ByteTokenizer:
    """A tokenizer with one id for each byte."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes."""
        return _decode_runs(self, ids, lambda run: bytes(run).decode(errors="replace"))

    def token_bytes(self) -> list[int]:
        """Return 1 for every byte, 0 for eod."""
        return [1] * self.eod + [0]

    def token_id(self, name: str) -> int | None:
        """Return eod for <|endoftext|>; bytes have no names."""
        return self.eod if name == END_OF_TEXT else None


class Gpt2BpeTokenizer:
    """A tokenizer by byte-level BPE, in GPT-2's two files."""

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        vocab = _read_vocab(vocab_file)
        merges = _read_merges(merge_file, vocab)
        self._tokenizer = HuggingFaceTokenizer(BPE(vocab, merges))
        self._tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = ByteLevelDecoder()
        self._tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
        self._vocab = vocab
        self.vocab_size = len(vocab)
        self.eod = vocab[END_OF_TEXT]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return _decode_runs(self, ids, self._tokenizer.decode)

    def description(self) -> str:
        """Return the whole tokenizer as one JSON text, in the library's own form (tokenizer.json)."""
        text: str = self._tokenizer.to_str()
        return text

    def token_bytes(self) -> list[int]:
        """Return the bytes of every token: each of its characters stands for one byte."""
        sizes = [0] * self.vocab_size
        for token, number in self._vocab.items():
            sizes[number] = 0 if number == self.eod else len(token)
        return sizes

    def token_id(self, name: str) -> int | None:
        """Return the id of the token of this name; None if there is none."""
        return self._vocab.get(name)


class SentencePieceTokenizer:
    """A tokenizer by a SentencePiece model of either kind (BPE, unigram)."""

    def __init__(self, model_file: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = SentencePieceProcessor()
        try:
            # Loaded from the bytes: the library prints to stderr when it opens a file it cannot read.
            self.content = read_bounded(model_file, _MAX_FILE_BYTES)
            self._model.LoadFromSerializedProto(self.content)
        except (RuntimeError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else "its content is something else"
            given, legal = f"--tokenizer-model {model_file}: {reason}", "a model that megazero train-tokenizer makes"
            raise DataError(Problem(given, "the file is a SentencePiece model", legal)) from error
        pieces = self._model.get_piece_size()
        self.eod = _sentence_piece_eod(self._model)
        self.vocab_size = max(pieces, self.eod + 1)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._model.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return _decode_runs(self, ids, self._model.decode)

    def signs(self) -> list[str]:
        """Return the pieces that stand for no text; their spelling in a document is plain text."""
        model = self._model
        numbers = range(model.get_piece_size())
        return [model.id_to_piece(number) for number in numbers if model.is_control(number) or model.is_unknown(number)]

    def token_bytes(self) -> list[int]:
        """Return the bytes of every piece; U+2581 in a piece is a space."""
        return [self._piece_bytes(number) for number in range(self.vocab_size)]

    def token_id(self, name: str) -> int | None:
        """Return the id of the piece of this name; None if there is none."""
        number: int = self._model.piece_to_id(name)
        return number if self._model.id_to_piece(number) == name else None

    def _piece_bytes(self, number: int) -> int:
        model = self._model
        if number == self.eod or model.is_control(number) or model.is_unknown(number) or model.is_unused(number):
            return 0
        return 1 if model.is_byte(number) else len(model.id_to_piece(number).replace("\u2581", " ").encode())


class JsonTokenizer:
    """A tokenizer of the `tokenizers` library, from its own description: a tokenizer.json."""

    def __init__(self, file: Path) -> None:
        given = f"--tokenizer-model {file}"
        try:
            self.content = _content(file).decode()
            self._tokenizer = HuggingFaceTokenizer.from_str(self.content)
        except Exception as error:  # the library raises this class itself
            reason = f"{given}: {first_line(error).partition(': ')[2] or 'its content is something else'}"
            raise DataError(Problem(reason, "the file is a tokenizer.json of Hugging Face's tokenizers")) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values()) + 1
        self.eod = self._find_eod(given, file.parent)

    def _find_eod(self, given: str, folder: Path) -> int:
        """Return the id of the configured end of a text, or of a token that is called so."""
        named = _configured_end(folder)
        names = _EOD_TOKENS if named is None else (named,)
        found = [self._vocab[name] for name in names if name in self._vocab]
        if not found:
            rule = (
                f"one token ends a document: the eos_token of tokenizer_config.json, or one of {', '.join(_EOD_TOKENS)}"
            )
            legal = '{"eos_token": "..."} as tokenizer_config.json beside the file'
            raise DataError(Problem(f"{given}: no token {named or 'of these names'}", rule, legal))
        return found[0]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return _decode_runs(self, ids, lambda run: self._tokenizer.decode(run, skip_special_tokens=False))

    def token_bytes(self) -> list[int]:
        """Return the bytes of every token; in byte-level tokenizers each of its characters stands for one."""
        by_bytes = '"ByteLevel"' in self.content
        sizes = [0] * self.vocab_size
        for token, number in self._vocab.items():
            sizes[number] = len(token) if by_bytes else _text_bytes(token)
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            sizes[number] = 0 if added.special or number == self.eod else len(added.content.encode())
        return sizes

    def token_id(self, name: str) -> int | None:
        """Return the id of the token of this name; None if there is none."""
        return self._vocab.get(name)


class RankTokenizer:
    """A tokenizer by a file of ranks, as tiktoken is."""

    def __init__(self, file: Path, style: str | None, num_special_tokens: int) -> None:
        vocabulary = read_vocabulary(file, _content(file), style, num_special_tokens)
        self._tokenizer = tokenizer_of(vocabulary, words=vocabulary.style.words)
        self._vocabulary = vocabulary
        self.cuts_blanks_at_end = AT_END in vocabulary.style.words
        self.vocab_size = vocabulary.size
        self.eod = vocabulary.eod

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; the name of a special token in it becomes that token's id."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return _decode_runs(self, ids, lambda run: self._tokenizer.decode(run, skip_special_tokens=False))

    def description(self) -> str:
        """Return the whole tokenizer as one JSON text, in the library's own form (tokenizer.json)."""
        text: str = self._tokenizer.to_str()
        return text

    def description_without_end(self) -> str:
        """Return the description of the same tokenizer without the word of blanks at a text's end."""
        words = [word for word in self._vocabulary.style.words if word != AT_END]
        text: str = tokenizer_of(self._vocabulary, words=words).to_str()
        return text

    def token_bytes(self) -> list[int]:
        """Return the bytes of every token, 0 for special tokens and ids that stand for nothing."""
        return [len(self._vocabulary.tokens.get(number, b"")) for number in range(self.vocab_size)]

    def token_id(self, name: str) -> int | None:
        """Return the id of the token of this name; None if there is none."""
        number: int | None = self._tokenizer.token_to_id(name)
        return number


def _text_bytes(token: str) -> int:
    """Return the bytes of text of a token: U+2581 is a space, <0x0A> a byte, ## in front is WordPiece's inside."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return 1
    return len(token.removeprefix("##").replace("\u2581", " ").encode())


def _configured_end(folder: Path) -> str | None:
    """Return the end-of-sequence token in the configuration beside a tokenizer.json; None if it names none."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = parse_json(_content(path).decode())
        except ValueError as error:
            raise DataError(Problem(str(path), f"is a JSON object: {error}")) from error
        token = content.get("eos_token") if isinstance(content, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _decode_runs(tokenizer: Tokenizer, ids: Sequence[int], decode_run: Callable[[list[int]], str]) -> str:
    """Decode the ids between eods and ids outside the vocabulary, and insert signs for those."""
    texts: list[str] = []
    run: list[int] = []
    for token in ids:
        if token != tokenizer.eod and 0 <= token < tokenizer.vocab_size:
            run.append(int(token))
            continue
        texts += [decode_run(run), END_OF_TEXT if token == tokenizer.eod else OUTSIDE]
        run = []
    return "".join([*texts, decode_run(run)])


def _sentence_piece_eod(model: "SentencePieceProcessor") -> int:
    if model.eos_id() >= 0:
        return int(model.eos_id())
    for piece in EOD_PIECES:
        token = int(model.piece_to_id(piece))
        if token >= 0 and model.id_to_piece(token) == piece:
            return token
    return int(model.get_piece_size())


def _file_problem(kind: str, name: str, path: str | None) -> Problem | None:
    flag = f"--{name.replace('_', '-')}"
    if path is None:
        return Problem(f"{flag} is missing", f"{kind} reads it", f"{flag} FILE")
    if not tokenizer_file(Path(path)).is_file():
        in_folder = f", or a folder with {JSON_FILE}" * (kind == HUGGING_FACE)
        return Problem(f"{flag} {path}", f"must be a file{in_folder}")
    return None


def _content(path: Path) -> bytes:
    try:
        return read_bounded(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise cannot_read(path, error) from error


def _read_vocab(path: Path) -> dict[str, int]:
    given = f"--vocab-file {path}"
    try:
        vocab = parse_json(_content(path).decode())
    except ValueError as error:
        raise DataError(Problem(given, f"is a JSON object from token to id: {error}")) from error
    if not isinstance(vocab, dict) or not all(type(token) is int for token in vocab.values()):
        raise DataError(Problem(given, "is a JSON object from token to id"))
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise DataError(
            Problem(f"{given}: {len(vocab)} tokens", "their ids are 0, 1, 2, ... without gap or repetition")
        )
    missing = [symbol for symbol in (*sorted(ByteLevel.alphabet()), END_OF_TEXT) if symbol not in vocab]
    if missing:
        shown = " ".join(missing[:5])
        rule = f"it has all 256 byte symbols and {END_OF_TEXT}, else text would be lost"
        raise DataError(Problem(f"{given}: no entry for {shown} ({len(missing)} in all)", rule))
    return vocab


def _read_merges(path: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    try:
        lines = _content(path).decode().split("\n")
    except ValueError as error:
        raise DataError(Problem(f"--merge-file {path}", f"is UTF-8 text: {error}")) from error
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if " " in right or not (left in vocab and right in vocab and left + right in vocab):
            rule = "a line is two tokens of the vocabulary whose concatenation is one as well"
            raise DataError(
                Problem(f"--merge-file {path}:{number}: {line[:80]}", rule, "the merges of this vocabulary")
            )
        merges.append((left, right))
    return merges
