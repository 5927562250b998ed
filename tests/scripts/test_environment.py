"""Tests of scripts/environment.sh: what it installs an environment with, and its message when packages are missing."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment_made(root: Path, python: str, wheels: Path) -> "subprocess.CompletedProcess[str]":
    """Make an environment in a folder with the project's scripts, from a folder of wheels alone."""
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "setup.py", root)
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_EXTRA_INDEX_URL": "https://a/b https://c"}
    settings["PIP_REQUIRE_VIRTUALENV"] = "1"  # as many users have set
    return subprocess.run(
        ["bash", "-c", "source scripts/environment.sh; ensure_environment"],
        cwd=root, env={"PATH": "/usr/bin:/bin", "PYTHON": python, **settings},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_uv_installs_with_the_settings_of_pip(tmp_path: Path) -> None:
    """The program uv of this test, which pip brings, writes down what it is called with."""
    pinned = re.search("^uv==(.*)$", (ROOT / "scripts" / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    named, wheels, root = f"uv-{pinned[1]}", tmp_path / "wheels", tmp_path / "my project"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / f"{named}-py3-none-any.whl", "w") as wheel:
        program = zipfile.ZipInfo(f"{named}.data/scripts/uv")
        program.external_attr = 0o100755 << 16
        wheel.writestr(program, '#!/bin/sh\nprintf "%s\\n" "$@" >called\nenv | grep ^UV_ | sort >set\n')
        wheel.writestr(f"{named}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{named}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: uv\nVersion: {pinned[1]}\n")
        wheel.writestr(f"{named}.dist-info/RECORD", "")
    done = environment_made(root, sys._base_executable, wheels)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert (root / ".venv" / "megazero-stamp").exists()
    assert (root / "called").read_text().split("\n")[-5:] == ["-e", ".[test]", "-c", "scripts/constraints.txt", ""]
    settings = dict(line.split("=", 1) for line in (root / "set").read_text().splitlines())
    assert (settings["UV_NO_INDEX"], settings["UV_FIND_LINKS"]) == ("1", str(wheels))
    assert settings["UV_INDEX"] == "https://a/b https://c"


def test_pip_installs_where_uv_cannot_be_had(tmp_path: Path) -> None:
    """The python has no pip, as Debian's without python3-pip, and there is neither uv nor torch."""
    subprocess.run([sys._base_executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (tmp_path / "wheels").mkdir()
    done = environment_made(tmp_path / "root", str(tmp_path / "bare" / "bin" / "python"), tmp_path / "wheels")
    assert done.returncode == 2 and "uv could not install" in done.stdout
    assert "No module named pip" not in done.stderr and "No matching distribution" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: megazero could not be installed; see pip's message")


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
