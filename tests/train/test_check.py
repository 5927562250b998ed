"""What is found wrong before torch is loaded: rules, corpora and placement, all at once."""

from pathlib import Path
from typing import Any

import pytest
from support.small_runs import TINY, VOCAB, tiny_run

from megazero.errors import UserError
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology
from megazero.train.check import check, topology

ALONE = Launch(0, 1, 0)


def refused(launch: Launch = ALONE, **settings: Any) -> str:
    """What a run that is refused is told."""
    with pytest.raises(UserError) as caught:
        check(tiny_run(**settings), launch)
    return caught.value.render()


def test_a_sound_run_gets_its_inputs() -> None:
    inputs = check(tiny_run(), ALONE)
    assert (inputs.vocab_size, inputs.train.seq_length) == (VOCAB, TINY["seq_length"])


def test_rules_between_settings_are_told_at_once() -> None:
    wrong = {"num_attention_heads": 5, "tensor_model_parallel_size": 2, "min_lr": 1.0, "save_interval": 5}
    told = refused(Launch(0, 3, 0), **wrong)
    for flag in ("--num-attention-heads 5", "3 processes", "--min-lr 1", "--save-interval 5"):
        assert flag in told


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
    assert "--eod-mask-loss" in refused(eod_mask_loss=True)
    assert check(tiny_run(eod_mask_loss=True, vocab_size=257, tokenizer_type="ByteTokenizer"), ALONE).eod == 256


@pytest.mark.parametrize(
    ("size", "tp", "expected"),
    [(1, 1, Topology()), (8, 2, Topology(tp=2, dp=4)), (1024, 4, Topology(tp=4, dp=256))],
)
def test_data_parallel_is_what_is_left(size: int, tp: int, expected: Topology) -> None:
    assert topology(tiny_run(tensor_model_parallel_size=tp), size) == expected
