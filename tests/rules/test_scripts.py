"""Shell scripts parse, the pipeline adds nothing to scripts/test.sh, and every requirement is pinned."""

import importlib.metadata
import re
import shutil
import subprocess
from contextlib import suppress

from packaging.requirements import Requirement
from support.each import each
from support.source_tree import ROOT

SCRIPTS = [*sorted((ROOT / "scripts").rglob("*.sh")), ROOT / ".ci" / "run"]


@each("script", SCRIPTS, ids=lambda path: path.name)
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


def test_what_the_tests_need_is_pinned_above_the_rest() -> None:
    """The constraints' first part has what setup.py leads to, and nothing else."""
    text = (ROOT / "scripts" / "constraints.txt").read_text()
    first = {canonical(line.partition("==")[0]) for line in text.partition("\n\n")[0].splitlines() if "==" in line}
    setup = re.sub(r'"(lm-eval|mlflow|wandb|ray)": \[.*\],', "", (ROOT / "setup.py").read_text())
    needed: set[str] = set()
    names = re.findall(r'"([\w-]+)>=[^"]*"', setup)
    while names:
        name = canonical(names.pop())
        # CUDA's packages are torch's choice, and setuptools comes with the environment.
        if name in needed or name.startswith(("nvidia-", "cuda-", "triton", "setuptools")):
            continue
        needed.add(name)
        with suppress(importlib.metadata.PackageNotFoundError):  # not on this platform
            found = map(Requirement, importlib.metadata.requires(name) or ())
            names += [one.name for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert needed <= first
    installed = {canonical(one.name) for one in importlib.metadata.distributions()}
    assert (first - needed) & installed == set()  # what an older Python needs besides is not installed


def test_every_requirement_is_pinned() -> None:
    requirements = re.findall(r'"([\w-]+)>=[^"]*"', (ROOT / "setup.py").read_text())
    assert len(requirements) >= 25
    assert [name for name in requirements if canonical(name) not in pins()] == []
    assert pins()["torch"] == "2.13.0"
