"""Tests of the sections of a run's configuration together."""

from support.configs import make_run

from megazero.config.run import FIELDS, SECTIONS
from megazero.dialects.megatron import ACCEPTED, FIXED, REFUSED, SHORTHANDS


def test_sections_are_the_attributes() -> None:
    run = make_run()
    assert [type(getattr(run, section)) for section, _ in SECTIONS] == [cls for _, cls in SECTIONS]
    assert set(run.__dataclass_fields__) == {section for section, _ in SECTIONS}


def test_every_name_is_said_once() -> None:
    """No two settings, aliases or foreign flags share a name, because a flag or a key is not qualified by a section."""
    names = [name for info in FIELDS for name in (info.flag.removeprefix("--"), *info.aliases)]
    names += [*SHORTHANDS, *ACCEPTED, *FIXED, *REFUSED, "config", "preset", "zero-config", "deepspeed-config", "help"]
    assert len(names) == len(set(names))


def test_every_setting_has_help_and_every_count_a_unit() -> None:
    assert [info.name for info in FIELDS if not info.help] == []
    unitless = {"seed", "zero_stage", "exit_status_when_stopped", "timing_log_level"}
    assert [i.name for i in FIELDS if i.kind == "int" and not i.unit and i.name not in unitless] == []
