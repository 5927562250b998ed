"""Checking a run before torch is loaded reports broken rules, missing corpora and bad placement together."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.saved_runs import ONE, OTHER, save_for
from support.sidecars import byte_sidecar, write_sidecar
from support.small_runs import TINY, VOCAB, tiny_run
from support.token_files import count_up, write_corpus

from megazero.data.sidecar import sidecar_path
from megazero.errors import UserError
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology
from megazero.train.start.check import check, topology

ALONE = Launch(0, 1, 0)


def refused(launch: Launch = ALONE, **settings: Any) -> str:
    """Return the message with which a run is refused."""
    with pytest.raises(UserError) as caught:
        check(tiny_run(**settings), launch)
    return caught.value.render()


def test_a_sound_run_gets_its_inputs() -> None:
    inputs = check(tiny_run(), ALONE)
    assert (inputs.vocab_size, inputs.train.seq_length) == (VOCAB, TINY["seq_length"])


def test_rules_between_settings_are_told_at_once() -> None:
    wrong = {"num_attention_heads": 5, "tensor_model_parallel_size": 2, "min_lr": 1.0, "finetune": True}
    told = refused(Launch(0, 3, 0), **wrong)
    for flag in ("--num-attention-heads 5", "3 processes", "--min-lr 1", "--finetune without --load"):
        assert flag in told


def test_another_runs_metrics_are_told_before_ranks_meet(tmp_path: Path) -> None:
    """Only a run that goes on after some steps adds to its file; one that begins starts it over."""
    for name, step in (("saved", 10), ("begun", 0)):
        save_for(tmp_path / name, step, ONE)
    lines = {run.id: tmp_path / f"{run.id}.jsonl" for run in (ONE, OTHER)}
    for run_id, path in lines.items():
        path.write_text(json.dumps({"iteration": 1, "run": run_id}) + "\n")
    others, load = {"metrics_file": str(lines[OTHER.id])}, str(tmp_path / "saved")
    for settings in ({"load": load}, {"load": load, "save": load}, {"load": load, "save": str(tmp_path / "new")}):
        told = refused(**others, **settings)
        assert (
            f"--metrics-file {lines[OTHER.id]}, line 1: of run {OTHER.id}" in told and f"this is run {ONE.id}\n" in told
        )
        check(tiny_run(metrics_file=str(lines[ONE.id]), **settings), ALONE)
    begun = str(tmp_path / "begun")
    for settings in ({}, {"save": str(tmp_path / "new")}, {"load": load, "finetune": True}, {"load": begun}):
        check(tiny_run(**others, **settings), ALONE)


def broken_corpus(folder: Path) -> dict[str, Any]:
    (folder / "c.bin").write_bytes(b"\x00" * 10)
    (folder / "c.idx").write_bytes(b"not an index")
    return {"mock_data": False, "data_path": [str(folder / "c")], "split": "1"}


def test_corpora_are_opened(tmp_path: Path) -> None:
    assert "c.idx" in refused(**broken_corpus(tmp_path))


def test_layout_and_corpora_are_told_together(tmp_path: Path) -> None:
    on_two_nodes = Launch(0, 2, 0, (1, 1))
    told = refused(on_two_nodes, tensor_model_parallel_size=2, **broken_corpus(tmp_path))
    assert "c.idx" in told and "--tensor-model-parallel-size 2" in told and told.startswith("2 errors")


def test_masking_needs_to_know_the_token() -> None:
    for asked in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        assert "--" + asked.replace("_", "-") in refused(**{asked: True})
        assert check(tiny_run(**{asked: True}, vocab_size=257, tokenizer_type="ByteTokenizer"), ALONE).eod == 256
    told = refused(reset_position_ids=True, reset_attention_mask=True)
    assert told.startswith("2 configuration errors") and told.count("a tokenizer or the corpus's .json") == 2


def test_a_corpus_tells_the_token_or_does_not(tmp_path: Path) -> None:
    """The end-of-document token is read from a corpus's .json; without it, flags that need the token are refused."""
    prefix = write_corpus(tmp_path / "c", count_up(90, 9))
    write_sidecar(prefix, byte_sidecar(documents=9, tokens=90, text_bytes=81))
    settings = {"mock_data": False, "data_path": [prefix], "split": "1", "reset_attention_mask": True}
    assert check(tiny_run(**settings, vocab_size=257), ALONE).eod == 256
    sidecar_path(prefix).unlink()
    assert "--reset-attention-mask" in refused(**settings, vocab_size=257)


@pytest.mark.parametrize(
    ("size", "tp", "expected"),
    [(1, 1, Topology()), (8, 2, Topology(tp=2, dp=4)), (1024, 4, Topology(tp=4, dp=256))],
)
def test_data_parallel_is_what_is_left(size: int, tp: int, expected: Topology) -> None:
    assert topology(tiny_run(tensor_model_parallel_size=tp), size) == expected


def test_documents_without_ends_are_not_told_apart(tmp_path: Path) -> None:
    """Documents without end tokens cannot be separated; masking the loss at such tokens is legal and masks nothing."""
    prefix = write_corpus(tmp_path / "c", count_up(200, 20))
    sidecar = byte_sidecar(documents=20, tokens=200, text_bytes=200, token_bytes=[1] * 257)
    for append_eod in (False, True):
        write_sidecar(prefix, replace(sidecar, append_eod=append_eod))
        corpus = {"mock_data": False, "data_path": [prefix], "split": "1", "eval_iters": 0, "vocab_size": 257}
        assert check(tiny_run(**corpus, eod_mask_loss=True), ALONE).eod == 256
        if append_eod:
            assert check(tiny_run(**corpus, reset_attention_mask=True, reset_position_ids=True), ALONE).eod == 256
        else:
            told = refused(**corpus, reset_attention_mask=True, reset_position_ids=True)
            assert told.count(f"with {prefix}, made without --append-eod") == 2


def test_text_at_evaluations_takes_a_tokenizer(tmp_path: Path) -> None:
    """The corpus names it if no flag does; one whose files are gone is no tokenizer any more."""
    given: dict[str, Any] = {"mock_data": False, "vocab_size": 257, "eval_sample_tokens": 4}
    given |= {"data_path": [write_corpus(tmp_path / "a", count_up(250, 25))], "split": "8,1,1", "seq_length": 4}
    assert "names none whose files are still there" in refused(**given)
    sidecar = byte_sidecar(documents=25, tokens=250, text_bytes=500)
    write_sidecar(tmp_path / "a", sidecar)
    assert check(tiny_run(**given), ALONE).vocab_size == 257
    gone = {"tokenizer_files": {"tokenizer_model": "ab"}, "tokenizer_paths": {"tokenizer_model": "/gone"}}
    write_sidecar(tmp_path / "a", replace(sidecar, tokenizer_type="SentencePieceTokenizer", **gone))
    assert "--eval-sample-tokens 4" in refused(**given)
