"""Tests of the global batch sizes of a run's steps against Megatron-LM's rules, re-told here and, if installed, run."""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.each import each

from megazero.config.step_sizes import StepSizes, read_rampup, read_schedule
from megazero.errors import Problem


def megatrons(start: int, increment: int, samples: int, batch: int, consumed: int) -> int:
    """Return Megatron-LM's global batch size after `consumed` samples."""
    if consumed > samples:
        return batch
    return start + int(consumed / (samples / ((batch - start) // increment))) * increment


def ramp(start: int, increment: int, samples: int, batch: int) -> StepSizes:
    found = read_rampup([str(start), str(increment), str(samples)], batch)
    assert isinstance(found, StepSizes)
    return found


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(1, 400))
def test_a_ramp_is_megatrons_after_any_samples(start: int, increment: int, count: int, samples: int) -> None:
    batch = start + count * increment
    found = ramp(start, increment, samples, batch)
    for consumed in range(samples + 3):
        assert found.at(consumed) == megatrons(start, increment, samples, batch, consumed)


def test_a_ramp_is_that_of_megatron_core() -> None:
    package = find_spec("megatron.core") if find_spec("megatron") else None
    if package is None:
        pytest.skip("megatron-core is not installed")
    (folder,) = package.submodule_search_locations or ()
    # The file alone: the package's import takes seconds.
    spec = spec_from_file_location("calculator", Path(folder) / "num_microbatches_calculator.py")
    assert spec is not None and spec.loader is not None
    calculator = module_from_spec(spec)
    spec.loader.exec_module(calculator)
    theirs = calculator.RampupBatchsizeNumMicroBatchesCalculator(512, 2, 4, False, 1, 32, 32, 20_000)
    found, consumed = ramp(32, 32, 20_000, 512), 0
    while consumed < 25_000:
        theirs.update(consumed, consistency_check=True)
        assert found.at(consumed) == theirs.get_current_global_batch_size()
        assert found.at(consumed) // 8 == theirs.get()
        consumed += found.at(consumed)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 300), st.integers(0, 500))
def test_steps_and_samples_are_those_of_counting(
    start: int, increment: int, count: int, samples: int, end: int
) -> None:
    found = ramp(start, increment, samples, start + count * increment)
    steps, consumed = 0, 0
    while consumed + found.at(consumed) <= end:
        assert found.samples_after(steps) == consumed
        assert found.steps_until(end, consumed=consumed) == found.steps_until(end) - steps
        consumed += found.at(consumed)
        steps += 1
    assert found.steps_until(end) == steps and found.samples_after(steps) == consumed
    assert found.samples_after(steps + 1, consumed=0) == found.samples_after(1, consumed=consumed)


def test_a_schedule_is_in_tokens_with_suffixes() -> None:
    found = read_schedule(["0:768 250B:1536", "0.5T:3072"], 2048)
    assert found == StepSizes((0, 250 * 10**9 // 2048, 500 * 10**9 // 2048), (768, 1536, 3072))
    assert read_schedule(["100:4,0:2"], 10) == StepSizes((0, 10), (2, 4))
    assert found.at(found.starts[1] - 1) == 768 and found.at(found.starts[1]) == 1536
    assert str(found) == "768 from sample 0 on, 1536 from sample 122070312 on, 3072 from sample 244140625 on"


@each(
    ("words", "rule", "legal"),
    [
        (["32", "32"], "three whole numbers", "START INCREMENT SAMPLES"),
        (["32", "0", "100"], "at least 1", "START INCREMENT SAMPLES"),
        (["32", "a", "100"], "three whole numbers", "START INCREMENT SAMPLES"),
        (["64", "32", "100"], "from START, here 64, to --global-batch-size, here 64", "a START below 64"),
        (["16", "20", "100"], "INCREMENT divides the 64 - 16 = 48 samples", "such as 4, --global-batch-size 76"),
    ],
)
def test_a_wrong_ramp(words: list[str], rule: str, legal: str) -> None:
    found = read_rampup(words, 64)
    assert isinstance(found, Problem) and rule in found.rule and legal in found.legal
    assert found.given == f"--rampup-batch-size {' '.join(words)}"


@each(
    ("words", "rule"),
    [
        (["40:8"], "from 0 tokens on"),
        ([","], "from 0 tokens on"),
        (["0:8 16"], "an entry is"),
        (["0:8 -4:16"], "an entry is"),
        (["0:0"], "an entry is"),
        (["0:8 15:16"], "differ by at least one sample, which is 16 tokens"),
    ],
)
def test_a_wrong_schedule(words: list[str], rule: str) -> None:
    found = read_schedule(words, 16)
    assert isinstance(found, Problem) and rule in found.rule and found.legal
