"""Tests of the package as users install it: a wheel, whose command works from any folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import PATIENCE_SECONDS, SMALL_RUN, command_line

ROOT = Path(__file__).resolve().parents[2]


def install(folder: Path) -> Path:
    """Install a wheel of the project beside the packages that are there; return the folder that has it."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(folder)]
    source = folder / "source"
    shutil.copytree(ROOT / "megazero", source / "megazero", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*pip, *wheel, str(source)], check=True, timeout=PATIENCE_SECONDS)
    (built,) = folder.glob("megazero-*.whl")
    target = folder / "installed"
    words = ["install", "--no-deps", "--no-compile", "--no-index", "--target", str(target), str(built)]
    subprocess.run([*pip, *words], check=True, timeout=PATIENCE_SECONDS)
    return target


@pytest.mark.gloo
def test_a_wheel_preprocesses_trains_resumes_generates_and_exports(tmp_path: Path) -> None:
    installed, folder = install(tmp_path), tmp_path / "empty"
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**kept, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def run(*words: str) -> str:
        return printed(str(installed / "bin" / "megazero"), *words)

    def run_one_after_another(*commands: list[str]) -> str:
        program = "import sys\nfrom megazero.command import run\n"
        for words in commands:
            program += f"sys.argv[1:] = {words!r}\nassert run() == 0\n"
        return printed("-c", program)

    def printed(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (folder / "text.jsonl").write_text(json.dumps({"text": "a plain text, again and again " * 40}) + "\n")
    prepared = ["--input", "text.jsonl", "--output-prefix", "corpus", "--tokenizer-type", "ByteTokenizer"]
    data = {"--mock-data": None, "--data-path": "corpus_text_document", "--tokenizer-type": "ByteTokenizer"}
    sizes = {"--vocab-size": None, "--split": "1,0,0", "--lr": "1e-3", "--save": "run", "--load": "run"}
    flags = command_line({**SMALL_RUN, **data, **sizes, "--zero-stage": "2"})
    run("preprocess", *prepared)
    assert "data 2 x tensor 1 = 2 ranks" in run("pretrain", "--processes", "2", *flags)
    told = run_one_after_another(
        ["pretrain", *flags, "--train-iters", "6"],
        ["generate", "--load", "run", "--prompt", "a plain", "--max-new-tokens", "3"],
        ["convert", "export", "--load", "run", "--output", "exported"],
    )
    assert "saved checkpoint of iteration 6 " in told and "\na plain" in told
    assert all((folder / "exported" / name).is_file() for name in ("config.json", "tokenizer.json"))
