"""Many small cases as one test: pytest's own bookkeeping takes some milliseconds a test, far more than they do."""

import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import pytest


def each(
    names: str | Sequence[str], cases: Iterable[Any], *, ids: Callable[[Any], Any] | Sequence[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test as `pytest.mark.parametrize` does, but as one test, which tries every case.

    It fails with the names and the tracebacks of all cases that fail.  Fixtures are made once, for all cases together;
    a case must leave them as they were.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = [case if len(arguments) > 1 else (case,) for case in cases]
    assert values and all(len(case) == len(arguments) for case in values)

    def name_of(number: int) -> str:
        if ids is None or callable(ids):
            return ", ".join(str((ids or repr)(value)) for value in values[number])
        return ids[number]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @wraps(test)
        def all_cases(**fixtures: Any) -> None:
            failures = []
            for number, case in enumerate(values):
                try:
                    test(**fixtures, **dict(zip(arguments, case, strict=True)))
                except (Exception, pytest.fail.Exception):
                    failures.append(f"case {name_of(number)}:\n{traceback.format_exc()}")
            if failures:
                pytest.fail(f"{len(failures)} of {len(values)} cases\n\n" + "\n".join(failures), pytrace=False)

        kept = [one for name, one in signature.parameters.items() if name not in arguments]
        assert len(kept) == len(signature.parameters) - len(arguments), "a case has values for arguments of the test"
        vars(all_cases)["__signature__"] = signature.replace(parameters=kept)
        return all_cases

    return decorate
