"""Tests that a DeepSpeed configuration gives the library the settings that DeepSpeed's documentation promises."""

from support.deepspeed_files import FILES, found_settings
from support.each import each

from megazero.library.config import load_engine_config


@each("case", FILES)
def test_a_configuration_stands_for_its_settings(case: str) -> None:
    content, settings = FILES[case]
    assert found_settings(load_engine_config(content), settings) == settings
