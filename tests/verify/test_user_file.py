"""Functions are found in a user's file by name, and what is not there is refused with what is."""

from pathlib import Path

import pytest
from support.each import each

from megazero.errors import ConfigError
from megazero.verify.user_file import functions_of, split_place


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside_the_case.py").write_text("NUMBER = 3\n")
    path = tmp_path / "case_of_a_user.py"
    path.write_text("from beside_the_case import NUMBER\ndef make():\n    return NUMBER\ndef loss():\n    return 1\n")
    return path


def test_functions_by_name(file: Path) -> None:
    path, name = split_place(f"{file}:make")
    make, loss = functions_of(path, [name, "loss"])
    assert (make(), loss()) == (3, 1)


def test_all_names_that_are_not_there_are_told(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        functions_of(file, ["mak", "NUMBER"])
    first, second = caught.value.problems
    assert first.given.endswith(":mak") and first.legal == "make" and "NUMBER, which is a int" in second.given


@each("place", ["case.py", "case.py:", "case.py:a b", "none.py:make"])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(ConfigError):
        split_place(place)
