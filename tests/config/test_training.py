"""Tests of the training settings: batch, length, evaluation, exits and compilation."""

import pytest
from pydantic import ValidationError
from support.each import each

from megazero.command_line.parse import parse
from megazero.config import derived
from megazero.config.run import TrainingConfig
from megazero.config.values import as_quantity, as_span
from megazero.errors import ConfigError


def test_defaults_are_megatrons() -> None:
    training = TrainingConfig(micro_batch_size=4)
    assert (training.seed, training.eval_iters, training.eval_interval) == (1234, 100, 1000)
    assert training.global_batch_size is None and training.train_iters is None and training.train_samples is None
    assert training.exit_interval is None and training.exit_duration_in_mins is None
    assert training.exit_status_when_stopped is None
    assert training.compile == "auto"


@each(
    ("name", "value"),
    [
        ("micro_batch_size", 0),
        ("train_iters", 0),
        ("seed", -1),
        ("seed", 2**32),
        ("exit_duration_in_mins", 0),
        ("exit_status_when_stopped", 0),
        ("exit_status_when_stopped", 3),
        ("exit_status_when_stopped", 126),
    ],
)
def test_out_of_range_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValidationError, match=name):
        TrainingConfig(**{"micro_batch_size": 4, name: value})


@each("choice", ["auto", "on", "max", "off"])
def test_compile_is_a_choice_of_four(choice: str) -> None:
    assert TrainingConfig(micro_batch_size=4, compile=choice).compile == choice


@each("choice", [True, False, "yes", "inductor", ""])
def test_anything_else_is_no_choice(choice: object) -> None:
    with pytest.raises(ValidationError, match="compile"):
        TrainingConfig(micro_batch_size=4, compile=choice)


def test_lengths_and_ramps_of_published_scripts() -> None:
    words = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 2048 --vocab-size 100 --mock-data
    --micro-batch-size 2 --global-batch-size 512 --lr 6e-5 --rampup-batch-size 32 32 2_000_000
    --train-samples 220_000_000 --train-tokens 300B --lr-decay-style cosine --lr-decay-tokens 260000000000
    --lr-warmup-samples 216_320 --weight-decay 0.1 --override-opt_param-scheduler
    --start-weight-decay 0.04 --end-weight-decay 0.4 --weight-decay-incr-style cosine"""
    parsed = parse(words.split(), world_size=8)
    assert [notice.split(":")[0] for notice in parsed.notices] == [
        "--weight-decay 0.1",
        "--override-opt-param-scheduler",
    ]
    run = derived.run_length(parsed.config, 8)
    assert (run.samples, run.sizes.sizes[:2], len(run.sizes.sizes)) == (300 * 10**9 // 2048, (32, 64), 16)
    lengths = derived.rate_lengths(parsed.config.optimizer, run)
    assert (lengths.unit, lengths.warmup, lengths.decay) == ("samples", 216_320, 260 * 10**9 / 2048)


@each(
    ("word", "span", "alone"),
    [
        ("3-5", range(3, 6), False),
        ("0-0", range(1), False),
        ("5-3", None, False),
        ("5", None, True),
        (" 3-5", None, False),
        ("-3-5", None, False),
        ("", None, False),
        ("1.0", None, False),
    ],
)
def test_spans_include_both_ends(word: str, span: range | None, alone: bool) -> None:
    assert as_span(word) == span
    assert as_span(word, alone=True) == (range(5, 6) if alone else span)


@each("words", ["--num-layers 12K", "--train-tokens 1.5", "--train-tokens 1X", "--train-tokens 0.0001K"])
def test_suffixes_are_for_whole_samples_and_tokens(words: str) -> None:
    with pytest.raises(ConfigError, match=r"is a whole number"):
        parse(words.split())
    assert (as_quantity("2.5k"), as_quantity("1T"), as_quantity(7)) == (2500, 10**12, 7)
