"""Tests of the tool that turns text files into jsonl, as a user starts it."""

import gzip
import json
import subprocess
from pathlib import Path

from support.warm_python import TOOLS, warm_python

TOOL = str(Path(__file__).parents[2] / "tools" / "text_to_jsonl.py")


def test_a_file_is_cut_at_separators(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n\ntwo\nlines\n\n\n\n")
    command = [warm_python(TOOLS), TOOL, "--input", str(tmp_path / "a.txt"), "--separator", r"\n\n\n"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "o.jsonl.gz")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = gzip.decompress((tmp_path / "o.jsonl.gz").read_bytes()).splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one", "two\nlines"]
    assert "2 documents, 12 B of text, 0 files skipped" in done.stdout
    done = subprocess.run([*command, "--output", str(tmp_path / "o.txt")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--output" in done.stderr and "Traceback" not in done.stderr
