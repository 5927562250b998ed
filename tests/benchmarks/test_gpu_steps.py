"""Tests of real steps on GPUs: their figures beside float64 on the CPU, NCCL, and layouts of several GPUs.

The model, the flags and the bounds are those of the phases of the examination (`benchmarks/gpu_phases.py`).
"""

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import gpu_phases
import pytest
import torch
from gpu_phases import EXACT, PRECISIONS, Bench, are_close, distances, on_cpu, small, three_steps
from support.source_tree import ROOT
from support.warm_python import warm_python

PHASES = ROOT / "benchmarks" / "gpu_phases.py"


def bench(device: str) -> Bench:
    return Bench(torch.device(device, 0) if device == "cuda" else torch.device("cpu"), Path("unused.json"))


@pytest.fixture(scope="module")
def exact() -> Any:
    """Return the figures and the gradient of the GPU's model in float64 on the CPU."""
    gpu = bench("cuda")
    return three_steps(on_cpu(gpu), [*small(gpu), *EXACT])


@pytest.mark.cuda
@pytest.mark.parametrize("compiles", ["off", "on"])
@pytest.mark.parametrize(("precision", "stage"), list(product(PRECISIONS, range(4))))
def test_steps_agree_with_float64_on_the_cpu(precision: str, stage: int, compiles: str, exact: Any) -> None:
    gpu = bench("cuda")
    words = [*PRECISIONS[precision].words.split(), "--compile", compiles, "--zero-stage", str(stage)]
    found = distances(three_steps(gpu, [*small(gpu), *words]), exact)
    assert are_close(found, PRECISIONS[precision]), found


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_recorded_passes_give_the_bits_of_those_that_are_launched(stage: int, precision: str) -> None:
    gpu = bench("cuda")
    words = [*small(gpu), *PRECISIONS[precision].words.split(), "--compile", "on", "--zero-stage", str(stage)]
    words += ["--hidden-dropout", "0.1", "--deterministic-mode"]
    launched, recorded = three_steps(gpu, words), three_steps(gpu, [*words, "--enable-cuda-graph"])
    assert recorded[0] == launched[0] and torch.equal(recorded[1], launched[1])


def cases_of(phase: str, device: str, output: Path) -> dict[str, Any]:
    """Return the cases of a phase that has run in a process of its own, all of them right."""
    command = [sys.executable, str(PHASES), phase, "{}", "--device", device, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    cases: dict[str, Any] = json.loads(output.read_text())["cases"]
    assert all(row["is_right"] for row in cases.values())
    return cases


@pytest.mark.cuda
def test_nccl_gives_the_bits_of_one_process(tmp_path: Path) -> None:
    """Stages 0 to 3 over NCCL groups of one rank give the same losses, weights and moments as without groups.

    A process of its own is used, because it replaces the mesh's communicators.
    """
    assert len(cases_of("collectives", "cuda", tmp_path / "found.json")) == 6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_runs_in_deterministic_mode_are_equal_to_the_bit(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, weights and moments of two processes in bf16 are the same; a step's seconds are printed."""
    if device == "cpu":
        monkeypatch.setattr(sys, "executable", warm_python())
    cases = cases_of("determinism", device, tmp_path / "found.json")
    assert list(cases) == [f"compile {compiles}" for compiles in ("off", "on")[: 2 if device == "cuda" else 1]]
    for row in cases.values():
        assert len(set(row["losses"])) == len(row["losses"]) and row["with_the_mode"] > 0 and row["without"] > 0
        print(f"a step: {row['with_the_mode']:.4f} s with the mode, {row['without']:.4f} s without")


@pytest.mark.cuda
@pytest.mark.parametrize(("number", "layout"), gpu_phases.LAYOUTS)
def test_layouts_of_several_gpus_agree_with_one(number: int, layout: str) -> None:
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number), "-m", "megazero"]
    words = [*gpu_phases.VERIFY.split(), *layout.split(), "--device", "cuda"]
    done = subprocess.run(
        [sys.executable, *launcher, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_comparison_sees_wrong_figures_and_gradients() -> None:
    """Another stage passes in float64; a figure off by a millionth and a gradient of the wrong sign do not."""
    cpu = bench("cpu")
    one, other = (three_steps(cpu, [*small(cpu), *EXACT, "--zero-stage", stage]) for stage in ("0", "3"))
    assert are_close(distances(other, one), PRECISIONS["fp64"])
    spoilt = ([*one[0][:-1], one[0][-1] * (1 + 1e-6)], -one[1])
    found = distances(spoilt, one)
    assert found["figures"] > PRECISIONS["fp64"].figures and found["gradients"] == pytest.approx(2)
    assert not any(are_close(found, precision) for precision in PRECISIONS.values())
    lost = distances(([*one[0][:-1], math.nan], one[1]), one)
    assert lost["gradients"] == 0 and not are_close(lost, PRECISIONS["fp64"])
