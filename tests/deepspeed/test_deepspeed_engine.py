"""Tests programs that use DeepSpeed's names, on two ranks, against plain PyTorch in float64."""

import os
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support.deepspeed_programs import PROGRAMS, Place, Trained
from support.processes import run_ranks

RANKS = 2


def run(rank: int, folder: str, cases: list[tuple[str, int]]) -> list[Trained]:
    """Run programs one after the other, each in a ZeRO stage, with the variables of a launcher."""
    launcher = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    with patch.dict(os.environ, launcher), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [PROGRAMS[name][0](Place(rank, RANKS, stage, Path(folder))) for name, stage in cases]


@pytest.mark.gloo
def test_programs_train_as_in_plain_torch(tmp_path: Path) -> None:
    cases = [(name, stage) for name in PROGRAMS for stage in range(4)]
    expected = {name: plain(RANKS) for name, (_, plain) in PROGRAMS.items()}
    for results in run_ranks(RANKS, run, str(tmp_path), cases):
        for (name, stage), trained in zip(cases, results, strict=True):
            place = f"{name} in stage {stage}"
            assert trained.weights.keys() == expected[name].weights.keys()
            for key, value in expected[name].weights.items():
                torch.testing.assert_close(trained.weights[key], value, rtol=1e-9, atol=1e-9, msg=f"{key}, {place}")
            assert trained.figures == pytest.approx(expected[name].figures, rel=1e-9), place
