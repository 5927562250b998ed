"""Tests the numbers and weight decays of the groups of parameters with and without patterns."""

from megazero.config.param_groups import ParamGroup
from megazero.optim.grouping import DECAYED, DECOUPLED, UNDECAYED, Grouping
from megazero.parallel.param_spec import ParamSpec


def spec(name: str, *, decay: bool) -> ParamSpec:
    return ParamSpec(name, (2,), (2,), (0,), decay=decay)


def test_groups_without_patterns() -> None:
    grouping = Grouping(frozenset({"a"}))
    found = [grouping.group_of(spec(name, decay=decay)) for name, decay in (("a", True), ("b", True), ("c", False))]
    assert found == [DECOUPLED, DECAYED, UNDECAYED] and grouping.weight_decays(0.5) == [0.0, 0.5, 0.5]
    assert Grouping().weight_decays(0.5) == [0.0, 0.5] and Grouping().pattern_of(spec("a", decay=True)) is None


def test_patterns_have_groups_of_their_own() -> None:
    patterns = (ParamGroup("a*", lr=1.0), ParamGroup("*b", weight_decay=0.25))
    grouping = Grouping(patterns=patterns)
    decays = grouping.weight_decays(0.5)
    expected = {("ab", True): 0.5, ("ab", False): 0.0, ("b", True): 0.25, ("b", False): 0.25, ("c", True): 0.5}
    for (name, decay), value in expected.items():
        assert decays[grouping.group_of(spec(name, decay=decay))] == value
    assert grouping.pattern_of(spec("ab", decay=True)) is patterns[0]
    groups = {grouping.group_of(spec(name, decay=decay)) for name, decay in expected}
    assert len(groups) == 5 and max(groups) < len(decays)
