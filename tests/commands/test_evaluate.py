"""Tests `megazero evaluate`: its figures are those of transformers on the exported weights, on any processes."""

import json
import math
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import run_config, save_checkpoint
from support.launch import PATIENCE_SECONDS, set_launcher
from support.likelihoods import likelihood
from support.models import small_config
from support.source_tree import ROOT
from support.warm_python import warm_python
from torch import Tensor

from megazero.commands.convert import main as convert
from megazero.commands.evaluate import main
from megazero.config.run import DataConfig
from megazero.errors import CheckpointError, ConfigError, DataError, TopologyError, UserError

LENGTH, EOD = 12, 256
BYTES = DataConfig(tokenizer_type="ByteTokenizer")
TENSOR, STAGES = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
# Longer than the model reads, empty, one token.
TEXTS = ["naïve @-@ text that is longer . \n", "", "x"]
PASSAGES = ["one two three", "single", "many words before the lastword"]
QUESTIONS = [
    {"context": "is it", "choices": ["so", "not so, but otherwise", "é"], "label": 2},
    {"context": "", "choices": ["yes", "no"], "label": 0},
]


def save(folder: Path, *, precision: str = "fp64", data: DataConfig = BYTES, vocab_size: int = 257) -> Path:
    config = run_config(small_config(init_method_std=0.3), precision=precision, data=data)
    save_checkpoint(folder / "run", config, vocab_size=vocab_size, tp=1)
    (folder / "plain.txt").write_text(TEXTS[0])
    for name, lines in (
        ("texts", [{"text": text} for text in TEXTS]),
        ("passages", [{"text": text} for text in PASSAGES]),
        ("questions", QUESTIONS),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def words(folder: Path, *more: str) -> list[str]:
    files = f"--perplexity {folder}/plain.txt {folder}/texts.jsonl --lambada {folder}/passages.jsonl"
    return f"--load {folder}/run --device cpu {files} --choices {folder}/questions.jsonl".split() + list(more)


def figures(output: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [result["figures"] for result in json.loads(output.read_text())["results"]]
    return found


@pytest.mark.parametrize(("precision", "stride", "tolerance"), [("fp64", 5, 1e-12), ("bf16", LENGTH, 1e-5)])
def test_figures_are_those_of_transformers(tmp_path: Path, precision: str, stride: int, tolerance: float) -> None:
    transformers = pytest.importorskip("transformers")
    save(tmp_path, precision=precision)
    convert(["export", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf"), "--dtype", "float64"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    output = tmp_path / "out" / "figures.json"
    flags = ["--stride", str(stride), "--detokenize", "wikitext", "--output", str(output), "--micro-batch-size", "3"]
    main(words(tmp_path, *flags))
    plain, texts, last, choices = figures(output)

    @torch.no_grad()
    def next_logits(ids: Sequence[int]) -> Tensor:
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0, -1]
        return logits

    def score(context: str, text: str, stride: int = LENGTH) -> float:
        before = list(context.encode()) or [EOD]
        ids = [*before, *text.encode()]
        return likelihood(next_logits, ids, len(before), length=LENGTH, stride=stride).value

    natural = ["naïve-text that is longer.\n", "", "x"]
    losses = [-score("", text, stride) for text in natural]
    # 7 words and what is behind the line end; an empty text has a word, of no letters.
    assert plain["word_perplexity"] == pytest.approx(math.exp(losses[0] / 8), rel=10 * tolerance)
    assert plain["token_perplexity"] == pytest.approx(math.exp(losses[0] / 28), rel=10 * tolerance)
    counts = {"texts": 3, "tokens": 29, "words": 10, "bytes": 34 + 1}
    assert {name: texts[name] for name in counts} == counts
    assert texts["log_likelihood"] == pytest.approx(-sum(losses), rel=tolerance)
    assert texts["bits_per_byte"] == pytest.approx(sum(losses) / 35 / math.log(2), rel=tolerance)
    split = [passage.rpartition(" ") for passage in PASSAGES]
    mean = sum(score(context, f" {word}") for context, _, word in split) / 3
    assert last["perplexity"] == pytest.approx(math.exp(-mean), rel=100 * tolerance)
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    for each in QUESTIONS:
        found = [(choice, score(str(each["context"]), f" {choice}")) for choice in each["choices"]]
        for name, size in (("acc", lambda _: 1), ("acc_norm", len), ("acc_bytes", lambda text: len(text.encode()))):
            values = [value / size(choice) for choice, value in found]
            right[name].append(values.index(max(values)) == each["label"])
    assert {name: choices[name] for name in right} == {name: sum(answers) / 2 for name, answers in right.items()}


def test_the_table_and_the_file_have_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = save(tmp_path) / "figures.json"
    assert main(words(tmp_path, "--output", str(output))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", lines[0]) == ["task", "file", "figure", "value"] and lines[-1] == f"figures: {output}"
    described = json.loads(output.read_text())
    assert {name: described[name] for name in ("step", "length", "stride", "detokenize")} == {
        "step": 7,
        "length": LENGTH,
        "stride": LENGTH,
        "detokenize": None,
    }
    told = [(result["task"], name) for result in described["results"] for name in result["figures"]]
    rows = [re.split("  +", line) for line in lines[1:-1]]
    assert [(row[0], row[2]) for row in rows] == [each for each in told if not each[1].endswith("_stderr")]
    (accuracy,) = [row[3] for row in rows if row[2] == "acc_bytes"]
    assert re.fullmatch(r"[01](\.5)? \+- [0-9.]+", accuracy)


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    output = save(tmp_path) / "figures.json"
    output.write_text("mine")
    with pytest.raises(ConfigError, match=f"--output {output}\n.*must not exist yet"):
        main(words(tmp_path, "--output", str(output)))
    assert output.read_text() == "mine"


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        (["--choices", "gone.jsonl"], DataError, "gone.jsonl\n    rule:  must be a readable file"),
        (["--choices", "RUN/texts.jsonl"], DataError, "texts.jsonl, line 1: no context, among the keys text"),
        (["--lambada", "RUN/texts.jsonl"], DataError, "texts.jsonl, line 2: no word"),
        (["--perplexity", "RUN/empty.txt"], DataError, "empty.txt: empty"),
        (["--stride", "13", "--perplexity", "RUN/plain.txt"], ConfigError, "12 tokens .*\n.*legal: --stride 12"),
        (["--stride", "0", "--perplexity", "RUN/plain.txt"], ConfigError, "--stride 0"),
        (["--stride", "3", "--lambada", "RUN/passages.jsonl"], ConfigError, "--stride 3 without --perplexity"),
        (["--delimiter", ":", "--lambada", "RUN/passages.jsonl"], ConfigError, "--delimiter : without --choices"),
        (["--detokenize", "wikitext"], ConfigError, "no task(.|\n)*--perplexity FILE, --lambada FILE, --choices FILE"),
        (["--output", "s3://bucket/a", "--lambada", "RUN/passages.jsonl"], ConfigError, "names an object store"),
        (["--step", "8", "--lambada", "RUN/passages.jsonl"], CheckpointError, "step 8"),
    ],
)
def test_wrong_flags_and_files(tmp_path: Path, more: list[str], kind: type[UserError], message: str) -> None:
    save(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(kind, match=message):
        main(["--load", f"{tmp_path}/run", *(word.replace("RUN", str(tmp_path)) for word in more)])


def test_a_run_without_a_tokenizer_needs_one_of_its_vocabulary(tmp_path: Path) -> None:
    save(tmp_path, data=DataConfig())
    with pytest.raises(ConfigError, match="names no tokenizer"):
        main(words(tmp_path))
    assert main(words(tmp_path, "--tokenizer-type", "ByteTokenizer")) == 0
    save(tmp_path / "small", vocab_size=100)
    with pytest.raises(CheckpointError, match="tokenizer of 257 ids for a model of 100"):
        main(words(tmp_path / "small"))


def test_processes_that_hold_no_whole_copies_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_launcher(monkeypatch, world_size=3)
    with pytest.raises(
        TopologyError, match=r"(?s)-size 2 .*-size 1 on 3 processes.*divides their number.*legal: 2 proc"
    ):
        main(words(save(tmp_path), TENSOR, "2"))


@pytest.mark.gloo
def test_several_processes_give_the_figures_of_one(tmp_path: Path) -> None:
    save(tmp_path)
    main(words(tmp_path, "--output", str(tmp_path / "1.json")))
    program = [warm_python(), "-m", "megazero", "evaluate", "--processes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    for name, *layout in (("2", "2"), ("4", "4", TENSOR, "2", STAGES, "2")):
        own = [*program, *layout, *words(tmp_path, "--output", str(tmp_path / f"{name}.json"))]
        ended = subprocess.run(own, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("word_perplexity") == 2  # one table, of two files
    one, two, four = (figures(tmp_path / f"{name}.json") for name in "124")
    assert one == two
    for single, shared in zip(one, four, strict=True):
        assert single == pytest.approx(shared, rel=1e-11)
