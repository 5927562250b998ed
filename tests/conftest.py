"""Settings of the whole test suite: no test depends on timing, and none needs more than its markers declare.

A test that is neither `gloo` nor `cuda` is marked `pure`: it fails if it starts ranks or makes a process group.  Tests
marked `cuda` are skipped where there is no GPU.
"""

import gc
import multiprocessing.context
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support.disks import skipped_fsync

# Until the tests begin nothing is garbage: what is imported stays, and passes of the collector over it take a second.
gc.disable()

# What is written is to outlive the process, which it does without fsync; that it outlives the machine, no test can see.
# Waiting for disks took up to two thirds of the time of tests that save.  What needs the disk itself calls fdatasync.
os.fsync = skipped_fsync

# A busy machine must not fail a property test: by default hypothesis fails an example that takes over 200 ms.
settings.register_profile("megazero", deadline=None)
settings.load_profile("megazero")

# Inductor would compile and load a program for each of the processor's instruction sets before its first kernel, to
# learn whether compiler and processor have it: seven seconds, in every process that compiles.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A message wakes the rank that it is for.  Were that one to run at once, the sender would stop inside gloo, with the
# lock of the connection that its own gloo thread tries for again and again: up to half of the ranks' time.  Processes
# of this kind, and those that they start, take no core from one that runs.
if hasattr(os, "SCHED_BATCH"):
    with suppress(OSError):  # a container may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# What a shell starts in the background ignores Ctrl-C, and what nohup starts a closed terminal; so would every program
# that a test sends these signals.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


TESTS = Path(__file__).resolve().parent
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IS_OF_RANKS = pytest.StashKey[bool]()  # whether the test's file has tests that start ranks


def pytest_configure(config: pytest.Config) -> None:
    """Let each of the processes that share out all tests import the test files from another one on.

    All of them import all files, and a file's asserts are rewritten unless that has been done before: 25 seconds in a
    fresh tree.  So each process finds what another one has rewritten, and together they do it once.
    """
    worker = getattr(config, "workerinput", None)
    if worker is not None and [Path(name).resolve() for name in config.args] == [TESTS]:
        files = sorted(TESTS.rglob("test_*.py"))
        start = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
        config.args = [str(path) for path in (*files[start:], *files[:start])]


# This runs before pytest's own hook, which deselects by -m, so that -m can select `pure` tests.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that are neither `gloo` nor `cuda` as `pure`; skip tests marked `cuda` where there is no GPU."""
    items.sort(key=lambda item: item.path)  # in one order, wherever collecting began
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("gloo", "cuda")):
            item.add_marker(pytest.mark.pure)
    # The short files come last, so that processes which share out the files end at about the same time.
    long_files = {item.path for item in items if item.get_closest_marker("gloo")}
    items.sort(key=lambda item: item.path not in long_files)
    for item in items:
        item.stash[_IS_OF_RANKS] = item.path in long_files
    needy = [item for item in items if item.get_closest_marker("cuda")]
    if needy and not _has_gpu():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_collection_finish() -> None:
    """Keep modules and test items, which live to the end, out of the garbage collector's passes, and make these rare.

    Cycles are collected after every file; by its own thresholds the collector would go through everything far oftener.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Forbid process groups while a pure test and its fixtures run; after a file's last test, clear up behind it."""
    before = [(number, signal.getsignal(number)) for number in _ENDING]
    with _no_process_groups() if item.get_closest_marker("pure") else nullcontext():
        answer = yield
    # What a test's own run has set would also count for processes that later tests fork, and so end by a signal.
    for number, handler in before:
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    if nextitem is not None and item.stash[_IS_OF_RANKS] and not nextitem.stash[_IS_OF_RANKS]:
        # Ranks that wait for calls have threads of gloo, which wake a hundred times a second: a quarter of the time.
        from support.processes import close_pools

        close_pools()
    if nextitem is not None and nextitem.path != item.path:
        # What a file's tests leave behind lives on: modules, caches, reports.  Every run of a program ends with a
        # collection, which would go through all of it: over a second each, towards the end of the tests.
        gc.collect()
        gc.freeze()
    return answer


@pytest.fixture(autouse=True)
def _ends_without_a_group() -> Iterator[None]:
    """Let a test fail that leaves a process group behind, in which later tests of this process would be a rank."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test leaves a process group behind")


@contextmanager
def _no_process_groups() -> Iterator[None]:
    """Make starting ranks, rendezvous and torchrun fail with the name of the marker that is missing."""
    import torch.distributed  # Slow to import: by now the test's own module has done it, if any does.
    from support.processes import WorkerPool

    start = subprocess.Popen.__init__

    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("a test that needs a process group is to be marked gloo")

    def refuse_torchrun(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        if not isinstance(args, str) and "torch.distributed.run" in args:
            refuse()
        start(self, args, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerPool, "call", refuse)
        patch.setattr(multiprocessing.context.ForkServerProcess, "_Popen", refuse)
        patch.setattr(torch.distributed, "TCPStore", refuse)
        patch.setattr(subprocess.Popen, "__init__", refuse_torchrun)
        yield


def _has_gpu() -> bool:
    import torch  # Slow to import, and most selections of tests don't need it.

    return torch.cuda.is_available()
