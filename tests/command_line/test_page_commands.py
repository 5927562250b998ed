"""Commands of the pages: those that train parse at the number of processes that they name, and tools run, small."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from support import foreign_files
from support.pages import Block, block_with, blocks, make_commands, run
from support.source_tree import ROOT
from support.warm_python import RUNS, TOOLS, warm_python

from megazero.command_line.parse import parse
from megazero.command_line.processes import split_processes

PROGRAMS = [
    "bash",
    "cd",
    "done",
    "for",
    "kill",
    "kubectl",
    "mkdir",
    "mpirun",
    "python",
    "rm",
    "sbatch",
    "sky",
    "torchrun",
    "megazero",
    "sleep",
    "wait",
]
SETTINGS = re.compile(r"[A-Z_]+=\S*")


def training_commands() -> list[tuple[str, str]]:
    """Return the pages' commands that train, each with its page."""
    found = [(block.page, line) for block in blocks() for line in block.lines()]
    pattern = re.compile(r"(torchrun|python)\b.*pretrain_gpt\.py |megazero pretrain ")
    return [(page, line) for page, line in found if pattern.match(f"{line} ")]


def world_size(words: list[str]) -> int:
    """Return the number of processes that the launcher's flags start."""
    flags = dict(pairwise(words))
    return int(flags.get("--nproc-per-node", "1")) * int(flags.get("--nnodes", "1"))


def test_blocks_are_found_with_their_marks() -> None:
    """A line that nothing here would run, and a mark that replaces nothing, are mistakes of a page."""
    assert len(blocks()) > 30 and len(training_commands()) > 15
    unknown = []
    for block in blocks():
        assert block.reason or block.small()
        for line in block.lines():
            words = [word for word in shlex.split(line, comments=True) if not SETTINGS.fullmatch(word)]
            if words and words[0].split("=")[0] not in (*PROGRAMS, "job"):
                unknown.append((block.name, line))
    assert unknown == []


def test_a_mark_that_replaces_nothing_is_an_error() -> None:
    block = Block("page", 1, "python --steps 8\n", (("--steps 8", "--steps 2"),))
    assert block.small() == "python --steps 2\n"
    with pytest.raises(ValueError, match="is not in it"):
        block._replace(text="python\n").small()


@pytest.mark.parametrize(("page", "line"), training_commands())
def test_a_command_parses(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's run from a file is that of running.md, and those of saved configurations are left out."""
    if re.search(r"--config \S*config\.yaml", line):
        pytest.skip("the configuration is one that a run has saved")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for block in blocks():
        if block.page in ("docs/running.md", "docs/other-projects.md"):
            for name, text in block.files().items():
                (tmp_path / name).write_text(text)
    words = shlex.split(re.split(r" [&|;>] ?", f"{line} ")[0])
    start = next(index for index, word in enumerate(words) if word.endswith("pretrain_gpt.py") or word == "pretrain")
    own = split_processes(words[start + 1 :])
    assert parse(own.rest, world_size=own.number or world_size(words[:start])).config is not None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder like the project's after the quickstart, with little text and no run."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("tools", "pretrain_gpt.py"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "megazero").mkdir()
    for name in ("files", "console", "errors", "signals"):
        (folder / "megazero" / f"{name}.py").write_bytes((ROOT / "megazero" / f"{name}.py").read_bytes())
    make_commands(folder)
    (folder / "runs/quickstart").mkdir(parents=True)
    pages = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    (folder / "runs/book.txt").write_text("".join(pages), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        # The folder's megazero, a few files to read, is no package: without the real one behind it, it would be taken.
        patch.setenv("PYTHONPATH", str(ROOT))
        yield folder


def succeed(commands: str, place: Path, modules: tuple[str, ...] = RUNS) -> str:
    """Run commands as the program does, by a python that has imported modules; return their output."""
    status, output, _ = run(commands, place, warm_python(modules))
    assert status == 0, output
    return output


def test_the_tools_of_the_page_of_data_run(place: Path) -> None:
    corpus = "python tools/text_to_jsonl.py --input megazero --output runs/quickstart/corpus.jsonl\n"
    vocabulary = "python tools/train_tokenizer.py --input runs/book.txt --model-type byte-level-bpe --output runs"
    names = "mv runs/vocab.json runs/gpt2-vocab.json; mv runs/merges.txt runs/gpt2-merges.txt"
    succeed(f"{corpus}{vocabulary} --vocab-size 300\n{names}", place, TOOLS)
    for text in ("GPT-2's byte-level BPE", "merge_datasets.py"):
        told = succeed(block_with("docs/data.md", text).text, place, TOOLS)
    assert "sample 7" in told and (place / "runs/book_bytes.bin").exists() and (place / "runs/lengths.svg").exists()


@pytest.mark.gloo
def test_the_run_of_the_pages_trains_resumes_at_other_layouts_and_is_inspected(place: Path) -> None:
    """The blocks of running.md and checkpoints.md, one after the other, with a model of another size."""
    corpus = "python tools/preprocess_data.py --input runs/book.txt --output-prefix runs/quickstart/corpus --append-eod"
    succeed(f"{corpus} --tokenizer-type ByteTokenizer", place)
    first = block_with("docs/running.md", "cat >runs/small.yaml").text
    sizes = {
        "num_layers: 4": "num_layers: 2",
        "hidden_size: 128": "hidden_size: 32",
        "seq_length: 128": "seq_length: 16",
    }
    fewer = {"eval_iters: 4": "eval_iters: 1", "--nproc-per-node 4": "--nproc-per-node 2"}
    for given, smaller in {**sizes, **fewer}.items():
        assert given in first
        first = first.replace(given, smaller)
    assert "exit interval 20 reached at iteration 20" in succeed(first, place)
    told = succeed(block_with("docs/checkpoints.md", "checkpoint.py inspect").text, place)
    assert "finished 60 iterations" in told and "sound" in told
    evaluated = block_with("docs/evaluation.md", "megazero evaluate").text
    told = succeed(evaluated.replace("runs/quickstart/checkpoints", "runs/small"), place)
    assert told.count("word_perplexity") == 1 and told.count("lambada ") == 2 * 3 and "acc_bytes" in told
    journal = succeed(block_with("docs/checkpoints.md", "checkpoint.py journal").text, place)
    assert journal.count("  start  ") == 3 and "from 2 | to 1" in journal


@pytest.mark.gloo
def test_the_page_of_imports_trains_on_from_a_checkpoint_of_megatron_lms(place: Path) -> None:
    foreign_files.write_legacy(place / "megatron/checkpoints", foreign_files.gpt2(), tp=2, pp=2)
    first, second = (block for block in blocks() if block.page == "docs/importing.md")
    told = succeed(first.text.replace("--vocab-size 50257", "--vocab-size 90"), place)
    assert (place / "runs/from-megatron-hf/model.safetensors").exists(), told
    changes = {
        "--data-path corpus_text_document": "--mock-data --eval-iters 1",
        "--train-iters 1000": "--train-iters 2",
    }
    text = second.text
    for given, smaller in changes.items():
        assert given in text
        text = text.replace(given, smaller)
    assert "finished 2 iterations" in succeed(text, place)


@pytest.mark.gloo
def test_a_machine_measures_itself_and_plans(place: Path) -> None:
    calibrated, planned = block_with("docs/planning.md", "--calibrate").small(), "planned for this-machine"
    alone = calibrated.replace("--processes 2 --quick", "--quick")
    assert alone != calibrated and planned in succeed(alone, place)
