"""An update that runs on a thread beside the next step (the delayed parameter update of ZeRO-Offload, arXiv 2101.06840,
section 5.2).

It is a row of tasks, one for each bucket, in the order in which backward reduces buckets.  So the next backward waits
only until the bucket whose gradients it is about to overwrite has been updated.  The new weights are published at the
end of that step.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.memory.copies import Arrival
from megazero.zero.layout import Bucket


class LateWeights(NamedTuple):
    """The weights that late updates have made of what a rank owns of a bucket, in the working parameters' format.

    values: [owned elements], at the bucket's home.  arrival: that of the last copy of them to the device.
    """

    values: Tensor
    arrival: Arrival


class LateUpdate:
    """The tasks of one update; `wait_for` and `finish` raise what a task has raised, after which none is begun.

    weights: by the bucket's index.  unpublished: the buckets whose weights have changed since they were published.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: dict[int, Future[None]] = {}  # by the bucket's index, in order
        self._has_failed = Event()
        self.weights: dict[int, LateWeights] = {}
        self.unpublished: set[int] = set()

    @property
    def has_failed(self) -> bool:
        """True if a task has failed, after which the weights are those of no step."""
        return self._has_failed.is_set()

    def begin(self, tasks: Iterable[tuple[Bucket, Callable[[], None]]]) -> None:
        """Begin the tasks, one after the other; the update before has been finished."""
        assert not self._tasks, "one update at a time"
        self._thread = self._thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="update")
        self._tasks = {bucket.index: self._thread.submit(self._run, task) for bucket, task in tasks}
        self.unpublished = set(self._tasks)

    def wait_for(self, bucket: Bucket) -> None:
        """Wait until a bucket has been updated, so that its gradients may be overwritten."""
        task = self._tasks.get(bucket.index)
        if task is not None:
            task.result()

    def finish(self) -> None:
        """Wait until all buckets have been updated."""
        for task in self._tasks.values():
            task.result()
        self._tasks = {}

    def close(self) -> None:
        """End the thread once its tasks have ended, whatever they have raised."""
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, task: Callable[[], None]) -> None:
        if self._has_failed.is_set():
            return
        try:
            with torch.no_grad():
                task()
        except BaseException:
            self._has_failed.set()
            raise
