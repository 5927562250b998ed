"""Tests of how processes meet: every way in which they do not ends in a message, within the time limit."""

import socket
import time

import pytest
from torch.distributed import HashStore

from megazero.comm.rendezvous import check_backend, claim_gpu, open_store
from megazero.errors import TopologyError
from megazero.parallel.launch import Launch


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return a free port, which the launcher's variables name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free: int = probe.getsockname()[1]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free))
    return free


def problem_of(launch: Launch, seconds: float = 0.3) -> str:
    start = time.monotonic()
    with pytest.raises(TopologyError) as caught:
        open_store(launch, seconds)
    assert time.monotonic() - start < seconds + 5
    return str(caught.value)


@pytest.mark.parametrize("given", ["no", "0", "65536", "-1", "\u0661"])
def test_a_port_that_is_none(given: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", given)
    for rank in range(2):
        assert f"MASTER_PORT {given}\n    rule:  a port is a whole number" in problem_of(Launch(rank, 2, rank))


def test_a_host_that_nobody_knows(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    for rank in range(2):
        assert "MASTER_ADDR no-such-host.invalid\n    rule:  its name has an address" in problem_of(
            Launch(rank, 2, rank)
        )


def test_a_port_that_is_taken(port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        text = problem_of(Launch(0, 2, 0))
    assert f"MASTER_PORT {port}" in text and "Address already in use" in text


def test_a_rank_that_never_comes_is_named(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ranks 1-3 of 4 did not join within 0.3 s" in problem_of(Launch(0, 4, 0))
    assert capsys.readouterr().err == "waiting for ranks 1-3 of 4 to join; the limit is 0.3 s\n"


def test_nobody_listens(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank of every node says so before the limit."""
    nothing = f"MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: nothing listens there"
    for rank, lines in ((1, 0), (2, 1)):
        assert f"{nothing}, 0.3 s long" in problem_of(Launch(rank, 4, rank % 2))
        line = f"rank 2 on {socket.gethostname()} waits for rank 0: {nothing}; the limit is 0.3 s\n"
        assert capsys.readouterr().err == lines * line


def test_the_store_listens_at_the_job_s_address_alone(port: int) -> None:
    store = open_store(Launch(0, 1, 0), 5)
    socket.create_connection(("127.0.0.1", port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)
    del store


def test_two_ranks_of_a_host_with_one_gpu_are_named() -> None:
    store = HashStore()
    claim_gpu(store, 3, "GPU-1")
    claim_gpu(store, 3, "GPU-1")
    claim_gpu(store, 1, "GPU-2")
    with pytest.raises(TopologyError, match=rf"ranks 3 and 2 on {socket.gethostname()} have the same GPU \(GPU-1\)"):
        claim_gpu(store, 2, "GPU-1")


def test_ranks_with_different_backends_are_named() -> None:
    """A node whose GPUs are not seen ends with a message, not with a wait for ranks of the other backend."""
    store, host = HashStore(), socket.gethostname()
    for rank in (3, 0):
        check_backend(store, rank, "nccl")
    with pytest.raises(TopologyError, match=rf"nccl on {host} \(rank 3\), gloo on {host} \(rank 2\)"):
        check_backend(store, 2, "gloo")
