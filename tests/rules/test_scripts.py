"""Shell scripts parse, the pipeline adds nothing to scripts/test.sh, and every requirement is pinned."""

import re
import shutil
import subprocess

import pytest
from support.source_tree import ROOT

SCRIPTS = [*sorted((ROOT / "scripts").rglob("*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_sound(script: object) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--external-sources", str(script)], check=True, cwd=ROOT)


def test_the_pipeline_runs_the_one_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert len(lines) == 2 and lines[0].startswith("#!") and lines[1].endswith("exec bash scripts/test.sh")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    stated = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in stated if not re.fullmatch(r"[\w.-]+==[\w.!]+", line)] == []
    return {canonical(name): version for name, _, version in (line.partition("==") for line in stated)}


def test_every_requirement_is_pinned() -> None:
    requirements = re.findall(r'"([\w-]+)>=[^"]*"', (ROOT / "setup.py").read_text())
    assert len(requirements) >= 25
    assert [name for name in requirements if canonical(name) not in pins()] == []
    assert pins()["torch"] == "2.13.0"
