"""Tests of the turns in which the processes of a node compile: who waits for whom, and for how long."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from functorch.compile import make_boxed_func
from support.processes import start_fork_server
from torch._inductor import config

from megazero.tensor_parallel.compiler import SEARCH, compiled, one_at_first


def in_turn(path: str, entered: Any, leave: Any) -> None:
    with one_at_first(path):
        entered.release()
        leave.wait(30)


def test_others_wait_for_the_first_and_go_on_together(tmp_path: Path) -> None:
    """Threads stand for processes: a lock is of an open file."""
    path, entered = str(tmp_path / "locks" / "graph"), threading.Semaphore(0)
    events = [threading.Event() for _ in range(4)]
    threads = [threading.Thread(target=in_turn, args=(path, entered, event)) for event in events]
    threads[0].start()
    assert entered.acquire(timeout=30)
    for thread in threads[1:]:
        thread.start()
    with one_at_first(str(tmp_path / "locks" / "another graph")):
        assert not entered.acquire(timeout=0.2), "nothing has been compiled yet"
    events[0].set()
    for _ in threads[1:]:
        assert entered.acquire(timeout=30), "the first is done, and no other one waits for another"
    for event in events:
        event.set()
    for thread in threads:
        thread.join(30)


@pytest.mark.gloo
def test_the_next_one_goes_on_when_the_first_fails_or_is_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "graph")
    with pytest.raises(KeyError), one_at_first(path):
        raise KeyError("an error of the compiler")
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    entered, leave = context.Semaphore(0), context.Event()
    process = context.Process(target=in_turn, args=(path, entered, leave))
    process.start()
    assert entered.acquire(timeout=30)
    waiting = threading.Thread(target=in_turn, args=(path, again := threading.Semaphore(0), done := threading.Event()))
    waiting.start()
    assert not again.acquire(timeout=0.2)
    os.kill(process.pid or 0, signal.SIGKILL)
    assert again.acquire(timeout=30)
    done.set()
    waiting.join(30)
    process.join(30)


@pytest.mark.parametrize("made", ["file", "nothing"])
def test_nothing_waits_where_files_cannot_be_locked(made: str, tmp_path: Path) -> None:
    if made == "file":
        (tmp_path / "locks").touch()  # no folder can be made there
    failing = patch("fcntl.flock", side_effect=OSError(95, "not supported"))
    with failing:
        began = time.monotonic()
        with one_at_first(str(tmp_path / "locks" / "graph")), one_at_first(str(tmp_path / "locks" / "graph")):
            pass
    assert time.monotonic() - began < 5.0


def test_every_graph_is_compiled_in_a_turn_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward are two graphs; another shape makes others, and the same one finds its own lock again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []

    def as_traced(graph: torch.fx.GraphModule, inputs: object, **_: object) -> Any:
        return make_boxed_func(graph.forward)

    def run(size: int) -> set[str]:
        torch._dynamo.reset()
        function = compiled(lambda x: (x * 3.0).sin())
        x = torch.ones(size, dtype=torch.float64, requires_grad=True)
        with patch("torch._inductor.compile_fx.compile_fx_inner", as_traced):
            function(x).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 3.0 * torch.full_like(x, 3.0).cos(), rtol=1e-12, atol=0)
        found.append(set(os.listdir(tmp_path / "megazero")))
        return found[-1]

    assert len(run(3)) == 2
    assert len(run(3)) == 2
    assert len(run(4)) == 4


def test_a_search_reaches_the_compiler_in_forward_and_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's settings are those of the search while it makes a searched function's graphs, and then no more."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found: list[list[Any]] = []

    def as_traced(graph: torch.fx.GraphModule, inputs: object, **_: object) -> Any:
        found.append([getattr(config, name) for name in SEARCH])
        return make_boxed_func(graph.forward)

    with patch("torch._inductor.compile_fx.compile_fx_inner", as_traced):
        for searches in (True, False):
            torch._dynamo.reset()
            function = compiled(lambda x: (x * 3.0).sin(), searches=searches)
            function(torch.ones(3, requires_grad=True)).sum().backward()
    plain = [getattr(config, name) for name in SEARCH]
    assert found == [list(SEARCH.values())] * 2 + [plain] * 2
    assert not any(value is True for value in plain)
