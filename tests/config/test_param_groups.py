"""Tests which param group a name belongs to, and the messages for patterns that no parameter belongs to."""

from support.each import each

from megazero.config.param_groups import ParamGroup, place_of, unmatched

NAMES = ["embedding.word.weight", "layers.0.norm.bias", "layers.1.norm.bias", "head.weight"]


@each(
    ("patterns", "expected"),
    [
        (["*.bias", "layers.*"], [None, 0, 0, None]),
        (["layers.[0]*", "*"], [1, 0, 1, 1]),
        (["norm", "LAYERS.*", "*.weight"], [2, None, None, 2]),
    ],
)
def test_the_first_pattern_that_matches_the_whole_name_wins(patterns: list[str], expected: list[int | None]) -> None:
    assert [place_of([ParamGroup(pattern) for pattern in patterns], name) for name in NAMES] == expected


@each(
    ("patterns", "told"),
    [
        (["*.bias"], []),
        (["layers.1.norm.bais"], [("--x: layers.1.norm.bais", f"{NAMES[2]}, {NAMES[1]}, {NAMES[0]}, ...")]),
        (["*.bais"], [("--x: *.bais", f"{NAMES[1]}, {NAMES[2]}, {NAMES[0]}, ...")]),
        (["zzz"], [("--x: zzz", "embedding.word.weight, layers.0.norm.bias, layers.1.norm.bias, ...")]),
        (["head.*", "*", "*.bias"], [("--x: *.bias", "*.bias before *")]),
    ],
)
def test_a_pattern_without_parameters_has_a_problem(patterns: list[str], told: list[tuple[str, str]]) -> None:
    found = unmatched([ParamGroup(pattern) for pattern in patterns], NAMES, "--x")
    assert [(problem.given, problem.legal) for problem in found] == told
