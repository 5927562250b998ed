"""Tests of the end of a job one of whose ranks fails, with real processes: who is named, and when all have ended."""

import re
from pathlib import Path

import pytest
from support.failing_ranks import LIMIT_SECONDS, Ended, run_failing_jobs

from megazero.comm.faults.fault_report import MOST_LINES

START_SECONDS = 20.0  # more than it takes to fork, join and come to the fault on a busy machine
END_SECONDS = 10.0  # from the fault, or from the limit of a collective


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return run_failing_jobs(tmp_path_factory.mktemp("jobs"), START_SECONDS + LIMIT_SECONDS + END_SECONDS)


def report_of(job: Ended, fault: str) -> str:
    """Return the job's only report, printed by one rank, which names all ranks and begins with the fault."""
    (report,) = (printed for printed in job.printed if printed)
    assert len(report.splitlines()) <= MOST_LINES, report
    assert re.search(fault, report), report
    assert "Traceback" not in report and "frame #" not in report, report
    return report


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "fault", "codes"),
    [
        ("killed", r"^fault: rank 1 .*dead: its process is gone.*last heartbeat", (1, -9)),
        ("asleep", r"^fault: rank 1 .*late: in forward, at .*failing_ranks.py:\d+ in asleep", (1, 1)),
        ("mismatched", r"^fault: ranks 0-1: mismatched collectives: rank 0 in all_reduce .* rank 1 in scalars", (1, 1)),
        (
            "stopped",
            r"fault: 127.0.0.1 \(node 0\), which holds the job's store, does not answer\n.*rank 0 .*stopped",
            (None, 1),
        ),
    ],
)
def test_who_is_missing_is_named_once(
    jobs: dict[str, Ended], name: str, fault: str, codes: tuple[int | None, int]
) -> None:
    job = jobs[name]
    report = report_of(job, fault)
    assert "step 10" in report
    assert job.codes == codes
    ended = [seconds for seconds, code in zip(job.seconds, job.codes, strict=True) if code is not None]
    assert max(ended) < LIMIT_SECONDS + END_SECONDS


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["user_error", "bug", "slow_journal", "hung_journal", "device_error"])
def test_all_end_10_seconds_after_an_error_of_one(jobs: dict[str, Ended], name: str) -> None:
    """They do so even if the author's file system hangs, or a peer's communicators cannot be aborted."""
    assert max(jobs[name].seconds) < END_SECONDS, jobs[name].seconds


@pytest.mark.gloo
def test_the_error_of_rank_0_is_printed_alone(jobs: dict[str, Ended]) -> None:
    """Rank 0 holds the store, and the other rank ends silently with its status all the same."""
    assert jobs["user_error"].printed == ("data error: a damaged token\n", "")
    assert jobs["user_error"].codes == (2, 2)


@pytest.mark.gloo
def test_a_rank_that_fails_on_a_device_aborts_its_communicators_and_all_end(jobs: dict[str, Ended]) -> None:
    """The message comes first; a rank that waits for the device, and whose abort hangs, ends all the same."""
    job = jobs["device_error"]
    assert job.printed == ("", "data error: a damaged token\nno process groups are left\n")
    assert job.codes == (2, 2)


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["bug", "slow_journal", "hung_journal"])
def test_a_bug_has_its_own_traceback_and_no_other(jobs: dict[str, Ended], name: str) -> None:
    other, own = jobs[name].printed
    assert other == ""
    assert own.count("Traceback") == 1 and "KeyError: 'a bug'" in own
    assert own.splitlines()[-1].startswith("fault: rank 1 ")
    assert jobs[name].codes == (1, 1)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("killed", "rank 1 .*dead: its process is gone"),
        ("user_error", "rank 0 .*failed: DataError: a damaged token; step 10, .*forward"),
        ("bug", "rank 1 .*failed: KeyError: 'a bug.; step 10, .*forward"),
    ],
)
def test_a_fault_is_in_the_journal_once(jobs: dict[str, Ended], name: str, words: str) -> None:
    (report,) = jobs[name].journal
    assert re.search(words, report[0]), report


@pytest.mark.gloo
def test_stacks_are_in_files(jobs: dict[str, Ended]) -> None:
    (pattern,) = re.findall(r"could write them: (.*)$", report_of(jobs["asleep"], "fault"), re.MULTILINE)
    written = sorted(Path(pattern).parent.glob("rank_*.txt"))
    assert [path.name for path in written] == ["rank_0.txt", "rank_1.txt"]
    assert "in asleep" in written[1].read_text()
    assert "all_reduce number 9 on dp" in written[1].read_text()
    assert "Timed out waiting" in written[0].read_text()
