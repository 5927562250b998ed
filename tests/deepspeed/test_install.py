"""Tests that megazero takes the name `deepspeed` where a program asks for that, and nowhere else."""

import importlib.metadata
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from megazero.deepspeed import zero
from megazero.deepspeed.install import install_as_deepspeed
from megazero.errors import UsageError

# Folders of this name, such as that of these tests, have no origin.
IS_INSTALLED = (SPEC := find_spec("deepspeed")) is not None and SPEC.origin is not None
PROGRAM = """
import deepspeed
from deepspeed.checkpointing import configure
from deepspeed.runtime.zero import partition_parameters as pp
from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint as load
"""


@pytest.fixture(autouse=True)
def own_modules() -> Iterator[None]:
    """Give each test modules and finders of its own, as in a new process without Accelerate and transformers."""
    hidden = {name for name in sys.modules if name.split(".")[0] in ("accelerate", "deepspeed", "transformers")}
    with patch.dict(sys.modules), patch.object(sys, "meta_path", list(sys.meta_path)):
        for name in hidden:
            del sys.modules[name]
        yield


pytestmark = pytest.mark.skipif(IS_INSTALLED, reason="DeepSpeed itself is installed")


def test_modules_and_the_version_are_found() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("deepspeed")
    install_as_deepspeed()
    finders = len(sys.meta_path)
    install_as_deepspeed()
    assert len(sys.meta_path) == finders
    found: dict[str, Any] = {}
    exec(PROGRAM, found)
    deepspeed, pp = found["deepspeed"], found["pp"]
    assert deepspeed is sys.modules["megazero.deepspeed"] and find_spec("deepspeed") is not None
    assert deepspeed.zero is pp is zero and callable(found["configure"]) and callable(found["load"])
    assert deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES[:2] == ["WarmupLR", "WarmupDecayLR"]
    assert hasattr(pp, "zero_wrapper_for_fp_tensor_constructor")
    assert importlib.metadata.version("deepspeed") == deepspeed.__version__
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert "deepspeed" in importlib.metadata.packages_distributions()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("deepspeed-of-others")
    with pytest.raises(ImportError):
        import_module("deepspeed.ops.sparse_attention")


def test_a_folder_of_that_name_is_not_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    with patch.object(sys, "path", [str(tmp_path), *sys.path]):
        install_as_deepspeed()
    assert sys.modules["deepspeed"] is sys.modules["megazero.deepspeed"]


def test_deepspeed_itself_stays(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    with patch.object(sys, "path", [str(tmp_path), *sys.path]), pytest.raises(UsageError, match="DeepSpeed itself"):
        install_as_deepspeed()
    sys.modules["deepspeed"] = ModuleType("deepspeed")
    with pytest.raises(UsageError, match="DeepSpeed itself"):
        install_as_deepspeed()


@pytest.mark.parametrize("name", ["accelerate", "transformers.integrations.deepspeed"])
def test_a_library_that_has_looked_already_is_named(name: str) -> None:
    sys.modules[name] = ModuleType(name)
    with pytest.raises(UsageError, match=f"after {name} was imported"):
        install_as_deepspeed()
    assert "deepspeed" not in sys.modules
