"""Tests of the benchmark of generation: every system writes as many tokens, and the record has them, small."""

import json
from pathlib import Path

import pytest
from generation import Timing, main

TINY = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --device cpu --texts 2"


def test_figures_are_medians() -> None:
    figures = Timing([2.0, 1.0, 9.0], [0.5, 0.25, 4.0], 10).to_json()
    assert (figures["tokens_per_second"], figures["cpu_seconds_per_token"]) == (5.0, 0.05)


@pytest.mark.gloo
def test_the_program_runs_small(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = [*TINY.split(), "--prompt-tokens", "4", "--new-tokens", "3", "--rounds", "1"]
    main([*words, "--output", str(tmp_path / "a.md")])
    kept = json.loads((tmp_path / "a.json").read_text())
    assert list(kept["systems"]) == ["megazero, 2 x", "megazero without a cache, 2 x", "transformers, 2 x"]
    assert all(figures["tokens_per_second"] > 0 for figures in kept["systems"].values())
    assert "| megazero without a cache, 2 x |" in (tmp_path / "a.md").read_text()
