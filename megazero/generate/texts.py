"""The text of generated tokens, where it stops, and how it is written: as text, or as JSON lines."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megazero.data.tokenizers import Tokenizer
from megazero.files import written_aside
from megazero.generate.prompts import JSON_ENDING


class Text(NamedTuple):
    """A continuation of a prompt as text.

    sample: 1, 2, ... of one prompt.  num_tokens: as many as were drawn.  end: what ended it, "eod" (the end of a
    document), "stop" (a stop text) or "length".
    """

    prompt: str
    sample: int
    text: str
    num_tokens: int
    end: str


class StopTexts:
    """The texts at which a continuation is cut; also inside of a token, or across several."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]

    def are_in(self, prompt: Sequence[int], new: Sequence[int]) -> bool:
        """Return True if the text of the new tokens behind a prompt has a stop text."""
        text = continued(self._tokenizer, prompt, new)
        return any(stop in text for stop in self._stops)

    def cut(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """Return the text of the new tokens before the first stop text."""
        text = continued(self._tokenizer, prompt, new)
        places = [text.find(stop) for stop in self._stops]
        return text[: min((place for place in places if place >= 0), default=len(text))]


def continued(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of new tokens behind a prompt; ids past the tokenizer's have none.

    By some tokenizers the first token of a text loses its blank, so they are decoded behind the prompt's last one.
    """
    known = [token for token in new if token < tokenizer.vocab_size]
    before, whole = tokenizer.decode(prompt[-1:]), tokenizer.decode([*prompt[-1:], *known])
    return whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(known)


def shown(texts: Sequence[Text], num_samples: int) -> Iterator[str]:
    """Yield lines to read: each prompt with its continuation, under a heading where there are several."""
    for number, text in enumerate(texts):
        headings = [f"prompt {number // num_samples + 1} of {len(texts) // num_samples}"] * (len(texts) > num_samples)
        headings += [f"sample {text.sample} of {num_samples}"] * (num_samples > 1)
        if headings:
            yield f"--- {', '.join(headings)}"
        yield text.prompt + text.text


def write_texts(path: Path, texts: Sequence[Text], num_samples: int) -> None:
    """Write the texts whole or not at all, as JSON lines if the name ends in .jsonl, else as `shown` does.

    Raises DataError when the file cannot be written.
    """
    is_json = path.name.lower().endswith(JSON_ENDING)
    lines = (
        (json.dumps(_described(text), ensure_ascii=False) for text in texts) if is_json else shown(texts, num_samples)
    )
    with written_aside(path) as stream:
        for line in lines:
            stream.write(line.encode() + b"\n")


def _described(text: Text) -> dict[str, str | int]:
    return {
        "prompt": text.prompt,
        "sample": text.sample,
        "text": text.text,
        "tokens": text.num_tokens,
        "end": text.end,
    }
