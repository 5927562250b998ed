"""Reads the rows of Parquet files by pyarrow, which is imported only when there is such a file."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megazero.errors import DataError, Problem
from megazero.prepare.text.inputs import InputFile

# The number of rows that are read from their columns at a time; texts may be long.
BATCH_ROWS = 256
# The memory that a row takes besides its content, in bytes.
ROW_BYTES = 64


class Rows(NamedTuple):
    """A group of rows; first: the number of the first one, from 1.  input_bytes: their share of the file."""

    first: int
    rows: tuple[dict[str, Any], ...]
    input_bytes: int


def read_rows(file: InputFile, columns: Sequence[str] | None, num_bytes: int) -> Iterator[Rows]:
    """Yield the rows of a file in order, in groups of `num_bytes` or more; texts that are no UTF-8 as bytes.

    Raises DataError for a damaged file, a missing column, or when pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        given = f"--input {file.path} without the package pyarrow"
        raise DataError(Problem(given, "Parquet files are read by it", 'pip install "megazero[corpora]"')) from error
    try:
        # Batches are read one after the other: reading ahead would hold whole row groups.
        options = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}
        with pyarrow.parquet.ParquetFile(file.path, **options) as table:
            _require_columns(file, columns, table.schema_arrow.names)
            batches = table.iter_batches(BATCH_ROWS, columns=columns and list(columns), use_threads=False)
            yield from _grouped(file, batches, table.metadata.num_rows, num_bytes)
    except pyarrow.ArrowException as error:
        raise DataError(Problem(file.path, f"is an undamaged Parquet file: {error}", "a whole copy of it")) from error
    except OSError as error:
        raise DataError(Problem(file.path, f"must be a readable Parquet file: {error}")) from error


def _require_columns(file: InputFile, columns: Sequence[str] | None, there: Sequence[str]) -> None:
    missing = [column for column in columns or () if column not in there]
    if missing:
        legal = f"--json-keys {' '.join(there)}"
        raise DataError(*(Problem(file.path, f"has the column {column!r}", legal) for column in missing))


def _grouped(file: InputFile, batches: Iterator[Any], total: int, num_bytes: int) -> Iterator[Rows]:
    held: list[dict[str, Any]] = []
    first, size = 1, 0

    def group() -> Rows:
        ends = [file.size * (count - 1) // max(1, total) for count in (first, first + len(held))]
        return Rows(first, tuple(held), ends[1] - ends[0])

    for batch in batches:
        row_bytes = ROW_BYTES + batch.nbytes // max(1, batch.num_rows)
        for row in _taken(batch, file, first + len(held)):
            held.append(row)
            size += row_bytes
            if size >= num_bytes:
                yield group()
                first, size, held = first + len(held), 0, []
    if held:
        yield group()


def _taken(batch: Any, file: InputFile, first: int) -> list[dict[str, Any]]:
    """Return the rows of a batch; pyarrow does not check that text columns are UTF-8."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        columns = {name: _texts(column, file, first) for name, column in zip(batch.schema.names, batch, strict=True)}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return rows


def _texts(column: Any, file: InputFile, first: int) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError as error:
        kind = {"string": "binary", "large_string": "large_binary"}.get(str(column.type))
        if kind is None:
            given = f"{file.path}: row {first} or one of the {len(column)} from there"
            raise DataError(Problem(given, f"holds UTF-8 in its text: {error.reason}")) from error
        values = [_text(value) for value in column.cast(kind, safe=False).to_pylist()]
    return values


def _text(value: bytes | None) -> str | bytes | None:
    try:
        return value and value.decode()
    except UnicodeDecodeError:
        return value
