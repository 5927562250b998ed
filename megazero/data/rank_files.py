r"""Reads files of ranks, which tiktoken encodes by, and names the ways in which text is cut into words before that.

A file of ranks lists byte strings, the tokens: of two neighbours in a word, those become one whose union has the lowest
rank, until no union is a token.  There are three forms: lines of base64 and rank, as OpenAI and Llama 3 publish them
(`.tiktoken`); a JSON list of {"rank", "token_bytes", "token_str"}, as Megatron-LM and NeMo read it; and Mistral's JSON
object (tekken.json), whose "vocab" is such a list, and whose "config" and "special_tokens" set how words are cut and
which special tokens come before the ranks.  The first two have neither; a *style* does:

    v1, v2      Megatron-LM's two, of JSON lists: special tokens come first, --tiktoken-num-special-tokens of them
    gpt2        GPT-2's and the like (r50k_base, p50k_base)
    cl100k      GPT-4's; one id is left free behind the ranks
    o200k       GPT-4o's, likewise
    llama3      Llama 3's: 256 special tokens behind the ranks
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from megazero.errors import DataError, Problem
from megazero.files import parse_json

LARGEST_JSON_VOCABULARY = 1 << 17  # Megatron-LM cuts a longer list there, special tokens included
_AS_PUBLISHED = "the file that its maker published"
_MISTRAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"{_LETTERS}{_UPPER}*{_LOWER}+", rf"{_LETTERS}{_UPPER}+{_LOWER}*")
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = (r"\s+(?!\S)", r"\s+")
AT_END = r"\s+\z"  # blanks at a text's end, whatever they are: the word that tiktoken's newer cl100k has more
_LLAMA = (_ENDINGS, rf"{_LETTERS}\p{{L}}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", *_SPACES)


@dataclass(frozen=True)
class Style:
    """A way to cut text into words, and the special tokens beside the ranks.

    words: the alternatives of the regular expression of a word; () for GPT-2's.  leads: True if special tokens come
    before the ranks.  specials: their names by place: from 0, or if they do not lead, from behind the ranks.  size: how
    many places there are; where special tokens lead, --tiktoken-num-special-tokens sets it.  eod: the place of the one
    that ends a document.
    """

    words: tuple[str, ...]
    specials: Mapping[int, str]
    eod: int
    size: int = 0
    leads: bool = False


def _megatron(*words: str) -> Style:
    return Style(words, dict(enumerate(("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"))), 2, leads=True)


def _llama() -> dict[int, str]:
    named = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>"}
    named[9] = "<|eot_id|>"
    free = [place for place in range(256) if place not in named]
    return named | {place: f"<|reserved_special_token_{number}|>" for number, place in enumerate(free)}


STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "v1": _megatron(rf"{_LETTERS}+\p{{L}}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]", *_SPACES),
        "v2": _megatron(*_CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", *_SPACES),
        "gpt2": Style(
            (),  # the library has these built in
            {0: "<|endoftext|>"},
            eod=0,
            size=1,
        ),
        "cl100k": Style(
            (*_LLAMA[:4], AT_END, *_LLAMA[4:]),
            {
                **{1: "<|endoftext|>", 2: "<|fim_prefix|>", 3: "<|fim_middle|>", 4: "<|fim_suffix|>"},
                20: "<|endofprompt|>",
            },
            eod=1,
            size=21,
        ),
        "o200k": Style(
            (
                *(f"{words}{_ENDINGS}?" for words in _CASED),
                *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", *_SPACES),
            ),
            {1: "<|endoftext|>", 20: "<|endofprompt|>"},
            eod=1,
            size=21,
        ),
        "llama3": Style(_LLAMA, _llama(), eod=1, size=256),
    }
)
OF_LISTS = tuple(name for name, style in STYLES.items() if style.leads)
OF_LINES = tuple(name for name, style in STYLES.items() if not style.leads)


@dataclass(frozen=True)
class RankVocabulary:
    """The tokens of a file of ranks in a style: bytes and special tokens by id, and the size of the vocabulary."""

    style: Style
    tokens: Mapping[int, bytes]
    specials: Mapping[int, str]
    size: int
    eod: int


def byte_characters() -> list[str]:
    """Return the character that byte-level BPE has for each byte: its own, or one of those beyond them, in order."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    beyond = iter(sorted(character for character in alphabet if ord(character) > 255))
    return [chr(byte) if chr(byte) in alphabet else next(beyond) for byte in range(256)]


def _is_list(content: bytes) -> bool:
    """Return True for a JSON list; base64 never begins like that."""
    return content.lstrip().startswith(b"[")


def _is_object(content: bytes) -> bool:
    return content.lstrip().startswith(b"{")


def used_settings(content: bytes, style: str | None, num_special_tokens: int) -> dict[str, str]:
    """Return the settings that ids depend on beside a file of ranks, by name; none where the file has all."""
    if _is_object(content):
        return {}
    number = {"tiktoken_num_special_tokens": str(num_special_tokens)} if _is_list(content) else {}
    return {"tiktoken_pattern": style or "v2", **number}


def read_vocabulary(path: Path, content: bytes, style: str | None, num_special_tokens: int) -> RankVocabulary:
    """Return the vocabulary of a file of ranks; raises DataError for a damaged one, or one of the style's other form.

    style: a name of STYLES; None is v2 for a JSON list, and right for a JSON object.  num_special_tokens: of v1 and v2.
    """
    given, in_list = f"--tokenizer-model {path}", _is_list(content)
    if _is_object(content):
        return _of_object(given, content, style)
    name = style or ("v2" if in_list else "")
    fitting = OF_LISTS if in_list else OF_LINES
    if name not in fitting:
        form = "a JSON list of tokens" if in_list else "lines of base64 and rank"
        rule = f"{form} is cut into words by one of {', '.join(fitting)}; the file does not name which"
        pattern = f"--tiktoken-pattern {name}" if name else "no --tiktoken-pattern"
        legal = ", ".join(f"--tiktoken-pattern {one}" for one in fitting)
        raise DataError(Problem(f"{pattern} with {given[2:]}", rule, legal))
    chosen = STYLES[name]
    tokens = _of_list(given, content) if in_list else _of_lines(given, content)
    if not chosen.leads:
        _check(given, tokens)
        specials = {len(tokens) + place: sign for place, sign in chosen.specials.items()}
        ids = dict(enumerate(tokens))
        return RankVocabulary(chosen, ids, specials, len(tokens) + chosen.size, len(tokens) + chosen.eod)
    if num_special_tokens < len(chosen.specials):
        rule = f"{', '.join(chosen.specials.values())} are among the special tokens"
        legal = f"--tiktoken-num-special-tokens {len(chosen.specials)}"
        raise DataError(Problem(f"--tiktoken-num-special-tokens {num_special_tokens}", rule, legal))
    return _with_leading(
        given, chosen, tokens[: max(LARGEST_JSON_VOCABULARY - num_special_tokens, 0)], num_special_tokens
    )


def _with_leading(given: str, style: Style, tokens: Sequence[bytes], number: int) -> RankVocabulary:
    """Return the vocabulary of these tokens behind `number` special ones."""
    _check(given, tokens)
    specials = {place: style.specials.get(place, f"<SPECIAL_{place}>") for place in range(number)}
    ids = {number + rank: token for rank, token in enumerate(tokens)}
    return RankVocabulary(style, ids, specials, number + len(tokens), style.eod)


def tokenizer_of(vocabulary: RankVocabulary, *, words: Sequence[str]) -> Tokenizer:
    """Return the vocabulary as a byte-level BPE of the `tokenizers` library, which gives the same ids as tiktoken.

    words: those of its style.
    """
    characters = dict(enumerate(byte_characters()))
    names = {number: token.decode("latin-1").translate(characters) for number, token in vocabulary.tokens.items()}
    ids = {name: number for number, name in names.items()}
    merges = [pair for name in names.values() for pair in _parts(name, ids)]
    signs = {sign: number for number, sign in vocabulary.specials.items()}
    # A word that is a token is one whatever its parts are, as in tiktoken.
    made = Tokenizer(models.BPE(ids | signs, merges, ignore_merges=True))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)
    cut = [pre_tokenizers.Split(Regex("|".join(words)), "isolated")] if words else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*cut, to_bytes]) if cut else to_bytes
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(sign, normalized=False) for sign in signs])
    return made


def _parts(name: str, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens whose union is this one, the pair of the lowest ranks first."""
    cuts = ((name[:cut], name[cut:]) for cut in range(1, len(name)))
    found = [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
    return sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _of_list(given: str, content: bytes) -> list[bytes]:
    rows = _parsed(given, content, "list of tokens")
    return [_entry(given, rank, row) for rank, row in enumerate(rows)]


def _parsed(given: str, content: bytes, form: str) -> Any:
    try:
        return parse_json(content.decode())
    except ValueError as error:
        raise DataError(Problem(given, f"is a JSON {form}: {error}")) from error


def _of_object(given: str, content: bytes, style: str | None) -> RankVocabulary:
    if style is not None:
        rule = "a JSON object of ranks sets itself how text is cut into words"
        raise DataError(Problem(f"--tiktoken-pattern {style} with {given[2:]}", rule, "no --tiktoken-pattern"))
    read = _parsed(given, content, "object of ranks")
    config, rows = (_part(given, read, key, kind) for key, kind in (("config", dict), ("vocab", list)))
    pattern = _part(given, config, "pattern", str)
    size, number = (_part(given, config, f"default_{key}", int) for key in ("vocab_size", "num_special_tokens"))
    try:
        Regex(pattern)
    except Exception as error:  # the library raises this class itself
        rule = f"its pattern is a regular expression: {error}"
        raise DataError(Problem(f"{given}: pattern {pattern[:60]}", rule, _AS_PUBLISHED)) from error
    # Files before Mistral's version 8 may leave out their special tokens, which were these.
    listed = _part(given, read, "special_tokens", list) if read.get("special_tokens") is not None else None
    specials = dict(enumerate(_MISTRAL)) if listed is None else dict(_sign(given, row) for row in listed)
    ends = [place for place, sign in specials.items() if sign == "</s>"]
    if not ends or max(specials) >= number or len({*specials.values()}) < len(specials):
        rule = f"its {number} special tokens have names of their own, and one is </s>, which ends a document"
        raise DataError(Problem(f"{given}: special_tokens {', '.join(specials.values())[:60]}", rule, _AS_PUBLISHED))
    if size - number > len(rows):
        rule = f"its {number} special tokens and {len(rows)} others make its vocabulary"
        raise DataError(Problem(f"{given}: default_vocab_size {size}", rule, _AS_PUBLISHED))
    tokens = [_entry(given, rank, row) for rank, row in enumerate(islice(rows, max(size - number, 0)))]
    return _with_leading(given, Style((pattern,), specials, ends[0], leads=True), tokens, number)


def _part(given: str, table: Any, key: str, kind: type) -> Any:
    """Return the value of a key of a JSON object; raises DataError if it is missing or of another kind."""
    value = table.get(key) if isinstance(table, dict) else None
    if type(value) is not kind:
        rule = 'is {"config": {"pattern", "default_vocab_size", "default_num_special_tokens"}, "vocab": [...]}'
        raise DataError(Problem(f"{given}: {key} {str(value)[:60]}", rule, _AS_PUBLISHED))
    return value


def _sign(given: str, row: Any) -> tuple[int, str]:
    return _part(given, row, "rank", int), _part(given, row, "token_str", str)


def _entry(given: str, rank: int, row: Any) -> bytes:
    if isinstance(row, dict) and row.get("rank") == rank and isinstance(row.get("token_bytes"), str):
        token = _decoded(row["token_bytes"])
        if token:
            return token
    rule = 'entry n is {"rank": n, "token_bytes": base64, "token_str": text}'
    raise DataError(Problem(f"{given}: entry {rank}: {str(row)[:60]}", rule, _AS_PUBLISHED))


def _of_lines(given: str, content: bytes) -> list[bytes]:
    lines = (line for line in content.splitlines() if line.strip())
    return [_line(given, number, line) for number, line in enumerate(lines)]


def _line(given: str, number: int, line: bytes) -> bytes:
    words = line.decode(errors="replace").split()
    token = _decoded(words[0]) if len(words) == 2 and words[1] == str(number) else b""
    if not token:
        rule = "line n, counted from 0, is a token in base64, a blank, and n"
        shown = line[:60].decode(errors="replace")
        raise DataError(Problem(f"{given}: line {number}: {shown}", rule, _AS_PUBLISHED))
    return token


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _check(given: str, tokens: Sequence[bytes]) -> None:
    """Raise DataError unless every token is there once, and every byte is one."""
    known = set(tokens)
    problems = [*_twice(tokens)] if len(known) < len(tokens) else []
    problems += [f"byte {byte} is no token" for byte in range(256) if bytes([byte]) not in known]
    if problems:
        rule = "tokens differ, and every byte is one of them, else text would be lost"
        raise DataError(Problem(f"{given}: {problems[0]} ({len(problems)} in all)", rule))


def _twice(tokens: Sequence[bytes]) -> Iterator[str]:
    seen: set[bytes] = set()
    for token in tokens:
        if token in seen:
            yield f"{token!r} is there twice"
        seen.add(token)
