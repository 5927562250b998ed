"""Tests of what becomes of an error: whose it is, what is printed, and the exit status of the job."""

import pytest
from support.each import each
from torch.distributed import HashStore

from megazero.comm.faults.flight_record import FlightRecord
from megazero.comm.faults.monitor import Monitor, place_in_job
from megazero.comm.faults.shutdown import is_of_communication, reported_faults
from megazero.errors import CollectiveError, DataError
from megazero.parallel.topology import Topology

LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35012"


def chained(first: Exception, second: Exception) -> Exception:
    """Return `second`, as raised in a finally block while `first` was on its way."""
    try:
        try:
            raise first
        finally:
            raise second
    except Exception as error:
        return error


@each(
    ("error", "is_lost"),
    [
        (RuntimeError(LOST), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (CollectiveError("ranks disagree"), True),
        (RuntimeError("can't allocate memory"), False),
        (DataError("a damaged token"), False),
        (chained(RuntimeError(LOST), RuntimeError("unfinished")), True),
        (chained(KeyError("a bug"), RuntimeError(LOST)), False),
    ],
)
def test_whose_error_it_is(error: Exception, is_lost: bool) -> None:
    assert is_of_communication(error) is is_lost


def test_a_job_of_one_process_raises_as_ever() -> None:
    job = place_in_job(0, Topology(), limit_seconds=1, folder=".", is_run=True)
    with pytest.raises(DataError), reported_faults(None, FlightRecord(), job):
        raise DataError("the file is gone")
    with reported_faults(None, FlightRecord(), job):
        pass


def test_of_ranks_that_fail_at_once_one_prints() -> None:
    """The error of the first is the job's, with its status; the other's ends without a word, with the same status."""
    store = HashStore()
    first, second = (
        Monitor(store, FlightRecord(), place_in_job(rank, Topology(dp=2), limit_seconds=9, folder=".", is_run=True))
        for rank in range(2)
    )
    assert first.note is second.note is None, "both have failed before either was told of the other"
    assert first.claim(DataError("a damaged token"), "DataError", status=2)
    assert not second.claim(MemoryError("no room"), "MemoryError", status=3)
    assert second.note is not None and second.note.status == 2
    assert not second.claim(KeyError("later"), "KeyError", status=1)
