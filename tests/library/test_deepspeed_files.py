"""Tests that a DeepSpeed configuration gives the library the settings that DeepSpeed's documentation promises."""

import pytest
from support.deepspeed_files import FILES, found_settings

from megazero.library.config import load_engine_config


@pytest.mark.parametrize("case", FILES)
def test_a_configuration_stands_for_its_settings(case: str) -> None:
    content, settings = FILES[case]
    assert found_settings(load_engine_config(content), settings) == settings
