"""Encodes fast: by gigatoken, where it returns the same ids as the tokenizer's own library.

gigatoken is some hundred times faster than `tokenizers` and ten times faster than `sentencepiece`, and a second
implementation, so it is trusted only where both agree:

* when a tokenizer is loaded both encode `PROBES`; where they differ on ASCII text the tokenizer's own library encodes
  everything, where they differ on other text it encodes all documents that are not ASCII;
* byte-level BPE separates letters from other characters by tables of Unicode, and the libraries' tables are of
  different years: lines with a character that one table may lack go to the tokenizer's own library;
* so do whole documents with text that gigatoken would read as a sign of a SentencePiece model;
* a SentencePiece model that normalises text is trusted with ASCII alone, and one whose user-defined symbols hold a
  space not at all.

A tokenizer.json may describe any steps, so the `tokenizers` library encodes by it.
"""

import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megazero.data.tokenizers import (
    END_OF_TEXT,
    Gpt2BpeTokenizer,
    JsonTokenizer,
    RankTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from megazero.errors import first_line

Ids = Sequence[int] | NDArray[Any]
# A text, or its UTF-8, whichever exists: gigatoken reads both, and conversion takes time.
Content = str | bytes
Encode = Callable[[Content], Ids]

# Letters and digits of Unicode 17, which came after the tables of `tokenizers` 0.23 and before those of gigatoken 0.10.
NEW_LETTERS = (
    "\u088f \u0c5c \u0cdc \ua7ce-\ua7cf \ua7d2 \ua7d4 \ua7f1 \U00010940-\U00010959 \U00010ec5-\U00010ec7"
    " \U00011db0-\U00011ddb \U00011de0-\U00011de9 \U00016ea0-\U00016eb8 \U00016ebb-\U00016ed3 \U00016ff2-\U00016ff6"
    " \U000187f8-\U000187ff \U00018d09-\U00018d1e \U00018d80-\U00018df2 \U0001e6c0-\U0001e6de \U0001e6e0-\U0001e6e2"
    " \U0001e6e4-\U0001e6e5 \U0001e6e7-\U0001e6ed \U0001e6f0-\U0001e6f4 \U0001e6fe-\U0001e6ff \U0002b73a-\U0002b73f"
    " \U0002cea2-\U0002cead \U000323b0-\U00033479"
)
# Blocks of pictures, where Unicode reserves every code for more of them: there will be no letter or digit here.
PICTURES = range(0x1F300, 0x1FB00)
# Planes with assigned characters, and those for private use; the others are empty.
ASSIGNED = (range(0x40000), range(0xE0000, 0xF0000))
PRIVATE = range(0xF0000, 0x110000)
ASCII = bytes(range(128))
# Positions where byte-level BPE always begins a new word: no word goes from a visible character to a line's end.
BEFORE_LINE_END = re.compile(r"(?<=[!-~])(?=\n)")
SPACE_PIECE = "\u2581"
# SentencePiece's own normalisers; of ASCII they change only single characters, which the probes contain.
NORMALISERS = ("nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf")
ASCII_PROBES = (
    "",
    " ",
    "".join(map(chr, range(128))),
    "It's what they're saying: we've said I'd do it, he'll 'SHOUT' DON'T ''s 't'll x'y'z",
    "a  b   c\t\td \n e\n\n\nf\r\n\r\ng \x0b\x0c h  ",
    "    def f(x_1, *args):\n\t\treturn {'key': [0x1F, 3.14e-10, 1_000_000]}  # ???!!!\n",
    "1 12 123 1234 12345678901234567890 3rd 4x4 v2.0.1",
    f"a{END_OF_TEXT}b {END_OF_TEXT}{END_OF_TEXT} <|endoftext |> <|endoftext",
    "a" * 3000 + " " * 3000 + "\n" * 300 + "ab" * 700,
    "https://example.org/path?a=1&b=%20#fragment user@host.name C:\\dir\\file.txt",
)
OTHER_PROBES = (
    "na\u00efve caf\u00e9 e\u0301 A\u030a \u00bd \u00b2 \u2167 \u2460 \ufb01 \u017f \u00df \u0130 \u2019s don\u2019t",
    "\u0660\u0661\u0662 \u0967\u0968 \u4e09\u5341 \uff11\uff12 \U0001d7ce \U0001f1e9\U0001f1ea",
    "\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000\u0085 x\u200b\u200d\ufeffy \u180e",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \u2764\ufe0f",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 \u0e20\u0e32\u0e29\u0e32",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\u2581\u2581a \u2581 b\u2581c",
    "\ue000\U000f0000\U0010ffff\ufffe\uffff\ufffd",
    " ".join(map(chr, range(0x80, 0x3100, 11))),
    "'".join(map(chr, [*range(0x3100, 0xD800, 397), *range(0x10000, 0x20000, 211), *range(0xE0000, 0x10FFFF, 9973)])),
)


class Encoder(NamedTuple):
    """The fastest encoder of a tokenizer.

    library: the library that encodes.  notice: the reason why it is not the fastest one, or not for all documents; ""
    if it is.
    """

    encode: Encode
    library: str
    notice: str = ""


def fastest_encoder(tokenizer: Tokenizer) -> Encoder:
    """Return the fastest encoder with the same ids as `tokenizer.encode`."""
    if isinstance(tokenizer, Gpt2BpeTokenizer):
        return _checked(tokenizer, "tokenizers", _byte_level)
    if isinstance(tokenizer, RankTokenizer):
        return _checked(tokenizer, "tokenizers", _ranked)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _checked(tokenizer, "sentencepiece", _sentence_pieces)
    if isinstance(tokenizer, JsonTokenizer):
        encode = tokenizer.encode
        return Encoder(lambda content: encode(content if isinstance(content, str) else content.decode()), "tokenizers")
    return Encoder(lambda content: np.frombuffer(_utf8(content), np.uint8), "bytes")


class _Fast(NamedTuple):
    """gigatoken's encoder of a tokenizer, and a test for the texts that it encodes the same.

    caution: the reason to trust it with ASCII alone, whatever the probes' result; "" when the probes decide.
    cut: a function that splits a text into parts that can be encoded one by one, or returns it whole if there are none.
    """

    encode: Encode
    trusts: Callable[[Content], bool]
    caution: str = ""
    cut: Callable[[str], list[str]] = lambda text: [text]


def _checked(tokenizer: Tokenizer, library: str, make: Callable[[Any, Any], _Fast]) -> Encoder:
    """Return an encoder that uses gigatoken where it agrees with `library`, the tokenizer's own."""

    def slow(content: Content) -> Ids:
        return tokenizer.encode(content if isinstance(content, str) else content.decode())

    try:
        import gigatoken

        fast = make(gigatoken.Tokenizer, tokenizer)
    except ImportError:
        return Encoder(slow, library, f"gigatoken is not installed: {library} encodes, much slower")
    except (AttributeError, RuntimeError, ValueError) as error:  # another interface, a model it does not support
        return Encoder(slow, library, f"{library} encodes, slower: {first_line(error)}")
    odd = next((probe for probe in ASCII_PROBES if _differs(fast, slow, probe)), None)
    if odd is not None:
        return Encoder(slow, library, f"gigatoken differs from {library} on {odd[:40]!r}: {library} encodes")
    odd = next((probe for probe in OTHER_PROBES if _differs(fast, slow, probe)), None)
    if odd is None and not fast.caution:
        return Encoder(_either(fast, slow), "gigatoken")
    reason = fast.caution or f"gigatoken differs from {library} on {(odd or '')[:20]!a}"
    notice = f"{reason}: {library} encodes documents that are not ASCII"
    trusts_ascii = fast.trusts
    ascii_alone = fast._replace(trusts=lambda content: content.isascii() and trusts_ascii(content))
    return Encoder(_either(ascii_alone, slow), "gigatoken", notice)


def _differs(fast: _Fast, slow: Encode, text: str) -> bool:
    return fast.trusts(text) and list(fast.encode(text)) != list(slow(text))


def _either(fast: _Fast, slow: Encode) -> Encode:
    trusts, encode = fast.trusts, fast.encode
    return lambda content: encode(content) if trusts(content) else _by_parts(fast, slow, content)


def _by_parts(fast: _Fast, slow: Encode, content: Content) -> Ids:
    """Encode a text in parts: by gigatoken if it is trusted with a part, else by the tokenizer's own library."""
    parts = fast.cut(content if isinstance(content, str) else content.decode())
    runs = groupby(parts, fast.trusts)
    found = ((fast.encode if trusted else slow)("".join(run)) for trusted, run in runs)
    return np.concatenate([np.asarray(ids, np.uint32) for ids in found])


def _byte_level(library: Any, tokenizer: Gpt2BpeTokenizer) -> _Fast:
    known = _KnownCharacters()
    return _Fast(
        library.from_json(tokenizer.description()).backend.encode,
        lambda content: content.isascii() or known.contain_all_of(content),
        cut=BEFORE_LINE_END.split,
    )


def _ranked(library: Any, tokenizer: RankTokenizer) -> _Fast:
    known = _KnownCharacters()

    def trusts(content: Content) -> bool:
        if tokenizer.cuts_blanks_at_end and not _ends_alike(content):
            return False
        return content.isascii() or known.contain_all_of(content)

    # Words of most styles go on to a line's end, so that a text is not cut there.
    return _Fast(library.from_json(tokenizer.description_without_end()).backend.encode, trusts)


def _ends_alike(content: Content) -> bool:
    """Return True unless a text, or a part of it before a special token, may end with a line's end and other blanks."""
    if isinstance(content, str):
        return "<|" not in content and (not content[-1:].isspace() or content[-1] in "\r\n")
    tail = content[-4:].decode(errors="ignore")
    return b"<|" not in content and (not tail[-1:].isspace() or tail[-1] in "\r\n")


def _sentence_pieces(library: Any, tokenizer: SentencePieceTokenizer) -> _Fast:
    symbols, normaliser = _facts(tokenizer.content)
    spaced = [symbol for symbol in symbols if " " in symbol.replace(SPACE_PIECE, " ")]
    if spaced:
        raise ValueError(f"the model has the user-defined symbol {spaced[0]!r}")
    if normaliser not in ("", *NORMALISERS):
        raise ValueError(f"the model normalises text by rules of its own, called {normaliser!r}")
    signs = [sign.encode() for sign in tokenizer.signs()]

    def trusts(content: Content) -> bool:
        utf8 = _utf8(content)
        return not any(sign in utf8 for sign in signs)

    return _Fast(
        library.from_sentencepiece(tokenizer.content).backend.encode,
        trusts,
        normaliser and f"the model normalises text ({normaliser})",
    )


def _facts(content: bytes) -> tuple[list[str], str]:
    """Return a SentencePiece model's user-defined symbols, and the name of its normaliser ("": none)."""
    messages: Any = import_module("sentencepiece.sentencepiece_model_pb2")  # its classes are made when it is imported
    model = messages.ModelProto.FromString(content)
    symbols = [piece.piece for piece in model.pieces if piece.type == piece.USER_DEFINED]
    normaliser = model.normalizer_spec
    return symbols, (normaliser.name or "?") if normaliser.precompiled_charsmap else ""


def _utf8(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.encode()


class _KnownCharacters:
    """A table of the characters of the same kind in every library: assigned in Python's tables, and not NEW_LETTERS."""

    def contain_all_of(self, content: Content) -> bool:
        """Return True if all characters of a text are known."""
        others = _utf8(content).translate(None, ASCII).decode()  # most characters are ASCII, and removed quickly
        return not self._unknown[np.frombuffer(others.encode("utf-32-le"), np.uint32)].any()

    @cached_property
    def _unknown(self) -> NDArray[np.bool_]:
        unknown = np.ones(sys.maxunicode + 1, bool)
        for plane in ASSIGNED:
            kinds = "".join(map(unicodedata.category, map(chr, plane)))  # two letters each
            unknown[plane.start : plane.stop] = np.frombuffer(kinds.encode(), "S2") == b"Cn"
        unknown[PRIVATE.start : PRIVATE.stop] = False
        unknown[PICTURES.start : PICTURES.stop] = False
        for part in NEW_LETTERS.split():
            unknown[ord(part[0]) : ord(part[-1]) + 1] = True
        return unknown
