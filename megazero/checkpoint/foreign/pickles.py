"""Reads pickles as data: nothing that a pickle names is imported, called or made.

A pickle is a program for a small stack machine.  Here its opcodes build plain values: numbers, text, lists, tuples,
dicts and sets.  What would call a function or make an object becomes a `Record`, which has the name and the arguments
and does nothing, and only names of `INERT` and `INERT_PACKAGES` may occur; any other ends in an error that names it.
A few names stand for plain values themselves, in `_BUILT`.

Time and memory are bounded by the number of bytes and of opcodes.  The format: Python's `pickletools`.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megazero.errors import CheckpointError, Problem

MAX_BYTES = 256 << 20
MAX_OPCODES = 10_000_000
_MAX_KEY_ITEMS = 16


@dataclass(frozen=True, eq=False)
class Name:
    """A class or a function that a pickle names, as text."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class Record:
    """An object that has not been made: the name of its class or function, its arguments, and its state."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = field(default=None)

    def fields(self) -> Mapping[str, Any]:
        """Return the object's attributes; none where its state is no table of them."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # with slots
            state = {**(state[0] or {}), **state[1]} if isinstance(state[0], dict | None) else None
        items = state.items() if isinstance(state, dict) else ()
        return {name: value for name, value in items if isinstance(name, str)}


# Names that may occur, and become records: what torch, Megatron-LM, Megatron-DeepSpeed and DeepSpeed save.
_INERT_TEXT = (
    "argparse.Namespace types.SimpleNamespace _io.BytesIO _codecs.encode datetime.timedelta "
    "copyreg._reconstructor pathlib.Path pathlib.PosixPath pathlib.PurePosixPath pathlib.WindowsPath "
    "pathlib._local.PosixPath numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct "
    "numpy.core.multiarray.scalar numpy._core.multiarray.scalar numpy.ndarray numpy.dtype functools.partial "
    "signal.Signals builtins.object builtins.slice builtins.range builtins.complex builtins.bytearray "
    "builtins.int builtins.float builtins.str builtins.bool torch._utils._rebuild_tensor "
    "torch._utils._rebuild_tensor_v2 torch._utils._rebuild_parameter "
    "torch._utils._rebuild_parameter_with_state torch._tensor._rebuild_from_type_v2 "
    "torch.nn.parameter.Parameter torch.Tensor torch.device "
    "torch.Generator torch.serialization._get_layout torch.storage.UntypedStorage torch.storage.TypedStorage "
    "torch.nn.functional.gelu torch.nn.functional.silu torch._C._nn.gelu torch._C._nn.silu "
    "torch.optim.adamw.AdamW torch.optim.adam.Adam"
)
INERT = frozenset(_INERT_TEXT.split())
INERT_PACKAGES = ("megatron.", "deepspeed.", "torch.distributed.checkpoint.", "transformer_engine.")
_TORCH_TEXT = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool float8_e4m3fn float8_e5m2 "
    "DoubleStorage FloatStorage HalfStorage BFloat16Storage LongStorage IntStorage ShortStorage CharStorage "
    "ByteStorage BoolStorage strided contiguous_format preserve_format"
)
_TORCH_WORDS = frozenset(_TORCH_TEXT.split())


class _Refused(ValueError):
    """The pickle has something that data has not."""


def _pairs(*arguments: Any) -> dict[Any, Any]:
    found = arguments[0] if arguments else ()
    found = list(found.items()) if isinstance(found, dict) else found
    listed = found if isinstance(found, list | tuple) else (None,)
    if not all(isinstance(each, list | tuple) and len(each) == 2 for each in listed):
        raise _Refused("a dict that is not made of pairs")
    return {_key(key): value for key, value in listed}


def _items(*arguments: Any) -> list[Any]:
    if len(arguments) > 1 or not all(isinstance(each, list | tuple | set | frozenset) for each in arguments):
        raise _Refused("a collection that is not made of items")
    return [item for each in arguments for item in each]


def _attribute(owner: Any, name: Any) -> Record:
    """Return the member of an enumeration, which some versions of Python pickle as an attribute of its class."""
    if not isinstance(owner, Name) or not isinstance(name, str):
        raise _Refused("getattr of something else than a class")
    return Record(owner.text, (name,))


# Names whose results are plain values.
_BUILT: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "collections.OrderedDict": _pairs,
        "collections.defaultdict": lambda *arguments: {},
        "collections.Counter": _pairs,
        "builtins.dict": _pairs,
        "builtins.list": _items,
        "builtins.tuple": lambda *arguments: tuple(_items(*arguments)),
        "builtins.set": lambda *arguments: {_key(item) for item in _items(*arguments)},
        "builtins.frozenset": lambda *arguments: frozenset(_key(item) for item in _items(*arguments)),
        "builtins.getattr": _attribute,
        "torch.Size": lambda *arguments: tuple(_items(*arguments)),
    }
)


def _legal_name(module: Any, name: Any) -> Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise _Refused("a class whose name is no text")
    text = f"{module.replace('__builtin__', 'builtins')}.{name}"
    is_known = text in INERT or text in _BUILT or text.startswith(INERT_PACKAGES)
    if not is_known and not (module == "torch" and name in _TORCH_WORDS):
        raise _Refused(f"{text[:200]!r} is no data of a checkpoint")
    return Name(text)


def _called(name: Any, arguments: Any) -> Any:
    """Return what stands for the result of a call."""
    if not isinstance(name, Name) or not isinstance(arguments, tuple):
        raise _Refused("a call of something without a name")
    built = _BUILT.get(name.text)
    try:
        return Record(name.text, arguments) if built is None else built(*arguments)
    except TypeError as error:
        raise _Refused(f"{name} of {len(arguments)} arguments") from error


def _key(value: Any) -> Any:
    """Return a key of a dict or an item of a set, whose hash takes bounded time and depth."""
    parts = value if type(value) is tuple and len(value) <= _MAX_KEY_ITEMS else (value,)
    if not all(isinstance(part, str | bytes | int | float | None | Name | Record) for part in parts):
        raise _Refused(f"a key of type {type(value).__name__}")
    return value


class _Machine:
    """The stack machine: a method for each kind of opcode."""

    def __init__(self, persistent: Callable[[Any], Any]) -> None:
        self._persistent = persistent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks below the marks
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        """Return the value of a pickle; raises ValueError or one of its kin for anything that is not data."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if count >= MAX_OPCODES:
                raise _Refused(f"more than {MAX_OPCODES} opcodes")
            if opcode.name == "STOP":
                break
            self._step(opcode.name, argument)
        return self._pop()

    def _pop(self) -> Any:
        if not self._stack:
            raise _Refused("an opcode takes more from the stack than is there")
        return self._stack.pop()

    def _top(self, kind: type | tuple[type, ...]) -> Any:
        if not self._stack or not isinstance(self._stack[-1], kind):
            raise _Refused("items are added to something else than a collection")
        return self._stack[-1]

    def _marked(self) -> list[Any]:
        """Return all above the last mark, which goes."""
        if not self._below:
            raise _Refused("a mark is missing")
        items, self._stack = self._stack, self._below.pop()
        return items

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _step(self, name: str, argument: Any) -> None:
        if name in _PUSHED:
            self._push(argument)
        elif name in _CONSTANTS:
            self._push(_CONSTANTS[name])
        elif name in _EMPTY:
            self._push(_EMPTY[name]())
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            if int(argument) not in self._memo:
                raise _Refused("a value is asked for that has not been kept")
            self._push(self._memo[int(argument)])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else int(argument)] = self._top(object)
        elif name in _TUPLES:
            items = [self._pop() for _ in range(_TUPLES[name])]
            self._push(tuple(reversed(items)))
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise _Refused(f"opcode {name}")

    def mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop(self, _: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._marked()

    def pop_mark(self, _: Any) -> None:
        self._marked()

    def duplicate(self, _: Any) -> None:
        self._push(self._top(object))

    def tuple_of_marked(self, _: Any) -> None:
        self._push(tuple(self._marked()))

    def list_of_marked(self, _: Any) -> None:
        self._push(self._marked())

    def frozenset_of_marked(self, _: Any) -> None:
        self._push(frozenset(_key(item) for item in self._marked()))

    def dict_of_marked(self, _: Any) -> None:
        items = self._marked()
        self._push({})
        self._set_items(items)

    def append(self, _: Any) -> None:
        value = self._pop()
        self._add([value])

    def append_all(self, _: Any) -> None:
        self._add(self._marked())

    def _add(self, values: list[Any]) -> None:
        found = self._top((list, set, Record))
        if isinstance(found, list):
            found.extend(values)
        elif isinstance(found, set):
            found.update(_key(value) for value in values)

    def set_item(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def set_items(self, _: Any) -> None:
        self._set_items(self._marked())

    def _set_items(self, items: list[Any]) -> None:
        found = self._top((dict, Record))
        if len(items) % 2:
            raise _Refused("a key without a value")
        if isinstance(found, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                found[_key(key)] = value

    def name(self, argument: Any) -> None:
        module, _, rest = str(argument).partition(" ")
        self._push(_legal_name(module, rest))

    def name_of_stack(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        self._push(_legal_name(module, name))

    def call(self, _: Any) -> None:
        arguments, name = self._pop(), self._pop()
        self._push(_called(name, arguments))

    def call_with_keywords(self, _: Any) -> None:
        keywords, arguments, name = self._pop(), self._pop(), self._pop()
        made = _called(name, arguments)
        if isinstance(made, Record) and isinstance(keywords, dict):
            made.state = keywords
        self._push(made)

    def build(self, _: Any) -> None:
        state = self._pop()
        found = self._top((Record, dict, list, set))
        if isinstance(found, Record):  # a dict with attributes of its own is taken as the dict
            found.state = state

    def persistent(self, argument: Any) -> None:
        self._push(self._persistent(argument))

    def persistent_of_stack(self, _: Any) -> None:
        self._push(self._persistent(self._pop()))


_PUSHED_TEXT = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES "
    "SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8"
)
_PUSHED = frozenset(_PUSHED_TEXT.split())
_CONSTANTS: Mapping[str, Any] = MappingProxyType({"NONE": None, "NEWTRUE": True, "NEWFALSE": False})
_EMPTY: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set, "EMPTY_TUPLE": tuple}
)
_TUPLES: Mapping[str, int] = MappingProxyType({"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3})
_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = MappingProxyType(
    {
        "MARK": _Machine.mark,
        "POP": _Machine.pop,
        "POP_MARK": _Machine.pop_mark,
        "DUP": _Machine.duplicate,
        "TUPLE": _Machine.tuple_of_marked,
        "LIST": _Machine.list_of_marked,
        "DICT": _Machine.dict_of_marked,
        "FROZENSET": _Machine.frozenset_of_marked,
        "APPEND": _Machine.append,
        "APPENDS": _Machine.append_all,
        "ADDITEMS": _Machine.append_all,
        "SETITEM": _Machine.set_item,
        "SETITEMS": _Machine.set_items,
        "GLOBAL": _Machine.name,
        "STACK_GLOBAL": _Machine.name_of_stack,
        "REDUCE": _Machine.call,
        "NEWOBJ": _Machine.call,
        "NEWOBJ_EX": _Machine.call_with_keywords,
        "BUILD": _Machine.build,
        "PERSID": _Machine.persistent,
        "BINPERSID": _Machine.persistent_of_stack,
    }
)


def _no_reference(identity: Any) -> Any:
    raise _Refused("a reference to something outside of the pickle")


def read_pickle(content: bytes, *, source: str, persistent: Callable[[Any], Any] = _no_reference) -> Any:
    """Return a pickle's value, in plain types and records.

    source: the file, for messages.  persistent: makes a value of a persistent id; raises ValueError.
    Raises CheckpointError for a pickle that is damaged, too large, or more than data.
    """
    if len(content) > MAX_BYTES:
        raise CheckpointError(Problem(f"{source}: a pickle of {len(content)} bytes", f"at most {MAX_BYTES} are read"))
    try:
        return _Machine(persistent).run(content)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError) as error:
        reason = str(error)[:300] or type(error).__name__
        rule = "a pickle is read as data, without running anything that it names"
        raise CheckpointError(Problem(f"{source}: {reason}", rule)) from None
