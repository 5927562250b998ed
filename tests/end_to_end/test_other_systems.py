"""Tests of the quickstart's steps where Linux's own calls, /proc, and the modules fcntl and resource are missing."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.launch import PATIENCE_SECONDS, ROOT, SMALL_RUN, command_line
from support.warm_python import warm_python

PROGRAM = ROOT / "tests" / "support" / "without_linux.py"


@pytest.mark.gloo
def test_preprocess_train_resume_and_generate(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [warm_python(), str(PROGRAM), *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (tmp_path / "text.jsonl").write_text((json.dumps({"text": "a plain text, again and again"}) + "\n") * 60)
    corpus = ("--input", "text.jsonl", "--output-prefix", "corpus", "--workers", "2")
    run("preprocess", *corpus, "--tokenizer-type", "ByteTokenizer", "--append-eod")
    data = {"--mock-data": None, "--data-path": "corpus_text_document", "--tokenizer-type": "ByteTokenizer"}
    sizes = {"--vocab-size": None, "--split": "1,0,0", "--lr": "1e-3", "--save": "run", "--load": "run"}
    flags = command_line({**SMALL_RUN, **data, **sizes, "--zero-stage": "2", "--metrics-file": "steps"})
    assert "data 2 x tensor 1 = 2 ranks" in run("pretrain", "--processes", "2", *flags)
    resumed = run("pretrain", *flags, "--train-iters", "6")
    assert "resumed at iteration 4" in resumed and f"cores: {os.cpu_count()} " in resumed
    assert run("generate", "--load", "run", "--prompt", "a plain", "--max-new-tokens", "3").startswith("a plain")
