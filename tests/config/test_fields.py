"""Tests of a setting's description: its kind, bounds, choices and help."""

from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from megazero.config.engine_sections import ZeroConfig
from megazero.config.fields import STRICT, FieldInfo, describe, setting


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sample:
    """A section that has a setting of each kind."""

    count: int = setting(help="how many", unit="things", aliases=("number",), ge=1, le=9, beyond="ten are too many")
    rate: float | None = setting(None, help="how fast", gt=0, lt=1)
    flag: bool = setting(True, help="whether")
    colour: Literal["red", "blue"] | None = setting(None, help="which")
    place: Path | None = setting(None, help="where")
    names: tuple[str, ...] = setting((), help="who")
    kept: bool | Literal["auto"] = setting(False, help="how")
    only: int = setting(1, help="one thing only", ge=1, le=1)


def by_name() -> dict[str, FieldInfo]:
    return {info.name: info for info in describe("sample", Sample)}


def test_a_required_setting_with_everything() -> None:
    count = by_name()["count"]
    assert count.section == "sample" and count.flag == "--count" and count.required and count.default is None
    assert (count.help, count.unit, count.aliases, count.beyond) == (
        "how many",
        "things",
        ("number",),
        "ten are too many",
    )
    assert count.bounds == (("ge", 1), ("le", 9))


def test_kinds() -> None:
    kinds = {name: info.kind for name, info in by_name().items()}
    assert kinds == {
        "count": "int",
        "rate": "float",
        "flag": "bool",
        "colour": "str",
        "place": "path",
        "names": "list",
        "kept": "switch",
        "only": "int",
    }
    assert by_name()["kept"].choices == ("true", "false", "auto") and by_name()["flag"].choices == ()
    assert [name for name, info in by_name().items() if info.can_stand_alone] == ["flag", "kept"]


def test_what_is_legal_reads_as_a_phrase() -> None:
    legal = {name: info.legal for name, info in by_name().items()}
    assert legal == {
        "count": "a whole number, at least 1, at most 9",
        "rate": "a number, greater than 0, less than 1",
        "flag": "true or false",
        "colour": "one of red, blue",
        "place": "a path",
        "names": "one or more texts",
        "kept": "one of true, false, auto",
        "only": "1",
    }


def test_optional_settings_may_be_null() -> None:
    assert [name for name, info in by_name().items() if info.optional] == ["rate", "colour", "place"]


def test_what_an_unset_setting_stands_for_is_in_its_help() -> None:
    zero = {info.name: info for info in describe("zero", ZeroConfig)}
    assert zero["prefetch_bucket_size"].when_unset == (
        "as many as the largest unit has, with more than 32 data-parallel processes at least 262144 for each"
    )
    assert by_name()["rate"].when_unset == "not set"
