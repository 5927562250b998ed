"""One value against a setting's description."""

from typing import Any

import pytest

from megazero.config.values import Place, Unfit, conform, nearest, shown, unknown, violation
from megazero.dialects.deepspeed.keys import key

COUNT = key("a.count", "int", 1, ge=1, le=9)
RATE = key("a.rate", "float", 1.0, gt=0, lt=1)
FLAG = key("a.flag", "bool", False)
COLOUR = key("a.colour", "str", "red", choices=("red", "blue"))
SWITCH = key("a.switch", "switch", False, choices=("true", "false", "auto"))
PAIR = key("a.pair", "pair", (0.9, 0.999), ge=0, lt=1)


@pytest.mark.parametrize(
    ("info", "value", "result"),
    [
        (COUNT, 5, 5),
        (COUNT, 5.0, 5),
        (COUNT, 9, 9),
        (key("n", "int", 0), 5e8, 500_000_000),
        (key("n", "int", 0), 2**63 - 1, 2**63 - 1),
        (RATE, 0.5, 0.5),
        (key("x", "float", 0.0), 3, 3.0),
        (FLAG, True, True),
        (COLOUR, "blue", "blue"),
        (SWITCH, True, True),
        (SWITCH, False, False),
        (SWITCH, "auto", "auto"),
        (key("t", "str", None), "anything", "anything"),
        (PAIR, [0.8, 0], (0.8, 0.0)),
        (PAIR, (0.8, 0.5), (0.8, 0.5)),
    ],
)
def test_what_fits_gets_the_settings_type(info: Any, value: Any, result: Any) -> None:
    found = conform(info, value)
    assert found == result and type(found) is type(result)


@pytest.mark.parametrize(
    ("info", "value"),
    [
        *((COUNT, value) for value in (0, 10, 1.5, True, "5", None, [1], float("nan"), float("inf"))),
        *((RATE, value) for value in (0, 1, 0.0, False, "0.5", None, float("nan"))),
        *((FLAG, value) for value in (0, 1, "true", None)),
        *((SWITCH, value) for value in (0, 1, "true", "Auto", "", None, ["auto"])),
        *((COLOUR, value) for value in ("Red", "", 1, None)),
        *((PAIR, value) for value in ([0.9], [0.9, 1.0], [0.9, 0.9, 0.9], 0.9, "ab", [True, 0.5], None)),
        (key("t", "str", None), ""),
    ],
)
def test_what_does_not_fit(info: Any, value: Any) -> None:
    with pytest.raises(Unfit):
        conform(info, value)


def test_a_violation_names_the_key_the_rule_and_the_nearest_value() -> None:
    place = Place("ds.json").key("a").key("count")
    found = violation(place, COUNT, 12)
    assert (found.given, found.rule, found.legal) == (
        "ds.json: a.count: 12",
        "a.count is a whole number, at least 1, at most 9",
        "count: 9",
    )
    assert violation(place, PAIR, 3).legal == "two numbers, at least 0, less than 1"


def test_an_unknown_key_gets_its_neighbours() -> None:
    place = Place("config", "stag")
    assert unknown(place, 3, ["stage", "reduce_scatter"]).legal == "stage"
    assert unknown(place, 3, ["x", "y"]).legal == "x, y"
    assert unknown(place, 3, [f"key{i}" for i in range(100)]).legal.count(",") == 19


def test_nearest_values() -> None:
    assert nearest(COUNT, 1.4) == ("1", "2") and nearest(COUNT, -3) == ("1",)
    assert nearest(COLOUR, "blu") == ("blue", "red")
    assert (
        nearest(FLAG, "x") == ("true", "false")
        and nearest(SWITCH, "aut")[0] == "auto"
        and nearest(PAIR, 1) == ()
        and nearest(COUNT, "x") == ()
    )


def test_values_are_shown_as_json_and_cut() -> None:
    assert shown({"a": None}) == '{"a": null}'
    assert len(shown(list(range(1000)))) == 60 and shown("x" * 99).endswith("...")
