"""Tests of training steps for benchmarks: their bytes and memory limit, and the search for the largest that fits."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import Place
from steps import Held, Steps, configuration, configuration_of, crossing, held, largest_that_fits

from megazero.errors import ConfigError
from megazero.parallel.launch import Launch

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 64,
    "micro_batch_size": 4,
    "reduce_bucket_size": 4096,
}


@given(answer=st.integers(0, 300), guess=st.integers(-5, 400))
def test_the_largest_that_fits_is_found_from_any_guess(answer: int, guess: int) -> None:
    tried: dict[int, bool] = {}

    def fits(number: int) -> bool:
        assert number >= 1 and number not in tried, f"{number} was tried already, or makes no sense"
        tried[number] = number <= answer
        return tried[number]

    assert largest_that_fits(fits, guess) == answer
    assert tried[answer + 1] is False and (answer == 0 or tried[answer] is True)
    if guess == answer > 0:
        assert len(tried) == 2


@given(st.integers(0, 1000), st.integers(1, 50), st.integers(0, 47))
def test_a_straight_line_is_followed(base: int, slope: int, number: int) -> None:
    points = [(at, base + slope * at) for at in (4, 12)]
    assert crossing(base + slope * number, points) == number
    assert crossing(base + slope * (number + 1) - 1, points) == number


def test_a_line_that_does_not_rise_says_little() -> None:
    assert crossing(100, [(4, 50), (12, 50)]) == 12
    assert crossing(1000, [(4, 50), (12, 51)]) == 48


def test_settings_are_those_of_the_command_line() -> None:
    config = configuration({**TINY, "zero_config": "C5", "tensor_model_parallel_size": 2}, 4)
    assert config.zero.zero_stage == 2 and config.activations.checkpoint_in_cpu is True
    with pytest.raises(ConfigError, match="--num-attention-heads"):
        configuration({**TINY, "num_attention_heads": 5}, 1)
    with pytest.raises(ConfigError, match="tensor-model-parallel-size"):
        configuration({**TINY, "tensor_model_parallel_size": 3}, 4)


def alone(flags: str) -> Steps:
    """Return the steps of a run of one process with a global batch of 4 samples."""
    words = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    place = Place(Launch(0, 1, 0), torch.device("cpu"), lambda: None)
    return Steps(configuration_of([*words, "--global-batch-size", "4", *flags.split()], 1), place)


def test_a_step_has_as_many_micro_batches_as_the_flags_say() -> None:
    whole, parts = alone("--micro-batch-size 4"), alone("--micro-batch-size 1")
    assert whole.tokens == parts.tokens == 4 * 16
    for number in range(3):
        one, four = whole.batch(number), parts.batch(number)
        assert [part.first_sample for part in four.micro_batches] == [4 * number + row for row in range(4)]
        tokens = torch.cat([part.tokens for part in four.micro_batches])
        assert torch.equal(one.micro_batches[0].tokens, tokens)
        assert parts.take(four) == pytest.approx(whole.take(one), rel=1e-5)
    whole.close()
    parts.close()


def test_a_loss_scale_that_is_too_large_falls() -> None:
    steps = alone("--fp16 --lr 1e-2")
    losses = [steps.take(steps.batch(0)) for _ in range(40)]
    steps.close()
    assert losses[0] == losses[1] and losses[-1] < losses[0] - 0.1


@pytest.mark.gloo
def test_what_is_held_and_what_is_refused() -> None:
    """The bytes of C5 on 4 processes are those of the ZeRO paper's formulas, and a step under too low a limit fails."""
    config = configuration({**TINY, "zero_config": "C5", "tensor_model_parallel_size": 2}, 4)
    found = held(config, 4, device="cpu")
    assert isinstance(found, Held)
    # fp32, stage 2, 2 data-parallel processes: 4 + 4/2 + 8/2 bytes a parameter, padding and a few scalars aside
    assert 10 * found.numel <= found.model_states <= 10.1 * found.numel + 1024
    assert found.host == 2 * (4 * 16 * 32 * 4) // 2  # b s h fp32 a layer, half of it on each tensor-parallel process
    assert found.sent["dp"] >= 2 * 4 * found.numel // 2
    assert found.rest > 0 and found.peak == found.model_states + found.checkpoints + found.buffers + found.rest
    assert held(config, 4, device="cpu", limit_bytes=2 * found.peak) is not None
    assert held(config, 4, device="cpu", limit_bytes=found.model_states) is None
