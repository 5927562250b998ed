"""Tests of groups of corpora as BLOOM's flags spell them."""

from fractions import Fraction

from support.configs import make_run
from support.each import each

from megazero.config.corpora import CorpusGroup, WeightedPrefix, corpus_words, read_group, read_groups, train_words
from megazero.rules.run import check


def test_a_group_is_a_name_and_parts_with_exact_weights() -> None:
    found = read_group(" valid_en: 0.1 0.6:0.8 /a/en_text_document,\n 3 0:1 s3://b/ar:1 ")
    expected = (
        WeightedPrefix("/a/en_text_document", Fraction(1, 10), 0.6, 0.8),
        WeightedPrefix("s3://b/ar:1", Fraction(3)),
    )
    assert found == CorpusGroup("valid_en", expected)


@each(
    ("text", "told"),
    [
        (": 1 0:1 a", "begins with its name and a colon"),
        ("a b", "begins with its name and a colon"),
        ("x: 1 0:1 a 1 0:1 b", "with a comma behind, not '1 0:1 a 1 0:1 b'"),
        ("x: 1 0:1 a,", "a corpus is a weight, a part and a prefix, with a comma behind, not ''"),
        ("x: 1 a", "a corpus is a weight, a part and a prefix"),
        ("x: 0 0:1 a", "a weight is a number above 0, not 0"),
        ("x: nan 0:1 a", "a weight is a number above 0, not nan"),
        ("x: 1 0.5 a", "0 <= START < END <= 1, not 0.5"),
        ("x: 1 0.5:0.5 a", "0 <= START < END <= 1, not 0.5:0.5"),
        ("x: 1 0:1.1 a", "0 <= START < END <= 1, not 0:1.1"),
        ("x: 1 0:1:1 a", "0 <= START < END <= 1, not 0:1:1"),
    ],
)
def test_other_forms_say_what_is_wrong(text: str, told: str) -> None:
    found = read_group(text)
    assert isinstance(found, str) and told in found


def test_the_words_of_all_corpora() -> None:
    groups = {"train_weighted_split_paths": ["t: 1 0:1 a"], "valid_weighted_split_paths": ["v: 1 0:1 b", "w: 1 0:1 c"]}
    data = make_run(mock_data=False, **groups).data
    assert corpus_words(data) == ("a", "b", "c")
    assert [group.name for group in read_groups(["v: 1 0:1 b", "w: 1 0:1 c", "x"])] == ["v", "w"]
    assert train_words(data) == ("--train-weighted-split-paths", "t: 1 0:1 a")
    assert train_words(make_run(mock_data=False, data_path=["1", "a"]).data) == ("--data-path", "1", "a")
    assert train_words(make_run().data) == ()


TRAIN, VALID = {"train_weighted_split_paths": ["t: 1 0:1 a"]}, {"valid_weighted_split_paths": ["v: 1 0:1 b"]}


@each(
    ("settings", "told"),
    [
        (VALID, "training has a corpus too"),
        (TRAIN, "evaluation needs a corpus of its own where training has one"),
        ({**TRAIN, **VALID, "data_path": "a"}, "or groups of parts of corpora"),
        ({**TRAIN, **VALID, "train_data_path": "a", "valid_data_path": "b"}, "or groups of parts of corpora"),
        ({**VALID, "train_weighted_split_paths": ["t: 1 0:1 a", "u: 1 0:1 a"]}, "training has one group of corpora"),
        ({**TRAIN, "valid_weighted_split_paths": ["v: 1 0:1 a", "v: 1 0:1 b"]}, "every group has a name of its own"),
        ({**TRAIN, "valid_weighted_split_paths": ["v: 1 a"]}, "a corpus is a weight, a part and a prefix"),
    ],
)
def test_groups_have_rules(settings: dict[str, object], told: str) -> None:
    (problem,) = check(make_run(mock_data=False, **settings), 1)
    assert told in problem.rule


def test_legal_groups_break_no_rule() -> None:
    assert check(make_run(mock_data=False, **TRAIN, **VALID), 1) == ()
    assert check(make_run(mock_data=False, **TRAIN, eval_iters=0), 1) == ()
