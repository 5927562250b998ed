"""The inspecting tool on a corpus whose ids leave the vocabulary."""

import subprocess
import sys
from pathlib import Path

from support.token_files import write_corpus

TOOL = Path(__file__).parents[2] / "tools" / "inspect_dataset.py"


def test_verify_refuses_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", [[[1, 300]]])
    command = [sys.executable, str(TOOL), prefix, "--verify", "--tokenizer-type", "ByteTokenizer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "ids from 1 to 300" in done.stderr and "Traceback" not in done.stderr
