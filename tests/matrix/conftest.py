"""Fixtures of the layout tests: the text and the reference run that all layouts are compared with, made once."""

import pytest
from support.reference import History
from support.training import reference_history, write_text_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def reference(corpus: str) -> History:
    return reference_history(corpus)
