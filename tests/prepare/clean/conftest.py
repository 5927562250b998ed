"""The model of languages, which takes half a second to unpack, is unpacked once for all tests."""

import functools
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_language_model() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        try:
            from py3langid import langid
        except ImportError:
            pass
        else:
            patch.setattr(langid, "_load_model_file", functools.cache(vars(langid)["_load_model_file"]))
        yield
