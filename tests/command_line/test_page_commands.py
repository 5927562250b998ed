"""Commands that pages show for training parse, at the number of processes that they name."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from megazero.command_line.parse import parse
from megazero.command_line.processes import split_processes

ROOT = Path(__file__).resolve().parents[2]


def commands() -> list[tuple[str, str]]:
    """Return the pages' commands that train, each with its page."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"(torchrun|python)\b.*pretrain_gpt\.py |megazero pretrain ", f"{line} "):
                    found.append((page.name, line))
    return found


def world_size(words: list[str]) -> int:
    """Return the number of processes that the launcher's flags start."""
    flags = dict(pairwise(words))
    return int(flags.get("--nproc-per-node", "1")) * int(flags.get("--nnodes", "1"))


def test_there_are_commands() -> None:
    assert len(commands()) > 15


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_parses(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's run from a file is that of running.md, and those of saved configurations are left out."""
    if re.search(r"--config \S*config\.yaml", line):
        pytest.skip("the configuration is one that a run has saved")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name, text in re.findall(
        r"^cat >(\S+) <<'\w+'\n(.*?)^(?:YAML|JSON)$",
        "".join((ROOT / "docs" / each).read_text() for each in ("running.md", "other-projects.md")),
        re.MULTILINE | re.DOTALL,
    ):
        (tmp_path / name).write_text(text)
    words = shlex.split(re.split(r" [&|;>] ?", f"{line} ")[0])
    start = next(index for index, word in enumerate(words) if word.endswith("pretrain_gpt.py") or word == "pretrain")
    own = split_processes(words[start + 1 :])
    assert parse(own.rest, world_size=own.number or world_size(words[:start])).config is not None
