"""Programs answer --help and a wrong command line at once, without loading torch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
from support.source_tree import ROOT, sources

TOOLS = [source.name for source in sources("tools")]

# A script that runs each program of its argument, a list of lists of words, in a process of its own, and prints what
# each has printed, with what was loaded.  What most of them load has been imported before, once.
WATCHED = """
import contextlib, io, json, os, runpy, sys
import argparse, multiprocessing.spawn, numpy, pydantic.dataclasses, tokenizers, yaml
import megazero.command_line.help, megazero.command_line.parse, megazero.command_line.tools, megazero.rules.files

def run(program, *words):
    sys.argv = [program, *words]
    sys.path[0] = "tools" if program.startswith("tools/") else ""
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        print("ended with", ended.code)
    print("heavy:", sorted({"torch", "transformers", "tensorboard", "safetensors.torch"} & set(sys.modules)))

told = []
for words in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    if os.fork() == 0:
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            run(*words)
        with os.fdopen(writing, "w") as pipe:
            json.dump([out.getvalue(), error.getvalue()], pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told.append(json.loads(pipe.read()))
    os.wait()
print(json.dumps(told))
"""
HELPED = [
    "pretrain_gpt.py",
    "megazero",
    "megazero verify-layout",
    "megazero verify-module",
    *TOOLS,
    "tools/checkpoint.py inspect",
]
SOUND = "--num-layers 2 --hidden-size 32 --seq-length 16 --vocab-size 100 --micro-batch-size 2 --mock-data"
WRONG = {
    f"{program} {SOUND} {wrong}": complaint
    for program in ("pretrain_gpt.py", "megazero verify-layout")
    for wrong, complaint in {
        "--num-attention-heads 4 --lr much": "--lr much",
        "--num-attention-heads 5 --lr 1e-3 --train-iters 1": "--num-attention-heads 5",
    }.items()
} | {"tools/generate_text.py --load nowhere --max-new-tokens 0": "--max-new-tokens 0"}


@pytest.fixture(scope="module")
def told() -> Mapping[str, tuple[str, str]]:
    """Return what each program has printed, and its complaints."""
    commands = [*(f"{program} --help" for program in HELPED), *WRONG]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, json.dumps([command.split() for command in commands])],
        env={**{name: value for name, value in os.environ.items() if name != "RANK"}, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return dict(zip(commands, map(tuple, json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize("program", HELPED)
def test_help_is_there_at_once(program: str, told: Mapping[str, tuple[str, str]]) -> None:
    words, _ = told[f"{program} --help"]
    assert len(words.splitlines()) > 3
    assert words.endswith("ended with 0\nheavy: []\n")


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_line_is_refused_at_once(command: str, told: Mapping[str, tuple[str, str]]) -> None:
    """A flag with a bad value, and flags that break a rule between them, are refused without loading torch."""
    words, complaints = told[command]
    assert WRONG[command] in complaints
    assert words.endswith("ended with 2\nheavy: []\n")
