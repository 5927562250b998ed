"""Tests of reading pickles as data: plain values as Python reads them, and for all else a message."""

import argparse
import collections
import enum
import os
import pickle
import pickletools
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.each import each

from megazero.checkpoint.foreign import pickles
from megazero.checkpoint.foreign.pickles import Record, read_pickle
from megazero.errors import CheckpointError

PLAIN = {
    "numbers": [0, -1, 255, 2**15, 2**31, -(2**70), 1.5, float("inf"), True, False, None],
    "text": ["", "naïve \u2603", "x" * 300, b"", b"\0\xff" * 200],
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, (4, 5))),
    "sets": ({1, 2}, frozenset({"a", (1, "b")}), set()),
    5: {"again": collections.OrderedDict([("a", 1), (2, [3])])},
}


@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_what_python_reads(protocol: int) -> None:
    value: Any = PLAIN if protocol > 2 else {**PLAIN, "text": PLAIN["text"][:3]}  # bytes are a call there
    value = {**value, "buffer": bytearray(b"ab")} if protocol == 5 else value
    assert read_pickle(pickle.dumps(value, protocol), source="a file") == value


def test_a_value_that_contains_itself_is_read() -> None:
    value: list[Any] = []
    value.append(value)
    found = read_pickle(pickle.dumps(value), source="a file")
    assert found[0] is found


@pytest.fixture
def megatron() -> Iterator[types.ModuleType]:
    """Give a module of Megatron-LM's name with an enumeration and a class, while it is pickled."""
    module = types.ModuleType("megatron.made_up")
    for made in (enum.Enum("Backend", ["flash", "plain"]), type("Holder", (), {})):
        made.__module__, made.__qualname__ = module.__name__, made.__name__
        setattr(module, made.__name__, made)
    sys.modules[module.__name__] = module
    yield module
    sys.modules.pop(module.__name__)


def test_objects_become_records_of_their_names(megatron: types.ModuleType) -> None:
    holder = megatron.Holder()
    holder.size = 3
    value = argparse.Namespace(backend=megatron.Backend.plain, holder=holder, path=Path("a") / "b", number=1)
    found = read_pickle(pickle.dumps(value, 2), source="a file")
    assert isinstance(found, Record) and found.name == "argparse.Namespace"
    fields = found.fields()
    assert fields["number"] == 1 and fields["backend"].name == "megatron.made_up.Backend"
    assert fields["backend"].arguments == (2,) and fields["holder"].fields() == {"size": 3}
    assert fields["path"].arguments == ("a", "b")


class _Runs:
    """An object whose pickle calls a function with arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


def op(name: str) -> bytes:
    """Return the byte of an opcode."""
    return next(each.code for each in pickletools.opcodes if each.name == name).encode("latin-1")


DEEP = op("EMPTY_TUPLE") + op("TUPLE1") * 100_000


@each(
    ("content", "message"),
    [
        (pickle.dumps(_Runs(os.system, "echo run")), r"'posix.system' is no data"),
        (pickle.dumps(_Runs(eval, "1 + 1"), 0), r"'builtins.eval' is no data"),
        (pickle.dumps(_Runs(exec, "1 + 1"), 2), r"'builtins.exec' is no data"),
        (b"cos\nsystem\n.", "'os.system' is no data"),
        (b"cbuiltins\ngetattr\n(I1\nS'x'\ntR.", "getattr of something else than a class"),
        (b"cbuiltins\ngetattr\n(I1\ntR.", "builtins.getattr of 1 arguments"),
        (b"ctorch\nload\n.", "'torch.load' is no data"),
        (b"cmegatronx\nf\n.", "'megatronx.f' is no data"),
        (b"I1\n)R.", "a call of something without a name"),
        (b"(ios\nsystem\n.", "opcode INST"),
        (b"\x82\x01.", "opcode EXT1"),
        (b"", "exhausted before seeing STOP|empty"),
        (b"I1\n", "exhausted before seeing STOP"),
        (b"\xff.", "unknown"),
        (b".", "takes more from the stack"),
        (b"0.", "a mark is missing"),
        (b"h\x05.", "has not been kept"),
        (b"I1\n)s.", "something else than a collection"),
        (b"I1\n(I1\ne.", "something else than a collection"),
        (b"}(I1\nu.", "a key without a value"),
        (b"}]I1\ns.", "a key of type list"),
        (b"}" + DEEP + b"I1\ns.", "a key of type tuple"),
        (b"\x80\x04\x8f(" + DEEP + b"\x90.", "a key of type tuple"),
        (b"U\x01aQ.", "a reference to something outside"),
        (b"\x8b" + struct.pack("<i", 2**31 - 1) + b"1.", "not enough data"),
        (b"\x8e" + struct.pack("<Q", 2**62) + b"1.", "but only|expected|too"),
        (b"I" + b"9" * 10_000 + b"\n.", "integer string conversion|digits"),
        (b"ccollections\nOrderedDict\n(I1\ntR.", "not made of pairs"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_what_is_not_data_ends_in_a_message(content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_pickle(content, source="a file")


def test_nothing_that_a_pickle_names_runs(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    content = pickle.dumps(_Runs(os.mkdir, str(trace)))
    with pytest.raises(CheckpointError, match=r"mkdir' is no data of a checkpoint"):
        read_pickle(content, source="a file")
    assert not trace.exists()
    pickle.loads(content)
    assert trace.exists()  # the pickle does run what it names


def test_length_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MAX_OPCODES", 100)
    with pytest.raises(CheckpointError, match="more than 100 opcodes"):
        read_pickle(b"]" * 200 + b".", source="a file")
    monkeypatch.setattr(pickles, "MAX_BYTES", 100)
    with pytest.raises(CheckpointError, match="a pickle of 201 bytes"):
        read_pickle(b"]" * 200 + b".", source="a file")
