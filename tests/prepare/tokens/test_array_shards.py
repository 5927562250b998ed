"""Words of a command line are resolved to corpora; shards are put in order, and missing shards are an error."""

import random
from pathlib import Path

import pytest
from support.token_files import write_corpus

from megazero.errors import DataError
from megazero.prepare.tokens.array_shards import ShardName, ShardNames, find_prefixes, names, parse_shard


def shard(number: int, count: int = 12, *, name: str = "out", key: str = "text") -> str:
    return f"{name}_shard_{number:05d}_of_{count:05d}_{key}_document"


def make(folder: Path, *prefixes: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    return [write_corpus(folder / prefix, [[[1]]]) for prefix in prefixes]


def problems(*words: object) -> list[str]:
    with pytest.raises(DataError) as caught:
        find_prefixes([str(word) for word in words])
    return [str(problem) for problem in caught.value.problems]


def test_a_name_says_which_shard_it_is() -> None:
    assert parse_shard(f"a/./{shard(3, 8)}") == ShardName(ShardNames("a/out", "_text_document"), 3, 8, 5)
    assert parse_shard("a_shard_1_of_2_b") == ShardName(ShardNames("a", "_b"), 1, 2, 1)
    for other in ("out_text_document", "out_shard_x_of_00002_text", "out_shard_00001_of_00002", "a_shard_0_of_1_x/b"):
        assert parse_shard(other) is None
    found = parse_shard(shard(3, 8))
    assert found is not None and found.sibling(7) == shard(7, 8)


def test_shards_come_in_order_however_they_are_given(tmp_path: Path) -> None:
    prefixes = make(tmp_path, *map(shard, range(12)))
    mixed = random.Random(0).sample(prefixes, 12)
    assert mixed != prefixes and find_prefixes(mixed) == tuple(prefixes)
    assert find_prefixes([str(tmp_path)]) == tuple(prefixes)
    assert find_prefixes([f"{tmp_path}/out_shard_*"]) == tuple(prefixes)
    assert find_prefixes([f"{tmp_path}/out_*_document.idx"]) == tuple(prefixes)


def test_numbers_are_no_words(tmp_path: Path) -> None:
    """Shards are ordered by number; ordered by name, 10 would come before 9."""
    prefixes = make(tmp_path, *(f"out_shard_{number}_of_11_text_document" for number in range(11)))
    assert find_prefixes([str(tmp_path)]) == tuple(prefixes)


def test_a_family_stands_where_its_first_shard_is_given(tmp_path: Path) -> None:
    plain = make(tmp_path, "b", "a")
    text, title = (make(tmp_path, *(shard(n, 2, key=key) for n in range(2))) for key in ("text", "title"))
    given = [plain[0], title[1], text[1], plain[1], text[0], title[0]]
    assert find_prefixes(given) == (plain[0], *title, *text, plain[1])


def test_folders_and_patterns_are_in_the_order_of_names(tmp_path: Path) -> None:
    b, a, c = make(tmp_path / "some[1]", "b", "a", "c")
    (tmp_path / "some[1]" / "notes.txt").touch()
    (tmp_path / "some[1]" / ".a.123.tmp").mkdir()
    assert find_prefixes([str(tmp_path / "some[1]")]) == (a, b, c)
    assert find_prefixes([f"{tmp_path}/some*/[bc]"]) == (b, c)
    assert find_prefixes([c, f"{tmp_path}/some*/[ab]*"]) == (c, a, b)


def test_files_mean_their_corpus_once(tmp_path: Path) -> None:
    """All files of one corpus, as the shell lists them for an unquoted pattern, stand for that corpus once."""
    (a,) = make(tmp_path, "a")
    Path(f"{a}.json").touch()
    assert find_prefixes([f"{a}.bin", f"{a}.idx", f"{a}.json"]) == (a,)


def test_a_corpus_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    a, b = make(tmp_path, "a", "b")
    (tmp_path / "other.idx").symlink_to(f"{a}.idx")
    for words in ((a, b, a), (tmp_path, b), (a, f"{a}.idx"), (f"{a}.idx", f"{a}.idx"), (a, f"{tmp_path}/./a")):
        (found,) = problems(*words)
        assert "given once" in found and "--data-path" in found
    assert "other" in problems(a, tmp_path / "other")[0]


def test_words_that_mean_nothing_are_all_named(tmp_path: Path) -> None:
    (a,) = make(tmp_path, "a")
    found = problems(tmp_path / "none", a, tmp_path / "x*", tmp_path / "none.idx")
    assert [text.splitlines()[0] for text in found] == [f"--input {tmp_path}/{n}" for n in ("none", "x*", "none.idx")]
    (tmp_path / "empty").mkdir()
    assert len(problems(tmp_path / "empty")) == 1


def test_half_a_corpus_is_left_to_the_reader(tmp_path: Path) -> None:
    (a,) = make(tmp_path, "a")
    Path(f"{a}.bin").unlink()
    assert find_prefixes([a]) == (a,)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    make(tmp_path, *(shard(number) for number in range(12) if number not in (4, 11)))
    (found,) = problems(tmp_path)
    assert f"{tmp_path}/out_shard_*_text_document: 2 of 12 missing" in found
    assert f"{tmp_path / shard(4)}, {tmp_path / shard(11)}" in found
    make(tmp_path / "many", shard(1, 30))
    assert "and 19 more" in problems(tmp_path / "many")[0]


def test_shards_of_every_family_are_looked_at(tmp_path: Path) -> None:
    make(tmp_path, shard(0, 2), shard(2, 2), shard(0, 3, name="a"), shard(0, 1, name="b"), shard(0, 2, name="b"))
    make(tmp_path, "c_shard_0_of_1_x", "c_shard_00_of_01_x")
    found = "\n".join(problems(tmp_path))
    assert "out_shard_*_text_document: 1 of 2 missing" in found and "1 of 2 beyond the last" in found
    assert "a_shard_*_text_document: 2 of 3 missing" in found
    assert "b_shard_*_text_document: shards of 1 and 2" in found
    assert "c_shard_*_x: 1 of 1 twice" in found


def test_long_lists_are_cut() -> None:
    assert names(list("ab")) == "a, b"
    assert names(list("abcdefghijkl")) == "a, b, c, d, e, f, g, h, i, j and 2 more"
