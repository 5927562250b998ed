"""Tests the ledger that counts nothing: it accepts every call of the interface, and no call has an effect."""

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megazero.memory.ledger import Ledger
from megazero.memory.ledger_interface import AnyLedger, NullLedger


def use(ledger: AnyLedger) -> bool:
    """Make every call of the interface; return True if operations were watched."""
    with ledger, ledger.category("gradients"):
        watched = _get_current_dispatch_mode() is not None
        x = torch.zeros(3)
    ledger.tag(x, "gradients")
    ledger.resized(x)
    ledger.elsewhere(torch.zeros(5))
    ledger.phase("forward")
    ledger.reset()
    return watched


def test_without_a_ledger_nothing_watches() -> None:
    ledger = NullLedger()
    assert not use(ledger)
    assert ledger.take() is None


def test_both_ledgers_take_the_same_calls() -> None:
    ledger = Ledger(torch.device("cpu"))
    assert use(ledger)
    assert ledger.take().at_peak["gradients"] == 12  # alive when `reset` was called


def test_what_goes_wrong_inside_comes_out() -> None:
    for ledger in (NullLedger(), Ledger(torch.device("cpu"))):
        try:
            with ledger, ledger.category("master"):
                raise ZeroDivisionError
        except ZeroDivisionError:
            continue
        raise AssertionError("the error was swallowed")
