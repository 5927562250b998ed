"""Saving beside training: a thread writes a copy of the state, while the program goes on and changes the state.

    program   copy the state -- step -- step -- step ...       wait for the thread before the next save and at the end
                  |                       ^
    thread        +-- write -- publish ---+  a failure of it is that of the next step, on all ranks

The copy is in host memory, so what is saved is the state of the step at which saving began.  The thread does what a
save does that is waited for, with a communicator of its own: the checkpoint appears whole or not at all.  A process
ends only when its thread has.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from megazero.checkpoint.writer import Draft, save
from megazero.comm.interface import Communicator
from megazero.comm.metered import Meter
from megazero.memory.ledger_interface import AnyLedger
from megazero.parallel.param_spec import StateFragment


class BackgroundSave:
    """A save in a thread of its own, one at a time; the calls of all ranks are the same, in the same order.

    control: a communicator of CPU tensors that nothing else uses.  meter: the mesh's, which notes when the program
    waits for the thread.
    """

    def __init__(self, control: Communicator, meter: Meter) -> None:
        self._control, self._meter = control, meter
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saving")
        self._saving: Future[Path] | None = None
        self._number = 0

    @property
    def is_under_way(self) -> bool:
        """True from `begin` to `finish`, the same on all ranks."""
        return self._saving is not None

    @property
    def is_done(self) -> bool:
        """True if the thread has saved, or failed, and `finish` does not wait; ranks differ for a moment."""
        return self._saving is not None and self._saving.done()

    @property
    def has_failed(self) -> bool:
        """True if `finish` will raise; ranks differ for a moment."""
        return self._saving is not None and self._saving.done() and self._saving.exception() is not None

    def begin(self, draft: Draft, copies: Iterable[StateFragment], held: ExitStack) -> Future[Path]:
        """Save copies of the state, after an earlier save has been finished; return what becomes of it.

        held: what is closed when the thread ends, such as the lock of the folder.
        """
        assert self._saving is None, "a save is finished before the next one begins"

        def write() -> Path:
            with held:
                return save(draft, copies, control=self._control)

        self._number += 1
        self._saving = self._thread.submit(write)
        return self._saving

    def finish(self) -> Path | None:
        """Wait for the save that is under way, and return its folder, None without one; raise its error."""
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        if self._control.size > 1:
            self._meter.wait_for("saving", self._number, lambda: _wait(saving))
        return saving.result()

    def release_behind(self, held: ExitStack) -> None:
        """Close what is held at once, or when the thread has ended."""
        if self._saving is None:
            held.close()
        else:
            self._saving.add_done_callback(lambda _: held.close())


def _wait(saving: Future[Path]) -> None:
    saving.result()


def host_copies(fragments: Iterable[StateFragment], ledger: AnyLedger) -> list[StateFragment]:
    """Return the same state in host memory, which later steps do not change."""
    copies = []
    for fragment in fragments:
        copy = fragment.tensor.detach().to("cpu", copy=True)
        ledger.elsewhere(copy)
        copies.append(fragment._replace(source=copy))
    return copies
