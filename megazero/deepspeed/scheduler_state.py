"""The state of a torch learning-rate scheduler as JSON values, for the client_state of a checkpoint.

Tuples, and mappings with other keys than names (MultiStepLR counts its milestones in one), become objects with one
marked key.  The values are numbers, words and None; a function in a LambdaLR is not part of its state.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

_TUPLE, _PAIRS = "__tuple__", "__pairs__"


def to_json(value: Any) -> Any:
    """Return the value with JSON's types; others than a scheduler has are left for the checkpoint to refuse."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(inner) for key, inner in value.items()}
        return {_PAIRS: [[to_json(key), to_json(inner)] for key, inner in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [to_json(inner) for inner in value]}
    return [to_json(inner) for inner in value] if isinstance(value, list) else value


def from_json(value: Any) -> Any:
    """Return the value from which `to_json` has made this one; mappings with other keys are counters."""
    if isinstance(value, Mapping):
        if _TUPLE in value:
            return tuple(from_json(inner) for inner in value[_TUPLE])
        if _PAIRS in value:
            return Counter({from_json(key): from_json(inner) for key, inner in value[_PAIRS]})
        return {key: from_json(inner) for key, inner in value.items()}
    return [from_json(inner) for inner in value] if isinstance(value, list) else value
