"""Tests of checking and converting one value by a setting's description."""

from pathlib import Path
from typing import Any

import pytest
from support.each import each

from megazero.config.values import (
    InvalidValue,
    Location,
    RawValue,
    as_boolean,
    as_number,
    coerce,
    nearest,
    shown,
    unknown,
    violation,
)
from megazero.dialects.deepspeed.keys import key

COUNT = key("a.count", "int", 1, ge=1, le=9)
RATE = key("a.rate", "float", 1.0, gt=0, lt=1)
FLAG = key("a.flag", "bool", False)
COLOUR = key("a.colour", "str", "red", choices=("red", "blue"))
SWITCH = key("a.switch", "switch", False, choices=("true", "false", "auto"))
PAIR = key("a.pair", "pair", (0.9, 0.999), ge=0, lt=1)
WHOLE = key("n", "int", 0)
TEXT = key("t", "str", "")
FOLDER = key("p", "path", "")
NAMES = key("l", "list", ())


@each(
    ("info", "value", "result"),
    [
        (COUNT, 5, 5),
        (COUNT, 5.0, 5),
        (COUNT, "5", 5),
        (COUNT, " 5.0 ", 5),
        (COUNT, 9, 9),
        *((WHOLE, value, 500_000_000) for value in (5e8, "5e8", "5.0e8", "500000000", "500_000_000")),
        *((WHOLE, value, 2**63 - 1) for value in (2**63 - 1, str(2**63 - 1))),
        (WHOLE, 10**400, 10**400),
        (RATE, 0.5, 0.5),
        (RATE, "5e-1", 0.5),
        (key("x", "float", 0.0), 3, 3.0),
        *((FLAG, value, True) for value in (True, 1, "1", "true", "True", "YES", "on")),
        *((FLAG, value, False) for value in (False, 0, "0", "false", "No", "off")),
        (COLOUR, "blue", "blue"),
        *((SWITCH, value, True) for value in (True, 1, "true")),
        (SWITCH, "False", False),
        (SWITCH, "auto", "auto"),
        (TEXT, "anything", "anything"),
        (TEXT, 100, "100"),
        (TEXT, 0.5, "0.5"),
        (FOLDER, "a/b", Path("a/b")),
        (FOLDER, Path("a"), Path("a")),
        (FOLDER, 7, Path("7")),
        (NAMES, "a", ("a",)),
        (NAMES, [0.5, "a", 1, "b"], ("0.5", "a", "1", "b")),
        (NAMES, [], ()),
        (PAIR, [0.8, 0], (0.8, 0.0)),
        (PAIR, ("0.8", 0.5), (0.8, 0.5)),
    ],
)
def test_what_is_legal_gets_the_settings_type_and_keeps_it(info: Any, value: Any, result: Any) -> None:
    found = coerce(info, value)
    assert found == result and type(found) is type(result)
    again = coerce(info, found)
    assert again == found and type(again) is type(found)


@each(
    ("info", "value"),
    [
        *((COUNT, value) for value in (0, 10, 1.5, "1.5", True, "", "five", "0x5", None, [1], "٣")),
        *((COUNT, float(value)) for value in ("nan", "inf")),
        *((RATE, value) for value in (0, 1, 0.0, False, "1", "nan", "inf", "1e400", None, float("nan"), 10**400)),
        (key("x", "float", 0.0), 10**400),
        *((FLAG, value) for value in (2, 1.0, "2", "1.0", "auto", "", "perhaps", None, [True])),
        *((SWITCH, value) for value in (2, "Auto", "", None, ["auto"])),
        *((COLOUR, value) for value in ("Red", "", 1, None, ["red"])),
        *((PAIR, value) for value in ([0.9], [0.9, 1.0], [0.9, 0.9, 0.9], 0.9, "ab", [True, 0.5], None)),
        *((TEXT, value) for value in ("", True, None, ["a"], float("nan"))),
        *((FOLDER, value) for value in ("", False, None, ["a"])),
        *((NAMES, value) for value in ("", [""], [True], [["a"]], None)),
    ],
)
def test_what_is_not_legal(info: Any, value: Any) -> None:
    with pytest.raises(InvalidValue):
        coerce(info, value)


def test_null_leaves_an_optional_setting_unset() -> None:
    assert coerce(key("n", "int", None), None) is None


def test_words_that_are_no_numbers_or_truth_values() -> None:
    assert [as_number(value) for value in ("1_0", "+3", ".5", "1__0", "1e", "", True, None, [1])] == [
        10,
        3,
        0.5,
        *[None] * 6,
    ]
    assert [as_boolean(value) for value in ("y", "t", "", None, 2, -1, 0.0, [True])] == [None] * 8


def test_a_name_has_one_spelling() -> None:
    for name in ("num-layers", "num_layers", "num_layers"):
        raw = RawValue(name, 3, "x")
        assert (raw.name, raw.flag_name) == ("num_layers", "num-layers")
    assert RawValue("a-b", 1, "x") == RawValue("a_b", 1, "x")


def test_a_violation_names_the_key_the_rule_and_the_nearest_value() -> None:
    location = Location("ds.json").key("a").key("count")
    found = violation(location.quote(12), location.path, COUNT, 12)
    assert (found.given, found.rule, found.legal) == (
        "ds.json: a.count: 12",
        "a.count is a whole number, at least 1, at most 9",
        "count: 9",
    )
    assert violation("x", "--a-count", COUNT, "12").legal == "--a-count 9"
    assert violation("x", "a.pair", PAIR, 3).legal == "two numbers, at least 0, less than 1"
    assert "unset shell variable" in violation("x", "--a-count", COUNT, "").rule


def test_an_unknown_key_gets_its_neighbours() -> None:
    location = Location("config", "stag")
    assert unknown(location, 3, ["stage", "reduce_scatter"]).legal == "stage"
    assert unknown(location, 3, ["x", "y"]).legal == "x, y"
    assert unknown(location, 3, [f"key{i}" for i in range(100)]).legal == "leave it out"


def test_nearest_values() -> None:
    assert nearest(COUNT, 1.4) == nearest(COUNT, "1.4") == ("1", "2") and nearest(COUNT, -3) == ("1",)
    assert nearest(COUNT, 10**400) == ("9",)
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
