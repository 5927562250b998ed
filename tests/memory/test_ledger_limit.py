"""Tests the limit of live memory: when it raises an error, how often, and with which message."""

import pytest
import torch
from torch import Tensor, nn

from megazero.errors import MemoryLimitError
from megazero.memory.ledger import Ledger, open_ledger
from megazero.memory.ledger_interface import NullLedger
from megazero.memory.ledger_limit import MIB, MemoryLimit, limit_error
from megazero.planner.dry.hollow import Hollow

CPU = torch.device("cpu")


def change(nbytes: int) -> tuple[int, object, int]:
    return nbytes, None, 0


def test_changes_are_added_up_as_they_come() -> None:
    limit = MemoryLimit(100)
    changes = [change(60), change(40)]
    assert not limit.is_newly_exceeded(changes)
    assert not limit.is_newly_exceeded(changes)  # counted once
    changes += [change(-30), change(30), change(1)]
    assert limit.is_newly_exceeded(changes)


def test_it_speaks_once_a_step() -> None:
    limit = MemoryLimit(100)
    changes = [change(101)]
    assert limit.is_newly_exceeded(changes)
    changes += [change(-50), change(80)]
    assert not limit.is_newly_exceeded(changes)
    limit.start(99)
    assert not limit.is_newly_exceeded([change(1)])
    assert limit.is_newly_exceeded([change(1), change(1)])


def test_what_is_said() -> None:
    error = limit_error(3 * MIB // 2, {"parameters": 10 * MIB, "activations": 1024, "master": 0}, "backward")
    (problem,) = error.problems
    assert problem.given == "10.0 MiB alive in backward: parameters 10.0 MiB, activations 1.0 KiB"
    assert "--ledger-limit 1.5 (MiB)" in problem.rule and f"{10 * MIB + 1024 - 3 * MIB // 2} bytes" in problem.rule
    assert problem.legal.startswith("a smaller --micro-batch-size, --recompute-granularity full")
    assert error.exit_code != 0 and error.render().startswith("memory limit exceeded: 10.0 MiB alive")
    assert "10.0 MiB alive: parameters" in limit_error(MIB, {"parameters": 10 * MIB}, None).render()


@pytest.mark.parametrize("hollow", [False, True])
def test_the_operation_that_exceeds_it_raises(hollow: bool) -> None:
    mode = Hollow() if hollow else torch.no_grad()
    with mode, Ledger(CPU, limit_bytes=1000) as ledger:
        a = torch.zeros(100)
        torch.zeros(150)  # 1000 bytes in all, for a moment
        b = a + 1
        with pytest.raises(MemoryLimitError, match=r"1\.6 KiB alive: temporary 1\.6 KiB"):
            torch.cat([a, b])[0].item()
        # The operation's result is gone, and cleaning up is not hindered.
        assert sum(ledger.live_bytes().values()) == 800
        assert torch.zeros(500).shape == (500,)


def test_beside_what_is_named() -> None:
    weight = torch.zeros(200)
    ledger = Ledger(CPU, limit_bytes=1000)
    ledger.tag(weight, "parameters")
    with ledger:
        ledger.phase("forward")
        hidden = torch.ones(40)
        with pytest.raises(MemoryLimitError, match="in forward: parameters 800 B, activations 320 B"):
            hidden * 2
    with pytest.raises(MemoryLimitError, match=r"moments 4\.0 KiB"):
        Ledger(CPU, limit_bytes=1000).tag(torch.zeros(1024), "moments")


def test_a_storage_that_grows_exceeds_it() -> None:
    with Ledger(CPU, limit_bytes=1000) as ledger:
        gathered = torch.zeros(10)
        ledger.tag(gathered, "gathered_parameters")
        gathered.untyped_storage().resize_(4000)
        with pytest.raises(MemoryLimitError, match=r"gathered parameters 3\.9 KiB"):
            ledger.resized(gathered)


def test_in_backward() -> None:
    """The error passes through autograd unchanged."""
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    parameters = 4 * 4 * (32 * 32 + 32)
    with Ledger(CPU) as ledger:
        step(ledger, layers)
        peak = ledger.take().peak_bytes
    with Ledger(CPU, limit_bytes=peak) as ledger:
        step(ledger, layers)
        ledger.take()
    limited = Ledger(CPU, limit_bytes=peak - 1)
    with limited, pytest.raises(MemoryLimitError, match="in backward: ") as caught:
        step(limited, layers)
    assert peak > 2 * parameters
    assert "parameters" in str(caught.value) and "gradients" in str(caught.value)


def step(ledger: Ledger, layers: nn.Module) -> Tensor:
    """Run forward and backward, of which the latter needs more memory."""
    layers.zero_grad()
    for parameter in layers.parameters():
        ledger.tag(parameter, "parameters")
        parameter.register_post_accumulate_grad_hook(lambda p: ledger.tag(p.grad, "gradients"))
    ledger.phase("forward")
    loss: Tensor = layers(torch.ones(2, 32)).sum()
    ledger.phase("backward")
    loss.backward()
    return loss


def test_every_step_is_told_anew() -> None:
    with Ledger(CPU, limit_bytes=100) as ledger:
        for _ in range(3):
            with pytest.raises(MemoryLimitError):
                torch.zeros(30)
            torch.zeros(30)
            ledger.reset()
        kept = torch.zeros(20)
        ledger.take()
        torch.zeros(5)
        with pytest.raises(MemoryLimitError):  # memory that was alive when the step began counts
            torch.zeros(6)
        assert kept.shape == (20,)


def test_a_limit_is_a_reason_to_keep_a_ledger() -> None:
    assert isinstance(open_ledger(CPU, kept=False), NullLedger)
    ledger = open_ledger(CPU, kept=False, limit_mib=0.5)
    with ledger, pytest.raises(MemoryLimitError, match=r"--ledger-limit 0\.5 \(MiB\)"):
        torch.zeros(1 << 19, dtype=torch.uint8)
        torch.zeros((1 << 19) + 1, dtype=torch.uint8)
