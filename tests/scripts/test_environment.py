"""Tests of scripts/environment.sh: how it completes an environment, and its message when packages are missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_an_environment_without_pip_is_completed(tmp_path: Path) -> None:
    """An environment without pip, as Debian's python makes it without python3-venv, gets pip; no torch is installed."""
    root = tmp_path / "my project"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "setup.py", root)
    python = sys._base_executable  # an environment's own python makes its copies
    subprocess.run([python, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    install = "install_pinned() { :; }; install_torch() { .venv/bin/python -m pip --version; false; }"
    program = f"source scripts/environment.sh; {install}; ensure_environment"
    done = subprocess.run(
        ["bash", "-c", program], cwd=root, env={"PATH": "/usr/bin:/bin", "PYTHON": python},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "pip " in done.stdout and "No module named pip" not in done.stderr


def test_a_python_without_the_packages_is_told_in_one_line(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys._base_executable, "-m", "venv", "--without-pip", bare], check=True)
    python = str(bare / "bin" / "python")
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "test.sh"), "--no-install", "--fast"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": python}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {python} lacks torch, ") and " ruff, " in line and "--no-install" in line
