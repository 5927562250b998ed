"""Preprocesses texts into token files.

The input is cut into chunks, any number of workers encode them, and this process writes them in the input's order, so
the files are the same for any number of workers.  Every *partition* of the input that is finished is synced to the disk
and recorded in a journal, after which a later run continues.  Files get their final names when everything is written.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megazero.console import Console
from megazero.data.indexed_dataset import bin_path, idx_path, token_dtype
from megazero.data.sidecar import Sidecar, load_sidecar, loss_mask_prefix, sidecar_bytes, sidecar_path
from megazero.data.storage import output_problems
from megazero.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from megazero.errors import DataError, Problem, raise_problems
from megazero.files import move_into_place, remove_file
from megazero.prepare.text.chunks import CHUNK_BYTES, WHOLE, Chunk, DocumentRules, Shard, find_chunks, rule_problems
from megazero.prepare.text.inputs import InputFile, find_inputs, pipe_problems
from megazero.prepare.tokens.encode import Encoded, EncodeRules, chunk_encoder, encode_with
from megazero.prepare.tokens.encoders import fastest_encoder
from megazero.prepare.tokens.indexed_writer import IndexedDatasetWriter, Position, Spool, publish_corpus
from megazero.prepare.tokens.journal import WorkJournal
from megazero.prepare.tokens.progress import TextProgress, WorkCount
from megazero.prepare.tokens.workers import worker_pool
from megazero.units import format_bytes

# The number of bytes of input between two entries in the journal: the most that an interruption costs.
PARTITION_BYTES = 256 << 20
# The number of bad lines that are shown one by one.
SHOWN_BAD_LINES = 20


@dataclass(frozen=True)
class PreprocessRequest:
    """A job of preprocessing: --input, --output-prefix, tokenizer flags, and so on.

    workers: number of processes; 1 encodes in this one.  log_interval: documents between two lines of progress.
    split_documents: longest sequence in tokens, 0 for any.  partitions: parts of the input after each of which a run
    can be resumed, 0 for one every PARTITION_BYTES.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerSpec
    rules: DocumentRules = field(default_factory=DocumentRules)
    append_eod: bool = False
    split_documents: int = 0
    workers: int = 1
    log_interval: int = 1000
    shard: Shard = WHOLE
    partitions: int = 0
    resume: bool = False
    skip_bad_lines: bool = False

    @property
    def prefix(self) -> str:
        """The prefix of all files that are written, with the shard's number."""
        shard = self.shard
        return self.output_prefix + (f"_shard_{shard.index:05d}_of_{shard.count:05d}" if shard.count > 1 else "")

    def corpus_prefixes(self) -> list[str]:
        """Return the prefix of a corpus for every key; for dialogues those of the one corpus and its mask."""
        if self.rules.answers:
            named = f"{self.prefix}_{self.rules.json_keys[-1]}_document"
            return [named, loss_mask_prefix(named)]
        return [f"{self.prefix}_{key}_document" for key in self.rules.json_keys]

    @property
    def num_masks(self) -> int:
        """The number of corpora, the last of all, that hold a mask in place of tokens."""
        return 1 if self.rules.answers else 0


class WrittenCorpus(NamedTuple):
    """The prefix and the sidecar of a corpus that was written."""

    prefix: str
    sidecar: Sidecar


EncodeChunks = Callable[[Iterable[Chunk]], Iterator[Encoded]]


class Preprocessed(NamedTuple):
    """The result of preprocessing; library: the encoder's, "" when an earlier run had encoded everything.

    bad_lines: the number of skipped lines.  bad_lines_file: the file that lists them.
    """

    corpora: list[WrittenCorpus]
    library: str
    bad_lines: int
    bad_lines_file: Path


def preprocess(request: PreprocessRequest, console: Console) -> Preprocessed:
    """Write {bin,idx,json} of a corpus for every key; return a description of the files.

    Raises DataError for input that cannot be read (file and line), and leaves earlier files untouched then.
    """
    files = _checked_inputs(request)
    scratch = Path(f"{request.prefix}.partial")
    with _encoding(request) as (tokenizer, encode):
        journal = WorkJournal(scratch.with_name(f".{scratch.name}"), _work(request, files), resume=request.resume)
        run = _PreprocessRun(request, files, tokenizer, journal, console)
        try:
            with journal:
                if journal.last is None or not journal.last["is_sealed"]:
                    run.write(encode)
                sealed = journal.last
                assert sealed is not None, "a run that ended well is in the journal"
                corpora = _publish(request, journal.folder, sealed)
        except BaseException:
            if journal.folder.exists():
                console.line(f"finished partitions are in {journal.folder}: --resume continues from there")
            raise
    return Preprocessed(corpora, run.library, sealed["bad_lines"], _bad_lines(request))


@contextmanager
def _encoding(request: PreprocessRequest) -> Iterator[tuple[Tokenizer, EncodeChunks]]:
    """Yield the tokenizer, and the function that encodes chunks, in this process or in workers."""
    rules = EncodeRules(request.rules, request.append_eod, request.split_documents, request.skip_bad_lines)
    if request.workers == 1:
        tokenizer = load_tokenizer(request.tokenizer)
        yield tokenizer, partial(map, encode_with(tokenizer, fastest_encoder(tokenizer), rules))
        return
    # A tokenizer takes a while to load: workers load theirs while this process loads its own.
    with worker_pool(partial(chunk_encoder, request.tokenizer, rules), request.workers) as encode:
        yield load_tokenizer(request.tokenizer), encode


def _checked_inputs(request: PreprocessRequest) -> list[InputFile]:
    """Return every file to read; raise DataError with all problems of files, rules and tokenizer."""
    problems: list[Problem] = []
    files: list[InputFile] = []
    try:
        files = find_inputs(request.inputs, request.rules.input_format)
    except DataError as error:
        problems.extend(error.problems)
    problems += rule_problems(files, request.rules)
    problems += pipe_problems(files, resumes=request.resume, num_shards=request.shard.count)
    problems += output_problems(request.output_prefix)
    if not 0 <= request.shard.index < request.shard.count:
        given = f"--shard-index {request.shard.index} --num-shards {request.shard.count}"
        problems.append(Problem(given, "shards count from 0", f"--shard-index 0 to {request.shard.count - 1}"))
    raise_problems(DataError, [*problems, *request.tokenizer.problems()])
    return files


def _work(request: PreprocessRequest, files: Sequence[InputFile]) -> dict[str, Any]:
    """Return everything that determines the output, for the journal."""
    return {
        "input": [[file.path, file.size, file.modified] for file in files],
        "rules": asdict(request.rules),
        "tokenizer": [request.tokenizer.type, request.tokenizer.digests()],
        "append_eod": request.append_eod,
        "split_documents": request.split_documents,
        "shard": asdict(request.shard),
        "chunk_bytes": CHUNK_BYTES,
    }


def _bad_lines(request: PreprocessRequest) -> Path:
    return Path(f"{request.prefix}_bad_lines.txt")


class _PreprocessRun:
    """A run from the journal's last state to the sealed corpora."""

    def __init__(
        self,
        request: PreprocessRequest,
        files: Sequence[InputFile],
        tokenizer: Tokenizer,
        journal: WorkJournal,
        console: Console,
    ) -> None:
        last: Mapping[str, Any] = journal.last or {}
        count = len(request.corpus_prefixes())
        self._request = request
        self._files = files
        self._tokenizer = tokenizer
        self._journal = journal
        self._console = console
        self.library = ""
        self._chunks = last.get("chunks", 0)
        self._input_bytes = last.get("input_bytes", 0)
        self._num_bad = last.get("bad_lines", 0)
        self._text_bytes = list(last.get("text_bytes", [0] * count))
        self._positions = [Position(*position) for position in last.get("positions", [()] * count)]
        self._bad_bytes = last.get("bad_bytes", 0)

    def write(self, encode: EncodeChunks) -> None:
        """Encode and write the remaining chunks, partition by partition; then seal the corpora."""
        request, dtype = self._request, token_dtype(self._tokenizer.vocab_size)
        chunks = find_chunks(self._files, request.rules, request.shard, request.rules.json_keys)
        partition = self._partition_bytes()
        if self._chunks:
            self._console.line(f"resuming after {format_bytes(self._input_bytes)} of input")
        with ExitStack() as stack:
            prefixes = request.corpus_prefixes()
            dtypes = [dtype] * (len(prefixes) - request.num_masks) + [np.dtype(np.uint8)] * request.num_masks
            writers = [
                IndexedDatasetWriter(prefix, kind, scratch=self._journal.folder, position=position)
                for prefix, kind, position in zip(prefixes, dtypes, self._positions, strict=True)
            ]
            for writer in writers:
                stack.callback(writer.discard)
            bad = Spool(self._journal.folder / _bad_lines(request).name, self._bad_bytes)
            stack.callback(bad.close)
            progress = self._progress()
            stack.enter_context(progress)
            for encoded in encode(islice(chunks, self._chunks, None)):
                self._print_notice(encoded)
                self._write_chunk(encoded, writers, bad)
                documents = len(encoded.texts[0].counts)
                tokens = sum(len(texts.tokens) for texts in encoded.texts[: len(writers) - request.num_masks])
                progress.advance(WorkCount(documents, tokens, encoded.input_bytes))
                if self._input_bytes // partition > (self._input_bytes - encoded.input_bytes) // partition:
                    self._finish(writers, bad, is_sealed=False)
            _refuse_empty(request, writers, self._text_bytes)
            self._seal(writers)
            self._finish(writers, bad, is_sealed=True)

    def _progress(self) -> TextProgress:
        written = self._positions[: len(self._positions) - self._request.num_masks]
        done = WorkCount(written[0].documents, sum(each.tokens for each in written), self._input_bytes)
        return TextProgress(self._console, self._total_bytes(), self._request.log_interval, done)

    def _partition_bytes(self) -> int:
        if any(file.is_pipe for file in self._files):
            return sys.maxsize  # a pipe cannot be resumed
        total = self._total_bytes()
        return max(1, total // self._request.partitions) if total and self._request.partitions else PARTITION_BYTES

    def _total_bytes(self) -> int:
        """Return the approximate number of bytes of this shard's input; 0 if it is unknown."""
        return sum(file.size for file in self._files) // self._request.shard.count

    def _print_notice(self, encoded: Encoded) -> None:
        """Print the encoder's notice after the first chunk."""
        if encoded.notice and not self.library:
            self._console.line(f"note: {encoded.notice}")
        self.library = encoded.library

    def _write_chunk(self, encoded: Encoded, writers: Sequence[IndexedDatasetWriter], bad: Spool) -> None:
        for index, (writer, texts) in enumerate(zip(writers, encoded.texts, strict=True)):
            writer.add(texts.tokens, texts.lengths, texts.counts)
            self._text_bytes[index] += texts.text_bytes
        for line in encoded.bad_lines:
            if self._num_bad < SHOWN_BAD_LINES:
                self._console.line(f"skipped {line}")
            content = line.encode(errors="replace") + b"\n"
            bad.write(content)
            self._num_bad += 1
            self._bad_bytes += len(content)
        self._chunks += 1
        self._input_bytes += encoded.input_bytes

    def _finish(self, writers: Sequence[IndexedDatasetWriter], bad: Spool, *, is_sealed: bool) -> None:
        """Sync everything to the disk, and record it in the journal."""
        bad.sync()
        positions = [writer.position if is_sealed else writer.sync() for writer in writers]
        self._journal.finish(
            {
                "chunks": self._chunks,
                "input_bytes": self._input_bytes,
                "positions": positions,
                "text_bytes": self._text_bytes,
                "bad_lines": self._num_bad,
                "bad_bytes": self._bad_bytes,
                "is_sealed": is_sealed,
            }
        )

    def _seal(self, writers: Sequence[IndexedDatasetWriter]) -> None:
        """Write every file that will be published to the scratch folder."""
        for index, (writer, text_bytes) in enumerate(zip(writers, self._text_bytes, strict=True)):
            writer.seal()
            if index >= len(writers) - self._request.num_masks:
                continue  # a mask is described by the sidecar of its tokens
            sidecar = _sidecar(self._request, self._tokenizer, writer, text_bytes)
            path = Spool(self._journal.folder / f"{Path(writer.prefix).name}.json")
            path.write(sidecar_bytes(sidecar))
            path.sync()
            path.close()


def _publish(request: PreprocessRequest, folder: Path, sealed: Mapping[str, Any]) -> list[WrittenCorpus]:
    """Rename all files to their final names; those that an interrupted run has renamed stay there."""
    bad, corpora = _bad_lines(request), []
    prefixes = request.corpus_prefixes()
    for prefix in prefixes:
        if not request.rules.answers:  # one of an earlier corpus of this name
            for path in (idx_path(loss_mask_prefix(prefix)), bin_path(loss_mask_prefix(prefix))):
                remove_file(path)
        publish_corpus(folder, prefix)
    for prefix in prefixes[: len(prefixes) - request.num_masks]:
        corpora.append(WrittenCorpus(prefix, load_sidecar(sidecar_path(prefix))))
    if sealed["bad_lines"]:
        move_into_place(folder / bad.name, bad)
    else:
        remove_file(bad)
    return corpora


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
        digests=writer.digests,
        split_documents=request.split_documents,
        tokenizer_paths=request.tokenizer.paths(),
        loss_mask=bool(request.rules.answers),
    )


def _refuse_empty(
    request: PreprocessRequest, writers: Sequence[IndexedDatasetWriter], text_bytes: Sequence[int]
) -> None:
    """Raise DataError for a corpus without text, or without answers; one shard of several may be empty."""
    if request.shard.count > 1:
        return
    names = ", ".join(request.inputs)
    problems = [
        Problem(f"--input {names}: {writer.num_documents} documents without any token under {key!r}", "has some text")
        for key, writer in zip(request.rules.json_keys, writers, strict=False)
        if not writer.num_tokens
    ]
    if request.rules.answers and not problems and not text_bytes[-1]:
        given = f"--input {names}: {writers[0].num_documents} documents without any answer"
        problems.append(Problem(given, "answers alone are learnt, so there is one"))
    raise_problems(DataError, problems)
