"""Programs answer --help and a wrong command line at once, without loading torch."""

import os
import subprocess
import sys

import pytest
from support.source_tree import ROOT, sources

TOOLS = [source.name for source in sources("tools")]

# A script that runs the program of its first word with the others as command line, and prints what was loaded.
WATCHED = """
import runpy, sys

program, *sys.argv[1:] = sys.argv[1:]
sys.path[0] = "tools" if program.startswith("tools/") else ""
try:
    if program.endswith(".py"):
        sys.argv[0] = program
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
except SystemExit as ended:
    print("ended with", ended.code)
print("heavy:", sorted({"torch", "transformers", "tensorboard", "safetensors.torch"} & set(sys.modules)))
"""


def watched(*words: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *words],
        env={**{name: value for name, value in os.environ.items() if name != "RANK"}, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "program",
    [
        "pretrain_gpt.py",
        "megazero",
        "megazero verify-layout",
        "megazero verify-module",
        *TOOLS,
        "tools/checkpoint.py inspect",
    ],
)
def test_help_is_there_at_once(program: str) -> None:
    told, _ = watched(*program.split(), "--help")
    assert len(told.splitlines()) > 3
    assert told.endswith("ended with 0\nheavy: []\n")


@pytest.mark.parametrize("program", ["pretrain_gpt.py", "megazero verify-layout"])
def test_a_wrong_command_line_is_refused_at_once(program: str) -> None:
    """A flag with a bad value, and flags that break a rule between them, are refused without loading torch."""
    sound = "--num-layers 2 --hidden-size 32 --seq-length 16 --vocab-size 100 --micro-batch-size 2 --mock-data"
    for wrong, complaint in {
        "--num-attention-heads 4 --lr much": "--lr much",
        "--num-attention-heads 5 --lr 1e-3 --train-iters 1": "--num-attention-heads 5",
    }.items():
        told, complaints = watched(*program.split(), *sound.split(), *wrong.split())
        assert complaint in complaints
        assert told.endswith("ended with 2\nheavy: []\n")


def test_a_wrong_flag_of_a_tool_is_refused_at_once() -> None:
    told, complaints = watched("tools/generate_text.py", "--load", "nowhere", "--max-new-tokens", "0")
    assert "--max-new-tokens 0" in complaints and told.endswith("ended with 2\nheavy: []\n")
