"""Reads and writes the sidecar, which holds facts about a corpus that its token file has no room for.

The sidecar is `PREFIX.json` beside the token file.  It names the tokenizer of the tokens, so that a wrong vocabulary is
found before a run starts, and the bytes of text that the tokens stand for, so that a loss can be given in bits per
byte.  A corpus without a sidecar (made by another tool) is usable; a sidecar whose counts disagree with the index
belongs to other data and is refused.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.tokenizers import FILES, TokenizerSpec
from megazero.errors import DataError, Problem
from megazero.files import cannot_read, open_regular, parse_json, read_bounded

_MAX_BYTES = 64 << 20
DIGEST_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Sidecar:
    """Facts about one corpus; counts are of the whole corpus.

    text_bytes: UTF-8 bytes of the documents' text; end-of-document tokens stand for none.
    tokenizer_files: SHA-256 by the name of the flag's field ("tokenizer_model"), and by their names the values of flags
    that ids depend on too ("tiktoken_pattern").
    token_bytes: UTF-8 bytes of text that every id stands for [vocab_size].
    digests: xxh3_128 of the files in hexadecimal, by ending ("bin", "idx"); empty from older writers.
    split_documents: tokens of the longest sequence that a document was cut into, 0 if documents are whole.
    tokenizer_paths: where those files were, by the same names; empty from older writers.
    loss_mask: whether a mask lies beside the tokens, the corpus `loss_mask_prefix` (docs/finetuning.md).
    """

    documents: int
    sequences: int
    tokens: int
    text_bytes: int
    tokenizer_type: str
    vocab_size: int
    eod: int
    append_eod: bool
    tokenizer_files: Mapping[str, str]
    token_bytes: Sequence[int]
    digests: Mapping[str, str] = field(default_factory=dict)
    split_documents: int = 0
    tokenizer_paths: Mapping[str, str] = field(default_factory=dict)
    loss_mask: bool = False


def sidecar_path(prefix: str | Path) -> Path:
    """Return the path of a corpus's sidecar."""
    return Path(f"{prefix}.json")


def loss_mask_prefix(prefix: str | Path) -> str:
    """Return the prefix of a corpus's mask: files of the same shape, with 1 for each token that is learnt, else 0."""
    return f"{prefix}_loss_mask"


def recorded_tokenizer(sidecar: Sidecar, folder: Path) -> TokenizerSpec | None:
    """Return the tokenizer that made a corpus, if its files are unchanged where they were, or lie in `folder` now."""
    if sidecar.tokenizer_type not in FILES:
        return None
    where = {
        name: Path(path) for name, path in sidecar.tokenizer_paths.items() if name in FILES[sidecar.tokenizer_type]
    }
    for files in (where, {name: folder / path.name for name, path in where.items()}):
        spec = TokenizerSpec.recorded(sidecar.tokenizer_type, files, sidecar.tokenizer_files)
        if not spec.problems() and spec.digests() == dict(sidecar.tokenizer_files):
            return spec
    return None


def digest_of(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Return the xxh3_128 of a file, in hexadecimal; calls advance(bytes) after every block."""
    digest = xxhash.xxh3_128()
    try:
        with open_regular(path) as stream:
            while block := stream.read(DIGEST_BLOCK_BYTES):
                digest.update(block)
                if advance is not None:
                    advance(len(block))
    except OSError as error:
        raise cannot_read(path, error) from error
    return digest.hexdigest()


def sidecar_bytes(sidecar: Sidecar) -> bytes:
    """Return the content of the sidecar's file."""
    return _to_json(sidecar).encode()


def _to_json(sidecar: Sidecar) -> str:
    """Format the sidecar with one field a line, the long table on one line of its own."""
    lines = [f"  {json.dumps(field.name)}: {json.dumps(getattr(sidecar, field.name))}" for field in fields(Sidecar)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_sidecar(dataset: IndexedDataset) -> Sidecar | None:
    """Read the sidecar of an open corpus, or None; raises DataError if it is damaged or belongs to other data."""
    path = sidecar_path(dataset.prefix)
    if not path.is_file():
        return None
    sidecar = load_sidecar(path)
    listed = (sidecar.documents, sidecar.sequences, sidecar.tokens)
    found = (dataset.num_documents, dataset.num_sequences, dataset.num_tokens)
    if listed != found:
        raise DataError(
            Problem(
                f"{path}: documents, sequences, tokens {listed}; the corpus has {found}",
                "a sidecar describes the corpus beside it",
                "preprocess again, or remove the .json (vocabulary and bits per byte are then unknown)",
            )
        )
    return sidecar


def load_sidecar(path: Path) -> Sidecar:
    """Parse the file of a sidecar of any corpus; raises DataError if it is damaged."""
    try:
        content = parse_json(read_bounded(path, _MAX_BYTES).decode())
    except OSError as error:
        raise cannot_read(path, error) from error
    except ValueError as error:
        raise DataError(Problem(str(path), f"is a JSON object: {error}", "preprocess again, or remove it")) from error
    problems = _field_problems(path, content)
    if problems:
        raise DataError(*problems)
    return Sidecar(**{field.name: content[field.name] for field in fields(Sidecar) if field.name in content})


def _field_problems(path: Path, content: Any) -> list[Problem]:
    if not isinstance(content, dict):
        return [Problem(str(path), "is a JSON object", "preprocess again, or remove it")]
    kinds: dict[str, type] = {
        "tokenizer_type": str,
        "append_eod": bool,
        "tokenizer_files": dict,
        "token_bytes": list,
        "digests": dict,
        "tokenizer_paths": dict,
        "loss_mask": bool,
    }
    content = {"digests": {}, "split_documents": 0, "tokenizer_paths": {}, "loss_mask": False, **content}
    problems = [
        Problem(
            f"{path}: {field.name} {str(content.get(field.name))[:40]}",
            f"is of type {kind.__name__}",
            "preprocess again",
        )
        for field in fields(Sidecar)
        if type(content.get(field.name)) is not (kind := kinds.get(field.name, int))
    ]
    if problems:
        return problems
    inner: list[tuple[str, Iterable[Any], type]] = [("token_bytes", content["token_bytes"], int)]
    inner += [(name, content[name].values(), str) for name in ("tokenizer_files", "digests", "tokenizer_paths")]
    problems += [
        Problem(f"{path}: {name}", f"holds nothing but {kind.__name__}", "preprocess again")
        for name, values, kind in inner
        if any(type(value) is not kind for value in values)
    ]
    if len(content["token_bytes"]) != content["vocab_size"]:
        given = f"{path}: token_bytes has {len(content['token_bytes'])} entries"
        problems.append(Problem(given, f"one for every id of the vocabulary: {content['vocab_size']}"))
    return problems
