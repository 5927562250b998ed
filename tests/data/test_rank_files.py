"""Tests tokenizers by files of ranks: ids beside tiktoken's and Megatron-LM's own, special tokens, damaged files."""

import ast
import base64
import json
import re
from collections import Counter
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.commands.preprocess import main as preprocess
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.rank_files import STYLES
from megazero.data.sidecar import load_sidecar, recorded_tokenizer
from megazero.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from megazero.data.transformers_tokenizer import files_for_transformers
from megazero.errors import DataError
from megazero.prepare.tokens.encoders import fastest_encoder

TEXT = (
    "The thing's that they'll TELL us in 2024, isn't it?\r\n  Straße, naïve; Été: русский 中文中文 123\n\n\tif(x){}//\n"
    "a banana's bandana, Ananas; ababab bababa aabbab, thinking through everything together again\n"
)
MIXED = "aB1'/!\n\r s"
TEXTS = (
    "",
    " ",
    "a\n\n b \r\n\t",
    "don't WE'LL I'Mx",
    "3.14159 \uff11\uff12 ² x1",
    "CamelCASE ßẞ ǅ e\u0301\u0301 שלום ไทย",
    "?!\n/ //\n!/\n\r/ a!\r\n/s",
    "qzx qzxa aqzx",
    "a\n ",
    "a\r\t\u3000",
    "a \n",
    "".join(one + other for one in MIXED for other in MIXED),
    TEXT,
)
SPECIAL = 9


@cache
def ranks() -> tuple[bytes, ...]:
    """Return tokens by rank: the bytes, 60 unions of frequent neighbours, as training finds them, and others."""
    words = [[bytes([byte]) for byte in word.encode()] for word in re.findall(r"\s?\w+|\W", TEXT)]
    tokens = [bytes([byte]) for byte in range(256)]
    for _ in range(60):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        first, second = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(first + second)
        for word in words:
            for place in range(len(word) - 2, -1, -1):
                if word[place : place + 2] == [first, second]:
                    word[place : place + 2] = [first + second]
    # Unions over the ends of words, which only a right cut keeps from being used, and one that no merge leads to.
    across = (f"{one}{other}".encode() for one in MIXED for other in MIXED)
    tokens += [union for union in across if union not in tokens]
    return (*tokens, b"qzx")


def write_list(path: Path, tokens: tuple[bytes, ...] | None = None) -> str:
    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(tokens or ranks())
    ]
    path.write_text(json.dumps(rows))
    return str(path)


def write_lines(path: Path) -> str:
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks())))
    return str(path)


def write_object(path: Path, signs: tuple[tuple[int, str], ...] | None, **changes: Any) -> str:
    """Write Mistral's form: `SPECIAL` special tokens, and at the end of the list two tokens beyond the vocabulary."""
    rows = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(ranks())]
    beyond = [{"rank": len(rows) + more, "token_bytes": "enp6"} for more in range(2)]
    config = {
        "pattern": "|".join(STYLES["v2"].words),
        "default_vocab_size": len(rows) + SPECIAL,
        "default_num_special_tokens": SPECIAL,
        "version": "v11",
    }
    content = {"config": {**config, **changes}, "vocab": [*rows, *beyond]}
    if signs is not None:
        content["special_tokens"] = [{"rank": place, "token_str": sign, "is_control": True} for place, sign in signs]
    path.write_text(json.dumps(content))
    return str(path)


def made(style: str, folder: Path) -> Tokenizer:
    if style in ("v1", "v2"):
        model = write_list(folder / "vocab.json")
        return load_tokenizer(TokenizerSpec("TikTokenizer", None, None, model, style, SPECIAL))
    return load_tokenizer(TokenizerSpec("TikTokenizer", None, None, write_lines(folder / "x.tiktoken"), style))


def megatrons(style: str) -> Any:
    """Return tiktoken's encoding as Megatron-LM makes it, whose constants are read without a start of the package."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    package = find_spec("megatron.core") if find_spec("megatron") else None
    if package is None or not package.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    place = Path(package.submodule_search_locations[0], "tokenizers", "text", "libraries", "tiktoken_tokenizer.py")
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(place.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and "T" in node.targets[0].id
        if isinstance(node.value, ast.Constant | ast.List) and node.targets[0].id != "__all__"
    }
    names = constants["SPECIAL_TOKENS"]
    names += [constants["SPECIAL_TOKEN_TEMPLATE"].format(id=number) for number in range(len(names), SPECIAL)]
    return tiktoken.Encoding(
        "test",
        pat_str=constants[f"_PATTERN_TIKTOKEN_{style.upper()}"],
        mergeable_ranks={token: SPECIAL + rank for rank, token in enumerate(ranks())},
        special_tokens={name: number for number, name in enumerate(names)},
    )


@pytest.mark.parametrize("style", ["v1", "v2"])
def test_a_list_gives_megatrons_ids(style: str, tmp_path: Path) -> None:
    ours, theirs = made(style, tmp_path), megatrons(style)
    assert (ours.vocab_size, ours.eod) == (theirs.n_vocab, theirs.encode_single_token("</s>"))
    for text in (*TEXTS, "a</s>b<SPECIAL_8> <s>"):
        assert ours.encode(text) == theirs.encode(text, allowed_special="all"), text


def openais(style: str, special: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return tiktoken's encoding of this style with the ranks of these tests."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    public = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: {token: n for n, token in enumerate(ranks())})
    names = {"gpt2": "r50k_base", "llama3": "cl100k_base"}  # Llama 3's words are GPT-4's, but for blanks at the end
    encoding = getattr(public, names.get(style, f"{style}_base"))()
    if style == "llama3":
        encoding["pat_str"] = encoding["pat_str"].replace(r"|\s++$", "")
    return tiktoken.Encoding(
        "test", pat_str=encoding["pat_str"], mergeable_ranks=encoding["mergeable_ranks"], special_tokens=special
    )


@pytest.mark.parametrize("style", ["gpt2", "cl100k", "o200k", "llama3"])
def test_lines_give_tiktokens_ids(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = made(style, tmp_path)
    sign = STYLES[style].specials[STYLES[style].eod]
    theirs = openais(style, {sign: ours.eod}, monkeypatch)

    @settings(max_examples=60, deadline=None)
    @given(text=st.text(max_size=30) | st.text("the in'llTELL1 2\r\n/?é中", max_size=50))
    def same(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text, disallowed_special=())

    for text in (*TEXTS, f"a\n {sign}b"):
        assert ours.encode(text) == theirs.encode(text, allowed_special="all"), text
    same()


def plain(word: bytes) -> list[int]:
    """Return the ranks of a word by the rule: the union of the lowest rank first, the leftmost of equals."""
    known = {token: rank for rank, token in enumerate(ranks())}
    parts = [bytes([byte]) for byte in word]
    if word in known:
        return [known[word]]
    while True:
        unions = [known.get(one + other, len(known)) for one, other in pairwise(parts)]
        if not unions or min(unions) == len(known):
            return [known[part] for part in parts]
        place = unions.index(min(unions))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.fixture(scope="module")
def by_lines(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made("gpt2", tmp_path_factory.mktemp("gpt2"))


@settings(max_examples=60, deadline=None)
@given(word=st.text("thingsTELayé中", min_size=1, max_size=12))
def test_ids_follow_the_ranks_without_any_library(by_lines: Tokenizer, word: str) -> None:
    assert by_lines.encode(word) == plain(word.encode())


@pytest.mark.parametrize("pattern", ["|".join(STYLES["v2"].words), r"\s?\p{L}+|\s?\p{N}|[^\s\p{L}\p{N}]+|\s+"])
def test_an_object_gives_tiktokens_ids_behind_its_special_tokens(pattern: str, tmp_path: Path) -> None:
    """As Mistral's own library has it: their number is added to the ids of an encoding without special tokens."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    signs = ((1, "<s>"), (0, "<unk>"), (5, "</s>"), (2, "[INST]"))
    model = write_object(tmp_path / "tekken.json", signs, pattern=pattern)
    spec = TokenizerSpec("TikTokenizer", tokenizer_model=model)
    ours = load_tokenizer(spec)
    theirs = tiktoken.Encoding(
        "test", pat_str=pattern, mergeable_ranks={token: n for n, token in enumerate(ranks())}, special_tokens={}
    )
    sizes, encode = ours.token_bytes(), fastest_encoder(ours).encode
    assert (ours.vocab_size, ours.eod, sizes[:SPECIAL]) == (len(ranks()) + SPECIAL, 5, [0] * SPECIAL)
    for text in TEXTS:
        ids = [SPECIAL + number for number in theirs.encode(text)]
        assert ours.encode(text) == ids == list(encode(text)) and ours.decode(ids) == text
    assert ours.encode("[INST]a</s><SPECIAL_8>") == [2, SPECIAL + theirs.encode("a")[0], 5, 8]
    files = files_for_transformers(ours, longest=8)
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "</s>"
    told = spec.digests()
    assert [*told] == ["tokenizer_model"]
    assert TokenizerSpec.recorded("TikTokenizer", {"tokenizer_model": Path(model)}, told) == spec


def test_an_object_may_leave_out_mistrals_first_special_tokens(tmp_path: Path) -> None:
    changes = {
        "default_num_special_tokens": 24,
        "default_vocab_size": len(ranks()) + 23,
    }  # one token fewer than there are
    model = write_object(tmp_path / "tekken.json", None, **changes)
    tokenizer = load_tokenizer(TokenizerSpec("TikTokenizer", tokenizer_model=model))
    assert (tokenizer.eod, tokenizer.vocab_size) == (2, len(ranks()) + 23)
    places = {"[INST]": 3, "[IMG]": 10, "<pad>": 11, "[SUFFIX]": 16, "[TOOL_CONTENT]": 19, "<SPECIAL_20>": 20}
    assert {name: tokenizer.token_id(name) for name in places} == places


@pytest.mark.parametrize("style", STYLES)
def test_texts_come_back_and_their_bytes_are_counted(style: str, tmp_path: Path) -> None:
    tokenizer = made(style, tmp_path)
    sizes, encode = tokenizer.token_bytes(), fastest_encoder(tokenizer).encode
    assert len(sizes) == tokenizer.vocab_size and sizes[tokenizer.eod] == 0
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and sum(sizes[token] for token in ids) == len(text.encode())
        assert list(encode(text)) == ids == list(encode(text.encode()))
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"
    sign = STYLES[style].specials[STYLES[style].eod]
    assert tokenizer.encode(f"a{sign}b")[1] == tokenizer.eod
    assert list(encode(f"a\n {sign}b")) == tokenizer.encode(f"a\n {sign}b")
    assert json.loads(files_for_transformers(tokenizer, longest=8)["tokenizer_config.json"])["eos_token"] == sign


def test_published_places_of_special_tokens(tmp_path: Path) -> None:
    """Counted from the published sizes: GPT-2 50,256 ranks, GPT-4 100,256, GPT-4o 199,998, Llama 3 128,000."""
    places = {"gpt2": (0, 1), "cl100k": (100_257 - 100_256, 21), "o200k": (199_999 - 199_998, 21), "llama3": (1, 256)}
    for style, (end, size) in places.items():
        tokenizer = made(style, tmp_path)
        assert (tokenizer.eod - len(ranks()), tokenizer.vocab_size - len(ranks())) == (end, size)
    assert (
        STYLES["cl100k"].specials[100_276 - 100_256] == STYLES["o200k"].specials[200_018 - 199_998] == "<|endofprompt|>"
    )
    assert STYLES["llama3"].specials[128_009 - 128_000] == "<|eot_id|>"
    assert STYLES["llama3"].specials[255] == "<|reserved_special_token_250|>"


def test_a_corpus_says_how_its_ranks_were_used(tmp_path: Path) -> None:
    model = write_list(tmp_path / "vocab.json")
    spec = TokenizerSpec("TikTokenizer", tokenizer_model=model, tiktoken_num_special_tokens=SPECIAL)
    told = spec.digests()
    assert {**told, "tokenizer_model": ""} == {
        "tokenizer_model": "",
        "tiktoken_pattern": "v2",
        "tiktoken_num_special_tokens": "9",
    }
    again = TokenizerSpec.recorded("TikTokenizer", {"tokenizer_model": Path(model)}, told)
    assert again.digests() == told and load_tokenizer(again).vocab_size == SPECIAL + len(ranks())
    assert TokenizerSpec("TikTokenizer", tokenizer_model=model).digests() != told


def test_a_corpus_of_ranks_is_made_and_names_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    model = write_lines(tmp_path / "x.tiktoken")
    monkeypatch.chdir(tmp_path)
    words = (
        f"--input text.txt --output-prefix made --append-eod --tokenizer-type TikTokenizer --tokenizer-model {model}"
    )
    preprocess([*words.split(), "--tiktoken-pattern", "o200k"])
    sidecar = load_sidecar(tmp_path / "made_text_document.json")
    found = recorded_tokenizer(sidecar, tmp_path)
    assert found is not None and found.tiktoken_pattern == "o200k" and sidecar.eod == len(ranks()) + 1
    written = IndexedDataset(str(tmp_path / "made_text_document"))
    assert load_tokenizer(found).decode(list(written.sequence(0))) == f"{TEXT}<|endoftext|>"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("content", "style", "special", "told"),
    [
        ("lines", None, None, "no --tiktoken-pattern with tokenizer-model"),
        ("lines", "v1", None, "--tiktoken-pattern gpt2, --tiktoken-pattern cl100k"),
        ("list", "o200k", None, "--tiktoken-pattern v1, --tiktoken-pattern v2"),
        ("list", "v2", 3, "--tiktoken-num-special-tokens 7"),
        ("[1, 2]", None, None, "entry 0: 1"),
        ('[{"rank": 0, "token_bytes": "@"}]', None, None, "entry 0"),
        ('[{"rank": 1, "token_bytes": "AA=="}]', None, None, "entry 0"),
        ("[", None, None, "is a JSON list of tokens"),
        ('[{"rank": 0, "token_bytes": "AA=="}]', None, None, "byte 1 is no token (255 in all)"),
        ("QQ== 0\nQQ== 1\n", "gpt2", None, "b'A' is there twice"),
        ("QQ== 0\nQg== 2\n", "gpt2", None, "line 1: Qg== 2"),
        ("\x00\x01", "gpt2", None, "line 0"),
    ],
)
def test_wrong_files_are_refused(
    content: str, style: str | None, special: int | None, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "ranks"
    if content in ("lines", "list"):
        (write_lines if content == "lines" else write_list)(path)
    else:
        path.write_text(content)
    with pytest.raises(DataError) as error:
        load_tokenizer(TokenizerSpec("TikTokenizer", None, None, str(path), style, special or 1000))
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("signs", "style", "changes", "told"),
    [
        (((2, "</s>"),), "v2", {}, "--tiktoken-pattern v2 with tokenizer-model"),
        (((2, "</s>"),), None, {"pattern": None}, "pattern None"),
        (((2, "</s>"),), None, {"pattern": "("}, "pattern ("),
        (((2, "</s>"),), None, {"default_vocab_size": "many"}, "default_vocab_size many"),
        (((2, "</s>"),), None, {"default_vocab_size": 10_000}, "default_vocab_size 10000"),
        (((2, "</s>"),), None, {"default_vocab_size": 100}, "is no token"),
        (((2, "<s>"),), None, {}, "special_tokens <s>"),
        (((2, "</s>"), (9, "<s>")), None, {}, "its 9 special tokens"),
        (((2, "</s>"), (3, "</s>")), None, {}, "names of their own"),
        (None, None, {}, "special_tokens <unk>, <s>, </s>"),  # Mistral's first are more than nine
    ],
)
def test_wrong_objects_are_refused(
    signs: tuple[tuple[int, str], ...] | None, style: str | None, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    model = write_object(tmp_path / "tekken.json", signs, **changes)
    with pytest.raises(DataError) as error:
        load_tokenizer(TokenizerSpec("TikTokenizer", tokenizer_model=model, tiktoken_pattern=style))
    assert told in str(error.value)
    (tmp_path / "tekken.json").write_text("{")
    with pytest.raises(DataError, match="is a JSON object of ranks"):
        load_tokenizer(TokenizerSpec("TikTokenizer", tokenizer_model=model))
