"""The tasks of an evaluation: what each asks the model, and the figures that come of its answers.  Pure.

    perplexity  exp(-log-likelihood / words), where words are those of the file, however many tokens they take, so that
                models with different tokenizers can be compared; the same for each byte and token
    lambada     is the last word what the model would write (arXiv 1606.06031): are all its tokens the most likely ones
    choices     is the right choice the most likely one: by itself (acc), for each of its characters (acc_norm), for
                each of its bytes (acc_bytes)

Names and rules are those of lm-evaluation-harness.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megazero.data.tokenizers import Tokenizer
from megazero.evaluate.inputs import Question
from megazero.evaluate.scoring import Score
from megazero.evaluate.windows import Request, continuation, whole

# A figure is None where it is no number that a float holds.
Figures = Mapping[str, float | int | None]


class Task(NamedTuple):
    """A file's requests, and the function from their scores to figures.  stride: of windows; None: the length."""

    name: str
    file: Path
    requests: Sequence[Request]
    figures: Callable[[Sequence[Score]], Figures]
    stride: int | None = None


def perplexity(
    file: Path, texts: Sequence[str], tokenizer: Tokenizer, *, natural: Callable[[str], str], stride: int | None
) -> Task:
    """Return the task of texts, each of them by itself.

    natural: turns a text into the one that the model reads.  Words and bytes are counted in the text as it was before;
    words are what is between runs of white space, so that such a run at an end makes one more, which is empty.
    """
    requests = [whole(tokenizer, natural(text)) for text in texts]
    counts = {
        "texts": len(texts),
        "tokens": sum(len(request.ids) - 1 for request in requests),
        "words": sum(len(re.split(r"\s+", text)) for text in texts),
        "bytes": sum(len(text.encode()) for text in texts),
    }

    def figures(scores: Sequence[Score]) -> Figures:
        total = math.fsum(score.log_likelihood for score in scores)
        return {
            "word_perplexity": _finite(lambda: math.exp(-total / counts["words"])),
            "byte_perplexity": _finite(lambda: math.exp(-total / counts["bytes"])),
            "bits_per_byte": _finite(lambda: -total / counts["bytes"] / math.log(2)),
            "token_perplexity": _finite(lambda: math.exp(-total / counts["tokens"])),
            "log_likelihood": _finite(lambda: total),
            **counts,
        }

    return Task("perplexity", file, requests, figures, stride)


def lambada(file: Path, passages: Sequence[str], tokenizer: Tokenizer) -> Task:
    """Return the task of texts whose last word, behind their last blank, is asked for."""
    parts = [passage.rpartition(" ") for passage in passages]
    requests = [continuation(tokenizer, context, f" {word}") for context, _, word in parts]

    def figures(scores: Sequence[Score]) -> Figures:
        mean = math.fsum(score.log_likelihood for score in scores) / len(scores)
        right = [score.is_greedy for score in scores]
        return {**_accuracy("acc", right), "perplexity": _finite(lambda: math.exp(-mean)), "texts": len(scores)}

    return Task("lambada", file, requests, figures)


def choices(file: Path, questions: Sequence[Question], tokenizer: Tokenizer, *, delimiter: str) -> Task:
    """Return the task of questions with choices.  delimiter: stands between a context and a choice."""
    requests = [
        continuation(tokenizer, question.context, delimiter + choice)
        for question in questions
        for choice in question.choices
    ]

    def figures(scores: Sequence[Score]) -> Figures:
        answered = list(_answered(questions, scores))
        sizes: dict[str, Callable[[str], int]] = {
            "acc": lambda choice: 1,
            "acc_norm": len,
            "acc_bytes": lambda choice: len(choice.encode()),
        }
        found: dict[str, float | int | None] = {}
        for name, size in sizes.items():
            right = [
                _first_best([likelihood / size(choice) for choice, likelihood in zip(each.choices, own, strict=True)])
                == each.label
                for each, own in answered
            ]
            found |= _accuracy(name, right)
        return {**found, "questions": len(questions)}

    return Task("choices", file, requests, figures)


def _answered(questions: Sequence[Question], scores: Sequence[Score]) -> Iterator[tuple[Question, list[float]]]:
    """Yield every question with its choices' log-likelihoods."""
    start = 0
    for question in questions:
        end = start + len(question.choices)
        yield question, [score.log_likelihood for score in scores[start:end]]
        start = end


def _first_best(values: Sequence[float]) -> int:
    return values.index(max(values))


def _accuracy(name: str, right: Sequence[bool]) -> dict[str, float | int | None]:
    """Return the mean and its standard error, which one answer alone has none of."""
    mean, number = sum(right) / len(right), len(right)
    error = math.sqrt(mean * (1 - mean) / (number - 1)) if number > 1 else None
    return {name: mean, f"{name}_stderr": error}


def _finite(figure: Callable[[], float]) -> float | None:
    try:
        value = figure()
    except OverflowError:
        return None
    return value if math.isfinite(value) else None
