"""Samples the text that a tokenizer learns from: a bounded share of a corpus, taken evenly."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megazero.console import Console
from megazero.errors import DataError, Problem
from megazero.prepare.text.chunks import DocumentRules, find_chunks, readable_files
from megazero.prepare.text.documents import read_documents
from megazero.prepare.text.inputs import InputFile

_MEBIBYTE = 1 << 20


class TrainingText(NamedTuple):
    """Documents, or their beginnings, and the size of all of them in UTF-8 bytes."""

    texts: list[str]
    num_bytes: int


def sample_text(inputs: Sequence[str], rules: DocumentRules, max_bytes: int, console: Console) -> TrainingText:
    """Return about `max_bytes` bytes of text, sampled evenly from the input; raise DataError if there is none.

    Where the size of the input is known, a share of every chunk is read, so little of it is decoded.  Where it is not
    (standard input), documents are thinned out while they are read.
    """
    files = readable_files(inputs, rules)
    parts = (
        _shares(files, rules, max_bytes, console)
        if all(file.size for file in files)
        else _every_so_many(files, rules, max_bytes)
    )
    texts = [text for text in parts if text]
    if not texts:
        raise DataError(Problem(f"--input {' '.join(inputs)}", "has some text to learn from"))
    return TrainingText(texts, sum(len(text.encode()) for text in texts))


def _shares(files: Sequence[InputFile], rules: DocumentRules, max_bytes: int, console: Console) -> Iterator[str]:
    """Yield the beginning of every chunk, in proportion to its part of the input.

    A chunk with too little text is made up for by the next one: text is spread unevenly over a compressed file's bytes.
    """
    size, left = sum(file.size for file in files), 0.0
    with console.progress() as progress:
        task = progress.add_task("reading, MiB", total=size / _MEBIBYTE)
        for chunk in find_chunks(files, rules, columns=rules.json_keys):
            left += max_bytes * chunk.input_bytes / size
            for document in read_documents(chunk, rules):
                for text in document.texts:
                    if left > 0:
                        text = text[: int(left) + 1]
                        left -= len(text.encode())
                        yield text
                if left <= 0:
                    break
            progress.advance(task, chunk.input_bytes / _MEBIBYTE)


def _every_so_many(files: Sequence[InputFile], rules: DocumentRules, max_bytes: int) -> Iterator[str]:
    """Yield a thinned-out share: whenever too many documents are held, every second one is dropped.

    In the end the held text is one to two times max_bytes, and the same share of every document is taken.
    """
    held: list[str] = []
    size, step = 0, 1
    documents = (
        text
        for chunk in find_chunks(files, rules, columns=rules.json_keys)
        for document in read_documents(chunk, rules)
        for text in document.texts
    )
    for number, text in enumerate(documents):
        if number % step:
            continue
        held.append(text)
        size += len(text)
        while size > 2 * max_bytes and len(held) > 1:
            del held[1::2]
            size, step = sum(map(len, held)), 2 * step
    share = min(1.0, max_bytes / max(1, sum(len(text.encode()) for text in held)))
    yield from (text[: max(1, round(share * len(text)))] for text in held)
