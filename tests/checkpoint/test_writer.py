"""Tests of saving: the content of the files, and that a failed or killed save leaves the earlier checkpoint intact."""

import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue
from safetensors import safe_open
from safetensors.torch import load_file
from support.checkpoints import saved_states
from support.disks import skipped_fsync
from support.late_communicator import LateCommunicator
from support.processes import mesh_in_worker, run_ranks
from support.saved_runs import ONE, OTHER
from support.sharded_state import Layout, State, finish, make_state, write_checkpoint
from support.thread_world import run_threads
from support.warm_python import warm_python

import megazero.checkpoint
from megazero.checkpoint.folder_lock import FolderLock, take_lock
from megazero.checkpoint.folders import list_steps, newest
from megazero.checkpoint.manifest import DTYPES
from megazero.checkpoint.merging import Written, plan_indices, write_part
from megazero.checkpoint.reader import open_checkpoint
from megazero.checkpoint.retention import Retention
from megazero.checkpoint.runs import RunIdentity
from megazero.checkpoint.writer import Draft, Saving, merge_own, prepare, save, write_data
from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.errors import CheckpointError
from megazero.owner import Owner
from megazero.parallel.param_spec import ParamSpec, StateFragment

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]


def save_state(
    root: Path,
    step: int,
    state: State,
    world: Communicator | None = None,
    tp: int = 1,
    lock: FolderLock | None = None,
) -> Path:
    world = world or LocalCommunicator()
    draft = Draft(root, step, {"iteration": step, "rank": world.rank}, f"step: {step}\n", lock)
    return save(draft, Layout(tp, world.size // tp).fragments(world.rank, state), control=world)


def holds(folder: Path, state: State) -> bool:
    return is_in(state, saved_states(open_checkpoint(folder)))


def is_in(state: State, found: State) -> bool:
    return all(torch.equal(found[key], full) for key, full in state.items())


def tree(root: Path) -> dict[str, str]:
    """Return every file below root with a hash of its content."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_checkpoint_is_a_folder_of_plain_files(tmp_path: Path) -> None:
    root = tmp_path / "new" / "run"
    assert save_state(root, 20, make_state()) == root / "step_0000020"
    assert list(tree(root)) == [
        "latest",
        "step_0000020/config.yaml",
        "step_0000020/index_00000.jsonl",
        "step_0000020/manifest.json",
        "step_0000020/rank_00000.safetensors",
    ]
    assert (root / "latest").read_text() == "step_0000020\n"
    assert (root / "step_0000020/config.yaml").read_text() == "step: 20\n"
    assert json.loads((root / "step_0000020/manifest.json").read_text())["progress"] == {"iteration": 20, "rank": 0}


def test_safetensors_reads_the_files_and_finds_every_region(tmp_path: Path) -> None:
    state = make_state()
    folder = write_checkpoint(tmp_path, state, Layout(2, 3, pad_to=3, seed=1), box_bytes=64)
    rebuilt = {f"{kind}/{name}": torch.full_like(full, float("nan")) for (name, kind), full in state.items()}
    for path in folder.glob("*.safetensors"):
        for key, values in load_file(path).items():
            name, region = re.fullmatch(r"(.*)\[(.*)\]", key).groups()
            place = tuple(slice(*map(int, part.split(":"))) for part in region.split(",") if part)
            assert values.nbytes <= 64
            rebuilt[name][place] = values
    for (name, kind), full in state.items():
        assert torch.equal(rebuilt[f"{kind}/{name}"], full), name


def test_bytes_in_the_manifest_are_those_of_safetensors(tmp_path: Path) -> None:
    state = make_state()
    folder = write_checkpoint(tmp_path, state, Layout(dp=2))
    checkpoint = open_checkpoint(folder)
    for file in checkpoint.manifest.files:
        content = (folder / file.name).read_bytes()
        boxes = [box for where, box in checkpoint.boxes() if where == file]
        with safe_open(folder / file.name, "pt") as opened:
            assert len(opened.keys()) == len(boxes)
        for box in boxes:
            place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.lengths, strict=True))
            expected = state[box.parameter, box.kind][place].numpy().tobytes()
            assert content[box.begin : box.end] == expected
            assert hashlib.sha256(expected).hexdigest() == box.sha256


def test_every_dtype_is_stored_bit_by_bit_and_aligned(tmp_path: Path) -> None:
    numbers = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), float("nan"), 3e-5])
    finite = numbers.nan_to_num(1, 1)
    tensors: dict[str, torch.Tensor]
    tensors = {name: (numbers if dtype.is_floating_point else finite).to(dtype) for name, dtype in DTYPES.items()}
    fragments = [
        StateFragment(ParamSpec(name, (7,), (7,), (0,)), "weight", 0, 7, tensor) for name, tensor in tensors.items()
    ]
    folder = save(Draft(tmp_path, 1, {}, ""), fragments, control=LocalCommunicator())
    checkpoint, loaded = open_checkpoint(folder), load_file(folder / "rank_00000.safetensors")
    for name, tensor in tensors.items():
        for got in (checkpoint.read_full(name), loaded[f"weight/{name}[0:7]"]):
            assert got.dtype == tensor.dtype
            assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), name
    for _, box in checkpoint.boxes():
        assert box.begin % tensors[box.parameter].element_size() == 0


def test_a_dtype_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    tensor = torch.zeros(2, dtype=torch.complex64)
    fragment = StateFragment(ParamSpec("p", (2,), (2,), (0,)), "weight", 0, 2, tensor)
    with pytest.raises(CheckpointError, match="complex64"):
        save(Draft(tmp_path, 1, {}, ""), [fragment], control=LocalCommunicator())
    assert list(tmp_path.iterdir()) == []


def test_saving_a_step_again_replaces_it_and_nothing_else(tmp_path: Path) -> None:
    first, second = make_state(1), make_state(2)
    save_state(tmp_path, 10, first)
    save_state(tmp_path, 20, first)
    assert save_state(tmp_path, 20, second) == tmp_path / "step_0000020_2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_0000010", "step_0000020_2"]
    assert holds(tmp_path, second)
    assert holds(tmp_path / "step_0000010", first)
    assert save_state(tmp_path, 20, first) == tmp_path / "step_0000020_3"
    assert holds(tmp_path, first)


def test_what_killed_runs_left_goes_at_the_next_save_and_what_others_write_stays(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    here = Owner.of_this_process()
    gone, elsewhere = replace(here, pid=process.pid), replace(here, machine="0" * 8, boot="0" * 8)
    (tmp_path / f".saving_step_0000007.{gone.tag}").mkdir()
    (tmp_path / f".saving_step_0000007.{gone.tag}" / "rank_00000.safetensors").write_bytes(b"half")
    (tmp_path / f".saving_latest.{gone.tag}").write_text("step_0000007")
    (tmp_path / f".saving_step_0000010.{elsewhere.tag}").mkdir()
    (tmp_path / ".saving_step_0000010").mkdir()  # of an owner that is not known
    (tmp_path / "notes.txt").write_text("mine")
    save_state(tmp_path, 10, make_state())
    stays = {f".saving_step_0000010.{elsewhere.tag}", ".saving_step_0000010", "notes.txt"}
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_0000010"} | stays


def a_save_under_way(root: Path, held: ExitStack) -> tuple[Saving, Draft, list[Written]]:
    """Let two ranks write their files of a checkpoint that is to be merged and published next."""
    state, draft = make_state(), Draft(root, 20, {}, "")
    saving = prepare(draft, held, 2)
    return saving, draft, [write_data(saving, rank, Layout(dp=2).fragments(rank, state)) for rank in range(2)]


def test_a_part_of_another_save_is_not_merged(tmp_path: Path) -> None:
    with ExitStack() as held:
        saving, _, written = a_save_under_way(tmp_path, held)
        plan = plan_indices([each.report(rank, 2) for rank, each in enumerate(written)])
        for save_id, each in zip((saving.save_id, "another"), written, strict=True):
            write_part(Path(saving.folder), save_id, each, plan)
        with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors\.json: save another\n.*another save"):
            merge_own(saving, plan, 0)
    assert not list(tmp_path.glob("step_*")) and not (tmp_path / "latest").exists()


def test_a_file_that_was_altered_after_its_rank_wrote_it_is_not_published(tmp_path: Path) -> None:
    with ExitStack() as held:
        saving, draft, written = a_save_under_way(tmp_path, held)
        with open(Path(saving.folder) / "rank_00001.safetensors", "ab") as file:
            file.write(b"x")
        with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors: \d+ bytes\n.*altered"):
            finish(saving, draft, written)
    assert not list(tmp_path.glob("step_*"))


def test_a_run_that_has_lost_its_lock_to_another_job_publishes_nothing(tmp_path: Path) -> None:
    lock = take_lock(tmp_path)
    lock.path.unlink()
    assert save_state(tmp_path, 10, make_state(), lock=lock) == tmp_path / "step_0000010", "the lock is taken again"
    other = {**json.loads(lock.path.read_bytes()), "id": "a" * 16, "host": "node07"}
    lock.path.write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match=r"is now held by process \d+ on node07(.|\n)*has lost its folder"):
        save_state(tmp_path, 20, make_state(), lock=lock)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".lock", "latest", "step_0000010"]


def test_older_checkpoints_of_the_run_go_as_far_as_retention_lets_them(tmp_path: Path) -> None:
    def save_step(
        step: int, run: RunIdentity | None, keep_last: int | None = None, keep_every: int | None = None
    ) -> None:
        progress: dict[str, JsonValue] = {} if run is None else {"run": {**run.to_json()}}
        save(
            Draft(tmp_path, step, progress, "", retention=Retention(keep_last, keep_every)),
            Layout().fragments(0, make_state()),
            control=LocalCommunicator(),
        )

    def steps() -> list[int]:
        return [folder.step for folder in list_steps(tmp_path)]

    save_step(1, OTHER)
    save_step(2, None)
    for step in range(3, 9):
        save_step(step, ONE)
    save_step(20, ONE)  # of a branch that is abandoned now
    assert steps() == [1, 2, 3, 4, 5, 6, 7, 8, 20]
    save_step(9, ONE, 3, 4)
    assert steps() == [1, 2, 4, 7, 8, 9, 20]
    (tmp_path / "step_0000007" / "manifest.json").write_text("{")  # it may be anybody's
    save_step(10, ONE, 1)
    assert steps() == [1, 2, 7, 10, 20]
    assert newest(tmp_path) == tmp_path / "step_0000010"


def test_state_that_does_not_tile_is_refused(tmp_path: Path) -> None:
    state = make_state()
    fragments = Layout().fragments(0, state)
    whole = next(fragment for fragment in fragments if fragment.spec.name == "proj.weight")
    short = whole._replace(stop=whole.stop - 1, source=whole.tensor[:-1])
    world = LocalCommunicator()
    for wrong, message in (([short], r"\[4:5,11:12\]\n.*stored nowhere"), ([whole, whole], "stored more than once")):
        with pytest.raises(CheckpointError, match=message):
            save(Draft(tmp_path, 1, {}, ""), wrong, control=world)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_fails_all_and_leaves_what_was_there(tmp_path: Path) -> None:
    state = make_state()
    save_state(tmp_path, 10, state)
    before = tree(tmp_path)

    def fragments(rank: int) -> Iterator[StateFragment]:
        yield from Layout(dp=3).fragments(rank, state)
        if rank == 1:
            raise OSError(5, "Input/output error", "/nvme/swap")

    def action(world: LateCommunicator) -> Path:
        return save(Draft(tmp_path, 20, {}, ""), fragments(world.rank), control=world)

    results = run_threads(3, action)
    assert [type(result) for result in results] == [CheckpointError] * 3
    assert len({str(result) for result in results}) == 1
    assert re.search(r"rank 1: /nvme/swap\n.*Input/output error", str(results[0]))
    assert tree(tmp_path) == before
    assert not list(tmp_path.glob(".*"))


def test_a_root_that_cannot_be_made_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    results = run_threads(2, lambda world: save_state(tmp_path / "file" / "run", 1, make_state(), world))
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert "rank 0: " in str(results[1]) and "Not a directory" in str(results[1])


def _save_with_a_full_disk(rank: int, root: str) -> str:
    """Save while rank 1 may write no more than 2,000 bytes to a file; return the error's message or "saved"."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        save_state(Path(root), 20, make_state(1), mesh_in_worker(rank, tp=2).world, tp=2)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "saved"


def _save_in_a_worker(rank: int, root: str) -> str:
    return str(save_state(Path(root), 10, make_state(), mesh_in_worker(rank, tp=2).world, tp=2))


@pytest.mark.gloo
def test_real_ranks_save_and_a_full_disk_on_one_is_told_by_all(tmp_path: Path) -> None:
    folders = run_ranks(2, _save_in_a_worker, str(tmp_path))
    assert folders == [str(tmp_path / "step_0000010")] * 2
    assert holds(tmp_path, make_state())
    before = tree(tmp_path)
    messages = run_ranks(2, _save_with_a_full_disk, str(tmp_path))
    assert messages[0] == messages[1]
    assert re.search(r"rank 1: writing to .*\n.*File too large", messages[0])
    assert tree(tmp_path) == before
    assert not list(tmp_path.glob(".*"))


def _killed_at(event_number: int, root: Path, step: int, state: State) -> bool:
    """Save in a fork that kills itself (SIGKILL) at its n-th file operation under root; return True if it finished.

    Operations on locks do not count: test_folder_lock.py has those.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if "lock" not in str(arguments[:1]) and (
                event in ("os.remove", "os.rmdir")
                or (event in ("open", "os.rename", "os.mkdir") and str(root) in str(arguments[0]))
            ):
                seen += 1
                if seen == event_number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        save_state(root, step, state)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _kill_at_every_file_operation(root: Path, step: int) -> None:
    """Save `step` with state 1 over a checkpoint of step 10 with state 0, killed at each file operation in turn."""
    states, outcomes = (make_state(0), make_state(1)), []
    save_state(root, 10, states[0])
    for number in range(1, 100):
        finished = _killed_at(number, root, step, states[1])
        checkpoint = open_checkpoint(root)
        assert [problem for problems in checkpoint.verify() for problem in problems] == []
        found = saved_states(checkpoint)
        (seed,) = (seed for seed, state in enumerate(states) if is_in(state, found))
        assert checkpoint.config_yaml == f"step: {10 if seed == 0 else step}\n"
        outcomes.append(seed)
        if finished:
            break
    assert finished and number > 10
    # The checkpoint is the old one until the new one is published, then the new one (later turns save it again).
    assert outcomes == sorted(outcomes) and set(outcomes) == {0, 1}
    assert not list(root.glob(".*")), "the last, undisturbed save removes what the killed ones left"


def test_a_save_killed_at_any_point_leaves_a_sound_checkpoint(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [warm_python(), __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_killed_save_over_the_first_checkpoint_ever_is_no_checkpoint(tmp_path: Path) -> None:
    with ExitStack() as held:
        a_save_under_way(tmp_path, held)
    with pytest.raises(CheckpointError, match="no checkpoint in this folder"):
        open_checkpoint(tmp_path)


def test_nothing_is_pickled() -> None:
    sources = Path(megazero.checkpoint.__file__).parent.glob("*.py")
    modules = r"\b(import|from) +(pickle|marshal|shelve|dill|cloudpickle)"
    forbidden = re.compile(modules + r"|torch\.(save|load)\b|\beval\(|\bexec\(")
    texts = {path.name: path.read_text() for path in sources}
    assert "writer.py" in texts
    assert [name for name, text in texts.items() if forbidden.search(text)] == []


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = skipped_fsync  # as in the tests' own processes
    _kill_at_every_file_operation(Path(sys.argv[1]) / "next", 20)
    _kill_at_every_file_operation(Path(sys.argv[1]) / "again", 10)
