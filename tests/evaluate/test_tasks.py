"""Tests the figures that come of scores, against sums written out."""

import math
from pathlib import Path

import pytest

from megazero.data.tokenizers import ByteTokenizer
from megazero.evaluate.inputs import Question
from megazero.evaluate.scoring import Score
from megazero.evaluate.tasks import choices, lambada, perplexity

BYTES, FILE = ByteTokenizer(), Path("file")


def test_words_and_bytes_are_counted_in_the_text_as_it_was() -> None:
    texts = ["näive @-@ ly  done\n", "", "one"]
    task = perplexity(FILE, texts, BYTES, natural=lambda text: text.replace(" @-@ ", "-"), stride=3)
    assert [len(request.ids) for request in task.requests] == [1 + 16, 1, 1 + 3] and task.stride == 3
    figures = task.figures([Score(-30.0, False), Score(0.0, True), Score(-6.0, False)])
    # Words: 4 and what is behind the line end; nothing, which counts 1; 1.
    counts = {"texts": 3, "tokens": 19, "words": 7, "bytes": 23}
    assert {name: figures[name] for name in counts} == counts
    assert figures["word_perplexity"] == pytest.approx(math.exp(36 / 7), rel=1e-15)
    assert figures["byte_perplexity"] == pytest.approx(math.exp(36 / 23), rel=1e-15)
    assert figures["bits_per_byte"] == pytest.approx(36 / 23 / math.log(2), rel=1e-15)
    assert figures["token_perplexity"] == pytest.approx(math.exp(36 / 19), rel=1e-15)
    assert figures["log_likelihood"] == -36


def test_figures_that_no_float_holds_are_none() -> None:
    task = perplexity(FILE, ["a"], BYTES, natural=str, stride=None)
    assert task.figures([Score(-1000.0, False)])["word_perplexity"] is None
    assert task.figures([Score(math.nan, False)])["log_likelihood"] is None


def test_last_words() -> None:
    task = lambada(FILE, ["a longer one", "one"], BYTES)
    assert [bytes(list(request.ids[request.start :])) for request in task.requests] == [b" one", b" one"]
    assert list(task.requests[1].ids[:1]) == [BYTES.eod]
    figures = task.figures([Score(-2.0, True), Score(-4.0, False)])
    assert figures["acc"] == 0.5 and figures["texts"] == 2
    # The sample's deviation, sqrt(0.5), over the root of the number.
    assert figures["acc_stderr"] == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    assert figures["perplexity"] == pytest.approx(math.exp(3))


def test_choices_by_themselves_by_characters_and_by_bytes() -> None:
    questions = [Question("c", ("ab", "éééé", "abcdef"), label) for label in (0, 1, 2)]
    task = choices(FILE, questions, BYTES, delimiter=": ")
    assert bytes(list(task.requests[1].ids)) == "c: éééé".encode() and task.requests[1].start == 1
    own = [Score(-6.0, False), Score(-8.0, True), Score(-12.0, False)]
    # -6, -8, -12; by characters -3, -2, -2, of which the first counts; by bytes -3, -1, -2.
    figures = task.figures(own * 3)
    assert [figures[name] for name in ("acc", "acc_norm", "acc_bytes")] == [1 / 3] * 3
    only = choices(FILE, questions[1:2], BYTES, delimiter=" ").figures(own)
    assert only == {
        "acc": 0.0,
        "acc_stderr": None,
        "acc_norm": 1.0,
        "acc_norm_stderr": None,
        "acc_bytes": 1.0,
        "acc_bytes_stderr": None,
        "questions": 1,
    }
