"""Tests what a user sees when the files of model states cannot be made, fail or are damaged, or memory is missing.

By either door a fault ends in an error that names the place, without a traceback in a run, and before anything is lost.
"""

import contextlib
import errno
import io
import os
import re
import resource
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from threading import active_count
from typing import Any, NamedTuple

import pytest
import torch
from support.each import each
from support.forked_job import ForkedJob, is_running
from support.launch import SMALL_RUN, command_line, read_steps, run_here, set_launcher
from support.mounts import ext4_disk, free_bytes, mounted, small_disk
from torch import nn

import megazero
from megazero import zero
from megazero.checkpoint.folders import LATEST
from megazero.checkpoint.reader import open_checkpoint
from megazero.errors import FileError, MemoryLimitError, UserError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.state.access import safe_get_full_fp32_param

NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="files without names are opened in /proc")
FILES = {"--zero-stage": "2", "--offload-optimizer": "nvme", "--sub-group-size": "2000"}
WIDTH = 64


def make_engine(folder: Path | str | None, **zero: Any) -> DataParallelEngine:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    settings = {"zero_stage": 2, "offload_optimizer": "nvme", "sub_group_size": 1024, **zero}
    if folder is not None:
        settings["nvme_path"] = str(folder)
    return megazero.initialize(model, {"zero": settings, "optimizer": {"type": "AdamW", "lr": 0.01}})


def train(engine: DataParallelEngine, first: int, steps: int) -> list[float]:
    found = []
    for step in range(first, first + steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


# --- at the start -----------------------------------------------------------------------------------------------------

Place = Callable[[Path], AbstractContextManager[Path | str | None]]


class Fault(NamedTuple):
    """A folder in which no files of states can be made: how it comes about, and the parts of its message in order."""

    place: Place
    told: tuple[str, ...]


@contextmanager
def a_file(folder: Path) -> Iterator[Path]:
    (folder / "file").touch()
    yield folder / "file"


@contextmanager
def a_device(folder: Path) -> Iterator[Path]:
    yield Path(os.devnull)


@contextmanager
def a_pipe(folder: Path) -> Iterator[Path]:
    os.mkfifo(folder / "pipe")
    yield folder / "pipe"


@contextmanager
def below_a_file(folder: Path) -> Iterator[Path]:
    (folder / "file").touch()
    yield folder / "file" / "below" / "further"


@contextmanager
def a_link_to_nothing(folder: Path) -> Iterator[Path]:
    (folder / "link").symlink_to(folder / "nothing")
    yield folder / "link"


@contextmanager
def a_link_to_itself(folder: Path) -> Iterator[Path]:
    (folder / "loop").symlink_to(folder / "loop")
    yield folder / "loop" / "below"


@contextmanager
def a_long_name(folder: Path) -> Iterator[Path]:
    yield folder / ("x" * 300)


@contextmanager
def no_path(folder: Path) -> Iterator[None]:
    yield None


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    with mounted(folder / "mount", "-t", "tmpfs", "-o", "ro", "none") as place:
        yield place


@contextmanager
def below_read_only(folder: Path) -> Iterator[Path]:
    with read_only(folder) as place:
        yield place / "new"


@contextmanager
def where_no_file_can_be(folder: Path) -> Iterator[Path]:
    if not Path("/proc/self/fdinfo").is_dir():
        pytest.skip("needs /proc")
    yield Path("/proc/self/fdinfo")


@contextmanager
def a_small_disk(folder: Path) -> Iterator[Path]:
    with small_disk(folder / "disk") as place:
        (place / "other").write_bytes(bytes(free_bytes(place) - 40_000))
        yield place


@contextmanager
def a_disk_of_few_files(folder: Path) -> Iterator[Path]:
    with mounted(folder / "disk", "-t", "tmpfs", "-o", "nr_inodes=1", "none") as place:
        yield place


@contextmanager
def another_user(folder: Path) -> Iterator[Path]:
    """Yield a folder that its user may not write to; root becomes another user for a while."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name, ExitStack() as stack:
        place = Path(name)
        place.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IROTH | stat.S_IXOTH)
        if not os.geteuid():
            os.seteuid(65534)
            stack.callback(os.seteuid, 0)
        yield place


@contextmanager
def few_open_files(folder: Path) -> Iterator[Path]:
    """Let this process open no file more than it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    (folder / "states").mkdir()
    with ExitStack() as stack:
        spare = stack.enter_context(open(os.devnull, "rb"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare.fileno(), before[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        yield folder / "states"


@contextmanager
def small_files(folder: Path) -> Iterator[Path]:
    with largest_file(8192):
        yield folder / "states"


def largest_file(nbytes: int) -> AbstractContextManager[None]:
    """Let this process write no file beyond so many bytes."""
    return limited(resource.RLIMIT_FSIZE, nbytes)


@contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    """Let this process have no more of what a limit of the system is about."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


FOLDERS: Mapping[str, Fault] = {
    "a file": Fault(a_file, ("configuration error", "{place}", "is none", "a folder that exists")),
    "a device": Fault(a_device, ("configuration error", "{place}", "/null is none", "a folder that exists")),
    "a pipe": Fault(a_pipe, ("configuration error", "{place}", "/pipe is none", "a folder that exists")),
    "below a file": Fault(below_a_file, ("configuration error", "{place}", "/file is none", "a folder that exists")),
    "a link to nothing": Fault(a_link_to_nothing, ("configuration error", "{place}", "/link is none")),
    "a link to itself": Fault(a_link_to_itself, ("configuration error", "{place}", "/loop is none")),
    "a name that is too long": Fault(a_long_name, ("file error", "{place}", "File name too long", "legal:")),
    "no path": Fault(no_path, ("configuration error", "nvme without", "need a folder", "FOLDER")),
    "a mount that is read only": Fault(read_only, ("file error", "{place}", "Read-only file system", "legal:")),
    "below a mount that is read only": Fault(below_read_only, ("file error", "{place}", "Read-only file", "legal:")),
    "a folder without files": Fault(where_no_file_can_be, ("file error", "{place}", "can be made in", "legal:")),
    "a small disk": Fault(a_small_disk, ("file error", "in {place}", "bytes (", "are free", "No space left", "legal:")),
    "a disk of few files": Fault(a_disk_of_few_files, ("file error", "{place}", "files can be made in: No space")),
    "another user's folder": Fault(another_user, ("file error", "{place}", "Permission denied", "legal:")),
    "too many open files": Fault(few_open_files, ("file error", "{place}", "Too many open files", "legal:")),
    "a limit of the size of files": Fault(small_files, ("file error", "in {place}", "File too large", "ulimit -f")),
}


def check_message(text: str, told: tuple[str, ...], place: Path | str | None) -> None:
    position = 0
    for part in told:
        position = text.find(part.replace("{place}", str(place)), position)
        assert position >= 0, (part, text)
    assert "Traceback" not in text


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_in_which_no_files_can_be_made(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, opened = FOLDERS[name], Path("/proc/self/fd")
    set_launcher(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with fault.place(tmp_path) as place:
        for _ in range(2):  # what was opened before the failure is closed
            before = len(os.listdir(opened)) if name != "too many open files" and opened.exists() else 0
            with pytest.raises(UserError) as caught:
                make_engine(place)
            check_message(str(caught.value), fault.told, place)
            del caught
            after = len(os.listdir(opened)) if name != "too many open files" and opened.exists() else 0
            assert after == before
        if name in ("too many open files", "another user's folder"):  # a run opens other files before, its modules'
            return
        flags = {**SMALL_RUN, **FILES, "--nvme-path": None if place is None else str(place)}
        message = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(message):
            code = run_here(command_line(flags), monkeypatch)
        check_message(message.getvalue(), fault.told, place)
        assert code == FileError.exit_code == 2


def test_files_in_the_systems_cache_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_launcher(monkeypatch)
    with mounted(tmp_path / "ramfs", "-t", "ramfs", "none") as folder:
        notice = f"notice: the file system of {folder} has no direct access to its disk: states in files pass through"
        make_engine(folder).close()
        assert capsys.readouterr().err.count(notice) == 1
        config = {"zero": {"zero_stage": 3, "offload_param": "nvme", "nvme_path": str(folder)}}
        whole = {"param_persistence_threshold": 0, **config["zero"]}
        megazero.initialize(nn.Linear(WIDTH, WIDTH), {"zero": whole}).close()
        told = capsys.readouterr().err
        assert told.count(notice) == 1 and " read, " in told, "without an optimizer too"
        with zero.Init(remote_device="nvme", config_dict_or_path=config):
            model = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        assert capsys.readouterr().err.count(notice) == 1
        del model
        run = {**SMALL_RUN, **FILES, "--train-iters": "1", "--nvme-path": str(folder)}
        assert run_here(command_line(run), monkeypatch) == 0
        assert capsys.readouterr().out.count(notice) == 1
    make_engine(None, offload_optimizer="cpu").close()
    assert "notice" not in capsys.readouterr().err


def test_an_engine_that_could_not_be_made_is_made_elsewhere(tmp_path: Path) -> None:
    """The model is as it was: it goes on in the same process with a better folder."""
    with small_disk(tmp_path / "disk") as disk:
        (disk / "other").write_bytes(bytes(free_bytes(disk) - 40_000))
        free = free_bytes(disk)
        with pytest.raises(FileError):
            make_engine(disk)
        assert free_bytes(disk) == free, "files that could be made are given back"
        (disk / "other").unlink()
        free = free_bytes(disk)
        engine = make_engine(disk)
        needed = free - free_bytes(disk)
        engine.close()
        (disk / "other").write_bytes(bytes(free - needed))
        engine = make_engine(disk)
        assert free_bytes(disk) == 0 and len(train(engine, 0, 2)) == 2, "room for the states is room enough"
        engine.close()
    engine = make_engine(tmp_path / "states")
    assert len(train(engine, 0, 2)) == 2
    engine.close()


# --- later, in the library --------------------------------------------------------------------------------------------


@contextmanager
def descriptors(pid: int, folder: Path, kind: str = "") -> Iterator[list[int]]:
    """Open the files of states that a process has in a folder, which have no names, a second time."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append((entry, os.readlink(entry)))
    names = (entry for entry, name in found if name.startswith(f"{folder}/{kind}") and name.endswith(" (deleted)"))
    opened = [os.open(entry, os.O_RDWR) for entry in names]
    try:
        yield opened
    finally:
        for descriptor in opened:
            os.close(descriptor)


def flip(descriptor: int) -> None:
    """Flip a bit in every page of a file."""
    for at in range(100, os.fstat(descriptor).st_size, 4096):
        byte = os.pread(descriptor, 1, at)
        if byte:
            os.pwrite(descriptor, bytes([byte[0] ^ 4]), at)
    os.fdatasync(descriptor)


def truncate(descriptor: int) -> None:
    os.ftruncate(descriptor, 1000)


def lose(descriptor: int) -> None:
    """Lose all that has been written to a file."""
    os.pwrite(descriptor, bytes(os.fstat(descriptor).st_size), 0)
    os.fdatasync(descriptor)


def tear(descriptor: int) -> None:
    """Lose the second half of every page that has been written."""
    for at in range(2048, os.fstat(descriptor).st_size, 4096):
        os.pwrite(descriptor, bytes(2048), at)
    os.fdatasync(descriptor)


def misplace(descriptor: int) -> None:
    """Move every page of a file to the next one's place."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.pwrite(descriptor, content[-4096:] + content[:-4096], 0)
    os.fdatasync(descriptor)


DAMAGES = (
    (flip, "master", "its checksum differs"),
    (flip, "exp_avg", "its checksum differs"),
    (truncate, "exp_avg_sq", "could be read"),
    (flip, "parameters", "its checksum differs"),
    (truncate, "parameters", "could be read"),
    (lose, "exp_avg", "its checksum differs"),
    (tear, "master", "its checksum differs"),
    (misplace, "exp_avg_sq", "its checksum differs"),
)


@NEEDS_PROC
@each(("damage", "kind", "told"), DAMAGES)
def test_after_damage_an_engine_is_of_no_use_and_the_checkpoint_is(
    damage: Callable[[int], None], kind: str, told: str, tmp_path: Path
) -> None:
    folder, saved = tmp_path / f"states {damage.__name__} {kind}", tmp_path / f"{damage.__name__} {kind}"
    stage = {"zero_stage": 3, "offload_param": "nvme", "offload_param_buffer_count": 1, "reduce_bucket_size": 1000}
    plain = make_engine(None, offload_optimizer="none", sub_group_size=1000000000)
    losses = train(plain, 0, 5)
    engine = make_engine(folder, **(stage if kind == "parameters" else {}))
    assert train(engine, 0, 3) == losses[:3]
    path = engine.save_checkpoint(saved)
    with descriptors(os.getpid(), folder, f"{kind}.") as opened:
        assert len(opened) == 1
        damage(opened[0])
    uses: list[Callable[[], object]] = [lambda: engine.save_checkpoint(saved, tag="later"), lambda: train(engine, 3, 1)]
    if kind == "parameters":  # which a checkpoint has none of
        del uses[0]
    errors = []
    for use in uses:
        with pytest.raises(UserError) as caught:
            use()
        errors.append(str(caught.value))
    for error in errors:
        check_message(error, ("the block at offset", f"{folder}/{kind}.", told, "another disk"), None)
    assert (saved / LATEST).read_text().strip() == Path(path).name
    engine.close()
    with descriptors(os.getpid(), folder) as opened:
        assert opened == []
    resumed = make_engine(folder)
    resumed.load_checkpoint(saved)
    assert train(resumed, 3, 2) == losses[3:]
    resumed.close()


def test_a_write_that_fails(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "states")
    train(engine, 0, 1)
    with largest_file(4096):
        with pytest.raises(FileError) as caught:
            train(engine, 1, 2)
        check_message(str(caught.value), ("the block at offset", f"{tmp_path}/states/", "must be written"), None)
    with pytest.raises(FileError, match="must be written"):  # older contents are not taken for the states
        safe_get_full_fp32_param(next(engine.module.parameters()))
    engine.close()


def test_a_disk_that_fails(tmp_path: Path) -> None:
    with ext4_disk(tmp_path) as (folder, disk):
        engine = make_engine(folder)
        train(engine, 0, 1)
        with descriptors(os.getpid(), folder) as opened:
            for descriptor in opened:
                os.fdatasync(descriptor)
        size = disk.stat().st_size
        os.truncate(disk, 100_000)
        with pytest.raises(FileError) as caught:
            train(engine, 1, 2)
        message = str(caught.value)
        check_message(message, ("the block at offset", f"{folder}/"), None)
        # A block behind the end cannot be read.  If another one is written behind it first, the disk has grown over it
        # again, by zeros.
        assert os.strerror(errno.EIO) in message or "its checksum differs" in message
        os.truncate(disk, size)
        engine.close()


# --- memory -----------------------------------------------------------------------------------------------------------


def no_more_memory() -> AbstractContextManager[None]:
    """Let the process have 24 MiB more than now."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return limited(resource.RLIMIT_DATA, (int(found[1]) << 10) + (24 << 20))


def states_of_the_device(folder: Path) -> None:
    """Move states, 36 MiB of each kind, to host memory that there is not; they stay on the device."""
    torch.manual_seed(3)
    model = nn.Linear(3072, 3072, bias=False)
    config = {"zero": {"zero_stage": 3}, "optimizer": {"type": "AdamW", "lr": 0.01}}
    engine, x = megazero.initialize(model, config), torch.ones(1, 3072)
    with torch.no_grad(), ExitStack() as stack:
        stack.callback(engine.close)
        found = engine(x)
        stack.callback(lambda: torch.testing.assert_close(engine(x), found, rtol=0, atol=0))
        stack.enter_context(no_more_memory())
        engine.offload_states()


def threads_of_files(folder: Path) -> None:
    with no_more_memory():
        make_engine(folder, aio_queue_depth=32)  # of 8 MiB each; those of a few threads that have ended are there


MEMORY: Mapping[Callable[[Path], None], tuple[str, ...]] = {
    states_of_the_device: (
        *("memory limit exceeded: 37748736 bytes (36.0 MiB) of host memory", "the system has that much left"),
        *("legal: less in host memory", "or device nvme"),
    ),
    threads_of_files: (
        *("memory limit exceeded: 32 threads that read and write files, of which ", "could be started"),
        *("can't start new thread", "legal: a smaller aio_queue_depth"),
    ),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is set from what Linux counts")
@each("use", MEMORY)
def test_memory_that_is_missing(use: Callable[[Path], None], tmp_path: Path) -> None:
    before = active_count()
    with pytest.raises(MemoryLimitError) as caught:
        use(tmp_path)
    check_message(str(caught.value), MEMORY[use], None)
    assert active_count() <= before


# --- later, in a run --------------------------------------------------------------------------------------------------


def flags(folder: Path, states: Path, **more: str) -> list[str]:
    """Return the words of a run in `folder` that saves every 4 steps; `more` holds further flags, without dashes."""
    paths = {"--save": f"{folder / 'saved'}", "--load": f"{folder / 'saved'}", "--metrics-file": f"{folder / 'steps'}"}
    endless = {"--train-iters": "1000000", "--log-interval": "1000000", "--save-interval": "4", "--bf16": ""}
    words = {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    return command_line({**SMALL_RUN, **FILES, **paths, **endless, "--nvme-path": str(states), **words})


def losses_of(folder: Path) -> dict[int, float]:
    return {number: step["loss"] for number, step in read_steps(folder / "steps").items()}


def damage_until_the_end(job: ForkedJob, pid: int, folder: Path, damage: Callable[[int], None]) -> None:
    """Damage master weights again and again, since a step may have read them before, and writes them again."""
    with descriptors(pid, folder, "master.") as opened:
        assert len(opened) == 1

        def is_over() -> bool:
            damage(opened[0])
            return not is_running(pid)

        job.wait_until(is_over)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of a run of two ranks on the device, to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = flags(folder, folder, exit_interval="40", save_interval="40", offload_optimizer="none")
    words = [word for word in words if word != "--nvme-path" and word != str(folder)]
    with ForkedJob(words, ranks=2, folder=folder) as job:
        assert job.wait() == [0, 0], job.output()
    return losses_of(folder)


@NEEDS_PROC
@pytest.mark.gloo
@pytest.mark.parametrize(("damage", "told"), [(flip, "its checksum differs"), (truncate, "could be read")])
def test_damage_ends_all_ranks_and_the_run_goes_on_from_its_checkpoint(
    damage: Callable[[int], None], told: str, tmp_path: Path, undisturbed: Mapping[int, float]
) -> None:
    """The rank whose file is damaged tells it alone; the other one ends with its status."""
    states = tmp_path / "states"
    with ForkedJob(flags(tmp_path, states), ranks=2, folder=tmp_path) as job:
        job.wait_until(lambda: (tmp_path / "saved" / LATEST).exists())
        damage_until_the_end(job, job.pids[1], states, damage)
        assert job.wait() == [FileError.exit_code] * 2, job.output()
    text = job.output()
    check_message(text, ("file error", "the block at offset", f"{states}/master.", told, "legal:"), None)
    assert text.count("file error") == 1 and os.listdir(states) == []
    saved = open_checkpoint(tmp_path / "saved").step
    assert (
        saved % 4 == 0
        and [problem for problems in open_checkpoint(tmp_path / "saved").verify() for problem in problems] == []
    )
    assert all(loss == undisturbed[number] for number, loss in losses_of(tmp_path).items() if number in undisturbed)
    with ForkedJob(flags(tmp_path, states, exit_interval=str(saved + 2)), ranks=2, folder=tmp_path) as job:
        assert job.wait() == [0, 0], job.output()
    resumed = losses_of(tmp_path)
    assert max(resumed) == saved + 2
    assert all(loss == undisturbed[number] for number, loss in resumed.items() if number in undisturbed)


@pytest.mark.gloo
def test_a_disk_that_is_too_small_for_the_second_rank(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as states:
        (states / "other").write_bytes(bytes(free_bytes(states) - 300_000))  # a rank has 180 kB
        with ForkedJob(flags(tmp_path, states), ranks=2, folder=tmp_path) as job:
            assert job.wait() == [FileError.exit_code] * 2, job.output()
        text = job.output()
        check_message(text, ("file error", f"in {states}", "No space left", "legal:"), None)
        assert text.count("file error") == 1 and not (tmp_path / "saved" / LATEST).exists()
        assert free_bytes(states) >= 299_000


@pytest.mark.gloo
def test_two_runs_share_a_folder_on_a_disk_that_becomes_full(tmp_path: Path, undisturbed: Mapping[int, float]) -> None:
    """The files have their space from the beginning, so nothing that fills the disk later stops the runs."""
    with small_disk(tmp_path / "disk", mib=2) as states, ExitStack() as stack:
        folders = [tmp_path / name for name in ("one", "other")]
        free, jobs = free_bytes(states), []
        for folder in folders:
            folder.mkdir()
            jobs.append(stack.enter_context(ForkedJob(flags(folder, states), ranks=2, folder=folder)))
        for job, folder in zip(jobs, folders, strict=True):
            job.wait_until(lambda folder=folder: len(read_steps(folder / "steps")) >= 2)
        (states / "other").write_bytes(bytes(free_bytes(states)))
        assert free_bytes(states) == 0
        for job, folder in zip(jobs, folders, strict=True):
            now = len(read_steps(folder / "steps"))
            job.wait_until(lambda folder=folder, now=now: len(read_steps(folder / "steps")) >= now + 2)
            os.kill(job.pids[0], signal.SIGTERM)
        for job, folder in zip(jobs, folders, strict=True):
            assert job.wait() == [0, 0], job.output()
            assert all(loss == undisturbed[n] for n, loss in losses_of(folder).items() if n in undisturbed)
        (states / "other").unlink()
        assert free_bytes(states) == free and os.listdir(states) == []


def test_there_are_thirty_faults() -> None:
    others = (
        test_files_in_the_systems_cache_are_told,
        test_a_write_that_fails,
        test_a_disk_that_fails,
        test_a_disk_that_is_too_small_for_the_second_rank,
    )
    assert len(FOLDERS) + len(set(DAMAGES)) + len(MEMORY) + len(others) >= 30
