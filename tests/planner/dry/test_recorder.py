"""Tests of the order of copies and waits in a dry rank's record."""

import torch

from megazero.memory.ledger import Ledger
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.planner.dry.rank import dry_tensors
from megazero.planner.dry.recorder import Recorder
from megazero.planner.trace import Copy, TraceWait


def test_a_copy_is_waited_for_where_its_own_storage_is_read() -> None:
    """A storage that is made later may have the key of one that has died unread."""
    ledger = Ledger(torch.device("cpu"))
    recorder = Recorder(ledger, Topology(tp=1, pp=1, dp=1), 0, Nodes((1,)), is_gpu=True)
    with dry_tensors(ledger, recorder=recorder), recorder.part("steady step"):
        at_home = torch.zeros(4)
        ledger.elsewhere(at_home)
        unread = [torch.empty(4).copy_(at_home) for _ in range(100)]
        keys = {tensor.untyped_storage()._cdata for tensor in unread}
        unread.clear()
        made = [torch.empty(4).mul_(2) for _ in range(100)]
        assert keys & {tensor.untyped_storage()._cdata for tensor in made}
        torch.empty(4).copy_(at_home).mul_(2)
    events = recorder.parts["steady step"]
    copies = [number for number, event in enumerate(events) if isinstance(event, Copy)]
    assert [event.number for event in events if isinstance(event, TraceWait)] == copies[100:]
