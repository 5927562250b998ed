"""Files for runs that go wrong: corpora, tokenizers and checkpoints, whole or damaged in one way.

Every public function but `documents` takes a folder and writes the files into it that the function is named after.
"""

import atexit
import contextlib
import io
import json
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from support.configs import make_run
from support.sidecars import byte_sidecar, write_sidecar
from support.token_files import write_corpus, write_gpt2_files

from megazero.data.indexed_dataset import IndexedDataset
from megazero.parallel.launch import Launch
from megazero.train.build import assemble
from megazero.train.loop import train
from megazero.train.start.check import check

VOCABULARY = 100
NUM_DOCUMENTS, DOCUMENT_TOKENS = 40, 50


def documents(count: int = NUM_DOCUMENTS) -> list[list[list[int]]]:
    """Return `count` documents, each one sequence of DOCUMENT_TOKENS random tokens below VOCABULARY."""
    generator = random.Random(count)
    return [[[generator.randrange(VOCABULARY) for _ in range(DOCUMENT_TOKENS)]] for _ in range(count)]


def corpus(folder: Path) -> None:
    write_corpus(folder / "text", documents())


def truncated_tokens(folder: Path) -> None:
    corpus(folder)
    _cut(folder / "text.bin", 300)


def truncated_index(folder: Path) -> None:
    corpus(folder)
    _cut(folder / "text.idx", 40)


def other_index(folder: Path) -> None:
    corpus(folder)
    _overwrite(folder / "text.idx", 0, b"PK\x03\x04")


def shuffled_index(folder: Path) -> None:
    """Write a corpus whose index starts the second sequence one token late."""
    corpus(folder)
    at = 34 + 4 * NUM_DOCUMENTS + 8
    _overwrite(folder / "text.idx", at, (2 * DOCUMENT_TOKENS + 2).to_bytes(8, "little"))


def index_alone(folder: Path) -> None:
    corpus(folder)
    (folder / "text.bin").unlink()


def foreign_token(folder: Path) -> None:
    """Write a corpus in which one token of one document lies outside the vocabulary."""
    texts = documents()
    texts[3][0][DOCUMENT_TOKENS // 2] = 7 * VOCABULARY
    write_corpus(folder / "text", texts)


def corpus_of_bytes(folder: Path) -> None:
    """Write a corpus whose sidecar names ByteTokenizer as its tokenizer."""
    corpus(folder)
    found = IndexedDataset(folder / "text")
    counts = {"documents": found.num_documents, "tokens": found.num_tokens, "text_bytes": found.num_tokens}
    write_sidecar(folder / "text", byte_sidecar(**counts, sequences=found.num_sequences, append_eod=False))


def corpus_of_bytes_and_another_tokenizer(folder: Path) -> None:
    corpus_of_bytes(folder)
    write_gpt2_files(folder, [("a", "b")])


def damaged_sidecar(folder: Path) -> None:
    corpus_of_bytes(folder)
    path = folder / "text.json"
    path.write_text(path.read_text()[:-20])


def a_file(folder: Path) -> None:
    (folder / "file").write_text("kept\n")


def notes(folder: Path) -> None:
    (folder / "notes.jsonl").write_text('{"shopping": "milk"}\n')


def unreadable_settings(folder: Path) -> None:
    (folder / "run.yaml").write_text("hidden_size: 32\nnum_layers: [2\n")


def wrong_settings(folder: Path) -> None:
    (folder / "run.yaml").write_text("hidden_sise: 32\nseed: many\n")


def checkpoint(folder: Path) -> None:
    """Write the checkpoint of step 2 of the smallest run into `saved`, a copy of one that has been trained once."""
    shutil.copytree(_trained() / "saved", folder / "saved")


@cache
def _trained() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _train(folder)
    return folder


def _train(folder: Path) -> None:
    settings = {
        "global_batch_size": 8,
        "vocab_size": VOCABULARY,
        "train_iters": 2,
        "eval_iters": 0,
        "lr_decay_style": "constant",
        "save": folder / "saved",
    }
    config, launch = make_run(**settings), Launch(0, 1, 0)
    with contextlib.redirect_stdout(io.StringIO()):
        train(assemble(config, launch, torch.device("cpu"), check(config, launch)))


def two_runs(folder: Path) -> None:
    """Write the checkpoint of one run into `saved` and that of another into `again/saved`."""
    checkpoint(folder)
    _train(folder / "again")


def damaged_manifest(folder: Path) -> None:
    """Write a checkpoint, then change a counter in its manifest."""
    checkpoint(folder)
    path = folder / "saved" / "step_0000002" / "manifest.json"
    text = path.read_text()
    changed = text.replace('"consumed_samples":16', '"consumed_samples":24').replace(
        '"consumed_samples": 16', '"consumed_samples": 24'
    )
    assert json.loads(text) != json.loads(changed)
    path.write_text(changed)


def truncated_weights(folder: Path) -> None:
    checkpoint(folder)
    _cut(folder / "saved" / "step_0000002" / "rank_00000.safetensors", 64)


def flipped_weight(folder: Path) -> None:
    """Write a checkpoint, then flip one bit of the last tensor in its file."""
    checkpoint(folder)
    path = folder / "saved" / "step_0000002" / "rank_00000.safetensors"
    last = path.stat().st_size - 1
    _overwrite(path, last, bytes([path.read_bytes()[last] ^ 1]))


def latest_names_nothing(folder: Path) -> None:
    checkpoint(folder)
    (folder / "saved" / "latest").write_text("step_0000009\n")


def _cut(path: Path, num_bytes: int) -> None:
    """Remove the last `num_bytes` bytes of a file."""
    path.write_bytes(path.read_bytes()[:-num_bytes])


def _overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def exit_trigger(folder: Path) -> None:
    (folder / "triggers").mkdir()
    (folder / "triggers" / "exit").touch()
