"""Tests of the origin of settings: every source marks the values it gives with where they come from."""

import json
from pathlib import Path

from support.configs import make_run
from support.each import each

from megazero.command_line.flags import split_words
from megazero.config.origin import Origin
from megazero.config.yaml_file import read_text, to_yaml
from megazero.dialects.deepspeed.reading import read as read_mapping
from megazero.dialects.deepspeed.reading import read_file
from megazero.dialects.deepspeed.run import translate_for_run


@each(
    ("flag", "origin"),
    [
        ("--hysteresis", Origin.FOREIGN),
        ("--min_lr", Origin.FOREIGN),
        ("--bf16", Origin.FOREIGN),
        ("--no-mmap-bin-files", Origin.FOREIGN),
        ("--consecutive-hysteresis", Origin.USER),
        ("--stage3-prefetch-bucket-size", Origin.USER),
    ],
)
def test_a_flag_is_the_users_unless_published_scripts_carry_it(flag: str, origin: Origin) -> None:
    ((word,), stray) = split_words([flag, "1"])
    assert (word.origin, stray) == (origin, [])


def test_a_file_is_the_users_unless_a_run_has_saved_it() -> None:
    own = read_text("hysteresis: 3\nmin_lr: 0.1\n", origin="run.yaml")
    assert {item.origin for item in own} == {Origin.USER}
    saved = read_text(to_yaml(make_run(hysteresis=3)), origin="config.yaml")
    assert {item.origin for item in saved} == {Origin.PROGRAM} and len(saved) > 100


def test_a_deepspeed_configuration_is_foreign_and_its_defaults_are_nobodys(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    translation = translate_for_run(read_mapping(read_file(tmp_path / "ds.json"), "ds.json"), fp16_requested=False)
    assert {item.name: item.origin for item in translation.written} == {"zero_stage": Origin.FOREIGN}
    assert {item.origin for item in translation.defaults} == {Origin.DEFAULT}
