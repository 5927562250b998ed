"""Preprocessing: texts become token files.

Every worker takes every W-th chunk of the input, so it needs no messages to know its share; the parent takes the
results in the order of the chunks, so the files are the same for any number of workers.  A worker that runs ahead
blocks on its pipe until the parent has taken what it made.  Nothing gets its final name before everything is written.
"""

import multiprocessing
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megazero.console import Console
from megazero.data.documents import Chunk, DocumentRules, find_chunks, input_problems, read_documents
from megazero.data.files import remove_file
from megazero.data.indexed_dataset import IndexedDatasetWriter, token_dtype
from megazero.data.sidecar import Sidecar, sidecar_path, write_sidecar
from megazero.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from megazero.errors import DataError, Problem, UserError, raise_problems
from megazero.units import format_bytes, format_count, format_duration


@dataclass(frozen=True)
class PreprocessRequest:
    """What to do: --input, --output-prefix, tokenizer flags, and so on.

    workers: processes; 1 does the work in this one.  log_interval: documents between two lines of progress.
    """

    inputs: tuple[Path, ...]
    output_prefix: str
    tokenizer: TokenizerSpec
    rules: DocumentRules = field(default_factory=DocumentRules)
    append_eod: bool = False
    workers: int = 1
    log_interval: int = 1000


class Corpus(NamedTuple):
    """A corpus that was written."""

    prefix: str
    sidecar: Sidecar


class EncodedTexts(NamedTuple):
    """Documents of one chunk under one key: tokens [sum of lengths], lengths int32 [documents], bytes of text."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    text_bytes: int


class EncodedChunk(NamedTuple):
    """One chunk, encoded; `texts` has an entry for every key."""

    input_bytes: int
    texts: tuple[EncodedTexts, ...]


class _Failure(NamedTuple):
    """What a worker sends instead of a result: the user's problems, or the traceback of a bug."""

    problems: tuple[Problem, ...]
    trace: str


def preprocess(request: PreprocessRequest, console: Console) -> list[Corpus]:
    """Write OUTPUT-PREFIX_KEY_document.{bin,idx,json} for every key; returns what was written.

    Raises DataError for input that cannot be read (file and line), and leaves earlier files untouched then.
    """
    problems = [*_key_problems(request.rules.json_keys), *input_problems(request.inputs, request.rules)]
    raise_problems(DataError, [*problems, *request.tokenizer.problems()])
    chunks = find_chunks(request.inputs, request.rules)
    tokenizer = load_tokenizer(request.tokenizer)
    prefixes = [f"{request.output_prefix}_{key}_document" for key in request.rules.json_keys]
    text_bytes = [0] * len(prefixes)
    progress = _Progress(console, chunks, request.log_interval)
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, dtype)) for prefix in prefixes]
        for encoded in stack.enter_context(_encoded_chunks(request, tokenizer, chunks)):
            for index, (writer, texts) in enumerate(zip(writers, encoded.texts, strict=True)):
                writer.add_documents(texts.tokens, texts.lengths.tolist())
                text_bytes[index] += texts.text_bytes
            progress.advance(len(encoded.texts[0].lengths), encoded.input_bytes)
        _refuse_empty(request, writers)
        for prefix in prefixes:
            remove_file(sidecar_path(prefix))
    sidecars = [_sidecar(request, tokenizer, writer, size) for writer, size in zip(writers, text_bytes, strict=True)]
    for prefix, sidecar in zip(prefixes, sidecars, strict=True):
        write_sidecar(prefix, sidecar)
    return [Corpus(prefix, sidecar) for prefix, sidecar in zip(prefixes, sidecars, strict=True)]


def _key_problems(keys: tuple[str, ...]) -> list[Problem]:
    once = tuple(dict.fromkeys(keys))
    if once == keys:
        return []
    given, legal = (f"--json-keys {' '.join(names)}" for names in (keys, once))
    return [Problem(given, "every key has a corpus of its own, so it is given once", legal)]


def _sidecar(
    request: PreprocessRequest, tokenizer: Tokenizer, writer: IndexedDatasetWriter, text_bytes: int
) -> Sidecar:
    return Sidecar(
        documents=writer.num_documents,
        sequences=writer.num_sequences,
        tokens=writer.num_tokens,
        text_bytes=text_bytes,
        tokenizer_type=request.tokenizer.type,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        append_eod=request.append_eod,
        tokenizer_files=request.tokenizer.digests(),
        token_bytes=tokenizer.token_bytes(),
    )


def encode_chunk(chunk: Chunk, rules: DocumentRules, tokenizer: Tokenizer, *, append_eod: bool) -> EncodedChunk:
    """Read and encode one chunk.  A document without tokens gets no end-of-document token: its length is 0."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = [tokenizer.eod] if append_eod else []
    pieces: list[list[NDArray[Any]]] = [[] for _ in rules.json_keys]
    sizes = [0] * len(rules.json_keys)
    for document in read_documents(chunk, rules):
        for index, text in enumerate(document.texts):
            ids = tokenizer.encode(text)
            pieces[index].append(np.array(ids + end if ids else ids, dtype))
            sizes[index] += document.text_bytes[index]
    return EncodedChunk(
        chunk.stop - chunk.start,
        tuple(_joined(parts, size, dtype) for parts, size in zip(pieces, sizes, strict=True)),
    )


def _joined(parts: list[NDArray[Any]], text_bytes: int, dtype: "np.dtype[Any]") -> EncodedTexts:
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype)
    return EncodedTexts(tokens, np.array([len(part) for part in parts], np.int32), text_bytes)


def _refuse_empty(request: PreprocessRequest, writers: Sequence[IndexedDatasetWriter]) -> None:
    names = ", ".join(map(str, request.inputs))
    problems = [
        Problem(f"--input {names}: {writer.num_documents} documents without any token under {key!r}", "has some text")
        for key, writer in zip(request.rules.json_keys, writers, strict=True)
        if not writer.num_tokens
    ]
    if problems:
        raise DataError(*problems)


@contextmanager
def _encoded_chunks(
    request: PreprocessRequest, tokenizer: Tokenizer, chunks: Sequence[Chunk]
) -> Iterator[Iterator[EncodedChunk]]:
    """An iterator over the encoded chunks, in order; worker processes live as long as the `with` block."""
    workers = min(request.workers, len(chunks))
    if workers <= 1:
        rules = request.rules
        yield (encode_chunk(chunk, rules, tokenizer, append_eod=request.append_eod) for chunk in chunks)
        return
    # spawn, not fork: the tokenizer libraries hold threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for worker in range(workers):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(request, chunks[worker::workers], sending), daemon=True)
            process.start()
            sending.close()  # so that a worker's death reads as the end of its pipe
            pipes.append(receiving)
            processes.append(process)
        yield (_receive(pipes[index % workers]) for index in range(len(chunks)))
    finally:
        for pipe in pipes:
            pipe.close()  # a worker still sending gets an error and ends
        for process in processes:
            process.terminate()
            process.join()


def _receive(pipe: Connection) -> EncodedChunk:
    try:
        item = pipe.recv()
    except EOFError as error:
        raise DataError(
            Problem("a preprocessing worker died", "it was killed, most likely for want of memory", "fewer --workers")
        ) from error
    if isinstance(item, _Failure):
        if item.problems:
            raise DataError(*item.problems)
        raise RuntimeError(f"a preprocessing worker failed:\n{item.trace}")
    assert isinstance(item, EncodedChunk)
    return item


def _work(request: PreprocessRequest, chunks: Sequence[Chunk], pipe: Connection) -> None:
    """A worker's life: encode its chunks in order, send each."""
    # Both mean that the parent is going, and has said why.
    with suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            tokenizer = load_tokenizer(request.tokenizer)
            for chunk in chunks:
                pipe.send(encode_chunk(chunk, request.rules, tokenizer, append_eod=request.append_eod))
        except BrokenPipeError:
            raise
        except UserError as error:
            pipe.send(_Failure(error.problems, ""))
        except Exception:
            pipe.send(_Failure((), traceback.format_exc()))


class _Progress:
    """Prints a line every `interval` documents, with rates and the time left by bytes of input."""

    def __init__(self, console: Console, chunks: Sequence[Chunk], interval: int) -> None:
        self._console = console
        self._total_bytes = sum(chunk.stop - chunk.start for chunk in chunks)
        self._interval = interval
        self._started = time.monotonic()
        self._documents = 0
        self._bytes = 0

    def advance(self, documents: int, input_bytes: int) -> None:
        """Count a chunk."""
        before = self._documents
        self._documents += documents
        self._bytes += input_bytes
        if self._documents // self._interval > before // self._interval:
            self._console.line(self._text(max(time.monotonic() - self._started, 1e-9)))

    def _text(self, seconds: float) -> str:
        left = seconds * (self._total_bytes - self._bytes) / max(self._bytes, 1)
        return (
            f"{self._documents} documents, {format_bytes(self._bytes)} of {format_bytes(self._total_bytes)}"
            f" | {format_count(self._documents / seconds)} documents/s | {self._bytes / seconds / 1e6:.1f} MB/s"
            f" | ETA {format_duration(left)}"
        )
