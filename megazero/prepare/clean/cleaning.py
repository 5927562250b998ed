"""Cleans a corpus: writes the documents that pass all steps, and counts those that every step has dropped.

The chosen steps are applied to every document in this order, up to the first that drops it:

    fix text -> characters -> printable -> languages -> exact duplicates -> near duplicates

so that lengths, languages and duplicates are those of mended texts, and the slow steps have the fewest documents.
Documents stay in order; everything else in an object besides its text is copied unchanged.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megazero.console import Console
from megazero.errors import DataError, Problem, UserError, raise_problems
from megazero.prepare.clean.cleaning_steps import Characters, Dropped, FixText, Languages, Printable, Step
from megazero.prepare.clean.deduplication import (
    DEFAULT_NEAR_THRESHOLD,
    EXACT,
    NEAR,
    NEAR_THRESHOLDS,
    ExactDuplicates,
    NearDuplicates,
)
from megazero.prepare.text.bad_lines import BadLines
from megazero.prepare.text.chunks import DocumentRules, find_chunks, readable_files
from megazero.prepare.text.documents import read_objects
from megazero.prepare.text.inputs import find_inputs
from megazero.prepare.text.jsonl_output import ending_problems, json_line, written_lines
from megazero.units import format_bytes

_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class StepChoice:
    """The chosen steps and their limits; each field is the flag of its name, and None or empty leaves a step out."""

    fix_text: bool = False
    min_characters: int | None = None
    max_characters: int | None = None
    min_printable: float | None = None
    languages: tuple[str, ...] = ()
    min_language_probability: float | None = None
    deduplicate: tuple[str, ...] = ()
    near_threshold: float | None = None

    def problems(self) -> list[Problem]:
        """Return the problems of all fields."""
        found = []
        least, most = self.min_characters, self.max_characters
        if least is not None and most is not None and least > most:
            found.append(Problem(f"--min-characters {least} --max-characters {most}", "some length lies between them"))
        for flag, count in (("--min-characters", least), ("--max-characters", most)):
            if count is not None and count < 0:
                found.append(Problem(f"{flag} {count}", "is a number of characters", "0 or more"))
        for name in ("min_printable", "min_language_probability"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                found.append(Problem(f"--{name.replace('_', '-')} {value}", "is a fraction", "0 to 1"))
        if self.min_language_probability is not None and not self.languages:
            given = f"--min-language-probability {self.min_language_probability}"
            found.append(Problem(given, "goes with languages", "--languages en"))
        low, high = NEAR_THRESHOLDS
        if self.near_threshold is not None and not low <= self.near_threshold <= high:
            found.append(Problem(f"--near-threshold {self.near_threshold}", "is a similarity", f"{low} to {high}"))
        if self.near_threshold is not None and NEAR not in self.deduplicate:
            found.append(Problem(f"--near-threshold {self.near_threshold}", "goes with near", "--deduplicate near"))
        return found

    def steps(self) -> list[Step]:
        """Return the steps in their order; raises DataError for every missing library or unknown language."""
        lengths = self.min_characters, self.max_characters
        printable, threshold = self.min_printable, _or_default(self.near_threshold, DEFAULT_NEAR_THRESHOLD)
        probability = _or_default(self.min_language_probability, 0.0)
        makers: list[tuple[bool, Callable[[], Step]]] = [
            (self.fix_text, FixText),
            (lengths != (None, None), lambda: Characters(*lengths)),
            (printable is not None, lambda: Printable(_or_default(printable, 0.0))),
            (bool(self.languages), lambda: Languages(self.languages, probability)),
            (EXACT in self.deduplicate, ExactDuplicates),
            (NEAR in self.deduplicate, lambda: NearDuplicates(threshold)),
        ]
        steps: list[Step] = []
        problems: list[Problem] = []
        for wanted, make in makers:
            if wanted:
                try:
                    steps.append(make())
                except UserError as error:
                    problems += error.problems
        raise_problems(DataError, problems)
        return steps


@dataclass(frozen=True)
class CleaningRequest:
    """A job of cleaning: --input, --output, --json-key (the first of the rules' keys), the steps.

    dropped: the file for dropped documents, if any.
    """

    inputs: tuple[str, ...]
    output: Path
    rules: DocumentRules = field(default_factory=DocumentRules)
    choice: StepChoice = field(default_factory=StepChoice)
    dropped: Path | None = None

    @property
    def key(self) -> str:
        """The key whose text is cleaned."""
        return self.rules.json_keys[0]


@dataclass
class StepCount:
    """The counts of documents that went through a step.

    text_bytes: UTF-8 bytes of the documents that passed the step, as they are after it.
    """

    name: str
    documents: int = 0
    dropped: int = 0
    changed: int = 0
    text_bytes: int = 0


def clean_corpus(request: CleaningRequest, console: Console, bad: BadLines | None = None) -> list[StepCount]:
    """Write the output, and the dropped documents if a file is given; return the counts of every step.

    bad: collects lines that cannot be used; None makes them errors.  Raises DataError for input that cannot be read,
    and when no document is left; nothing is written then.
    """
    raise_problems(DataError, [*request.choice.problems(), *_path_problems(request)])
    steps = request.choice.steps()
    counts = [StepCount("read"), *(StepCount(step.name) for step in steps)]
    with ExitStack() as stack:
        output = stack.enter_context(written_lines(request.output))
        dropped = stack.enter_context(written_lines(request.dropped)) if request.dropped else None
        for content in _objects(request, console, bad):
            result = _through(content[request.key], steps, counts)
            if not isinstance(result, Dropped):
                output.write(json_line({**content, request.key: result}))
            elif dropped:
                dropped.write(json_line({"reason": result.reason, "document": content}))
        _refuse_nothing(request, counts)
    return counts


def summary_lines(counts: Sequence[StepCount]) -> list[str]:
    """Format a table: the documents that entered every step, those it dropped, those it kept."""
    read, *steps = counts
    rows = [("", "documents", "dropped", "kept", "bytes kept")]
    rows += [(read.name, str(read.documents), "", str(read.documents), format_bytes(read.text_bytes))]
    for step in steps:
        kept = str(step.documents - step.dropped)
        changed = f"   ({step.changed} mended)" if step.changed else ""
        rows.append((step.name, str(step.documents), str(step.dropped), kept, format_bytes(step.text_bytes) + changed))
    first = max(len(row[0]) for row in rows)
    return [
        f"{name:<{first}}" + "".join(f"{cell:>12}" for cell in cells[:3]) + "  " + cells[3] for name, *cells in rows
    ]


def _through(text: str, steps: Sequence[Step], counts: Sequence[StepCount]) -> str | Dropped:
    """Run one document through the steps, and count it; return its text, or the reason of the step that dropped it."""
    size = len(text.encode())
    counts[0].documents += 1
    counts[0].text_bytes += size
    for step, count in zip(steps, counts[1:], strict=True):
        count.documents += 1
        result = step.apply(text)
        if isinstance(result, Dropped):
            count.dropped += 1
            return Dropped(f"{step.name}: {result.reason}")
        if result != text:
            text, size = result, len(result.encode())
            count.changed += 1
        count.text_bytes += size
    return text


def _objects(request: CleaningRequest, console: Console, bad: BadLines | None) -> Iterator[dict[str, Any]]:
    """Yield every object of the input, while a progress bar counts mebibytes."""
    files = readable_files(request.inputs, request.rules)
    with console.progress() as progress:
        size = sum(file.size for file in files)
        task = progress.add_task("cleaning, MiB", total=size / _MEBIBYTE or None)
        for chunk in find_chunks(files, request.rules):
            yield from read_objects(chunk, request.rules, bad)
            progress.advance(task, chunk.input_bytes / _MEBIBYTE)


def _path_problems(request: CleaningRequest) -> Iterator[Problem]:
    named = [("--output", request.output)] + ([("--dropped", request.dropped)] if request.dropped else [])
    keys = request.rules.json_keys
    if len(keys) > 1:
        yield Problem(f"--json-keys {' '.join(keys)}", "one text of an object is cleaned", f"--json-key {keys[0]}")
    for flag, path in named:
        yield from ending_problems(flag, path)
    if request.dropped and request.dropped.resolve() == request.output.resolve():
        yield Problem(f"--dropped {request.dropped}", "is another file than --output")
    try:
        inputs = {Path(file.path).resolve() for file in find_inputs(request.inputs, request.rules.input_format)}
    except UserError as error:
        yield from error.problems
        return
    for flag, path in named:
        if path.resolve() in inputs:
            yield Problem(f"{flag} {path}", "is none of the files that are read", "a name outside of --input")


def _refuse_nothing(request: CleaningRequest, counts: Sequence[StepCount]) -> None:
    if not counts[0].documents:
        raise DataError(Problem(f"--input {' '.join(request.inputs)}", "holds some document"))
    if counts[-1].documents == counts[-1].dropped:
        given = f"--output {request.output}: of {counts[0].documents} documents none is left"
        raise DataError(Problem(given, "some document passes all steps", "\n".join(["", *summary_lines(counts)])))


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value
