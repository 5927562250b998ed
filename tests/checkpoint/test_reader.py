"""Tests of loading: any layout can read what any other wrote, and every damage is reported."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoint_versions import edit_index, make_version_1, read_index, signed
from support.sharded_state import PADDING, PARAMETERS, Layout, assert_same, blank, make_state, write_checkpoint

from megazero.checkpoint import index
from megazero.checkpoint.reader import Checkpoint, SavedParameter, open_checkpoint, open_complete
from megazero.errors import CheckpointError, DamageError
from megazero.parallel.param_spec import Box, ParamSpec, StateFragment

LAYOUTS = st.builds(
    Layout, tp=st.integers(1, 4), dp=st.integers(1, 4), pad_to=st.integers(1, 5), seed=st.integers(0, 10**6)
)


def problems_of(checkpoint: Checkpoint) -> list[str]:
    return [str(problem) for problems in checkpoint.verify() for problem in problems]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(saved=LAYOUTS, wanted=LAYOUTS, box_bytes=st.sampled_from([12, 60, 1 << 20]))
def test_any_layout_reads_what_any_other_wrote(saved: Layout, wanted: Layout, box_bytes: int, tmp_path: Path) -> None:
    state = make_state(kinds=("weight", "exp_avg"))
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "run", state, saved, box_bytes=box_bytes))
    for rank in range(wanted.size):
        expected = wanted.fragments(rank, state)
        got = blank(expected)
        checkpoint.fill(got)
        assert_same(got, expected)
    for (name, kind), full in state.items():
        assert torch.equal(checkpoint.read_full(name, kind), full)


def test_what_is_known_without_reading_tensors(tmp_path: Path) -> None:
    state = make_state(kinds=("weight", "exp_avg"))
    state["norm.weight", "weight"] = state["norm.weight", "weight"].bfloat16()
    folder = write_checkpoint(tmp_path, state, Layout(2, 2), step=20)
    for path in (tmp_path, str(folder)):
        checkpoint = open_checkpoint(path)
        assert (checkpoint.step, checkpoint.folder, checkpoint.config_yaml) == (20, folder, "seed: 1\n")
        assert checkpoint.progress["iteration"] == 20
    parameters = checkpoint.parameters
    assert {name: saved.full_shape for name, saved in parameters.items()} == {
        name: shape for name, (shape, _) in PARAMETERS.items()
    }
    assert parameters["norm.weight"] == SavedParameter((5,), {"weight": torch.bfloat16, "exp_avg": torch.float32})


def test_a_step_can_be_chosen(tmp_path: Path) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path, make_state(step), Layout(), step=step)
    assert open_checkpoint(tmp_path).step == 20
    assert open_checkpoint(tmp_path, step=10).step == 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_values_are_cast_to_what_the_fragment_has(tmp_path: Path, dtype: torch.dtype) -> None:
    state = make_state()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, state, Layout(3, 2)))
    expected = Layout(2).fragments(1, state, dtype=dtype)
    got = blank(expected)
    checkpoint.fill(got)
    assert_same(got, expected)


def test_padding_is_left_alone(tmp_path: Path) -> None:
    state = make_state()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, state, Layout()))
    layout = Layout(tp=4, pad_to=5)  # 11 rows, 5 a rank: the last rank holds only padding
    last = [fragment for fragment in blank(layout.fragments(3, state)) if fragment.spec.name == "wte.weight"]
    checkpoint.fill(last)
    assert all((fragment.tensor == PADDING).all() for fragment in last)
    assert last[0].tensor.numel() == 25


def test_parameters_that_require_gradients_can_be_filled(tmp_path: Path) -> None:
    state = make_state(kinds=("weight",))
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, state, Layout()))
    parameter = torch.nn.Parameter(torch.zeros(60))
    checkpoint.fill([StateFragment(Layout().spec("proj.weight", 0), "weight", 0, 60, parameter)])
    assert torch.equal(parameter.detach().view(5, 12), state["proj.weight", "weight"])


def test_a_region_can_be_read(tmp_path: Path) -> None:
    state = make_state()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, state, Layout(2, 3, seed=4)))
    got = checkpoint.read("qkv.weight", Box((1, 2, 0, 3), (2, 3, 2, 2)), kind="exp_avg")
    assert torch.equal(got, state["qkv.weight", "exp_avg"][1:3, 2:5, 0:2, 3:5])
    assert checkpoint.read("qkv.weight", Box((0, 0, 0, 0), (0, 6, 2, 5))).shape == (0, 6, 2, 5)


def test_all_mismatches_are_told_at_once_and_nothing_is_copied(tmp_path: Path) -> None:
    state = make_state(kinds=("weight",))
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, state, Layout()))
    good = StateFragment(Layout().spec("proj.weight", 0), "weight", 0, 60, torch.full((60,), PADDING))
    renamed = StateFragment(ParamSpec("prj.weight", (4,), (4,), (0,)), "weight", 0, 4, torch.zeros(4))
    resized = StateFragment(ParamSpec("wte.weight", (12, 5), (12, 5), (0, 0)), "weight", 0, 60, torch.zeros(60))
    unsaved = good._replace(kind="exp_avg")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.fill([good, renamed, resized, unsaved, unsaved])
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "weight of prj.weight" in text and "no such parameter\n    legal: proj.weight" in text
    assert "wte.weight of shape [12, 5]" in text and "is [11, 5]" in text
    assert "exp_avg of proj.weight" in text and "no such state of this parameter\n    legal: weight" in text
    assert (good.tensor == PADDING).all()


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, make_state(kinds=("weight",)), Layout()))
    with pytest.raises(CheckpointError, match="no such parameter"):
        checkpoint.read_full("absent")
    with pytest.raises(CheckpointError, match="no such state"):
        checkpoint.read_full("scalar", "exp_avg")


def test_every_flipped_byte_of_the_data_is_found_by_verify(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {("proj.weight", "weight"): torch.randn(5, 12)}, Layout(dp=2, seed=3))
    checkpoint = open_checkpoint(folder)
    assert problems_of(checkpoint) == []
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        for place in range(0, len(content), 7):
            damaged = bytearray(content)
            damaged[place] ^= 16
            path.write_bytes(damaged)
            (problem,) = problems_of(checkpoint)
            assert path.name in problem and "damaged" in problem
        path.write_bytes(content)


def test_a_flipped_byte_is_named_by_file_and_box_and_its_box_is_not_copied(tmp_path: Path) -> None:
    state = make_state(kinds=("weight",))
    folder = write_checkpoint(tmp_path, state, Layout(dp=2, seed=3))
    checkpoint = open_checkpoint(folder)
    second = checkpoint.manifest.files[1]
    box = next(box for file, box in checkpoint.boxes() if file == second and box.parameter == "qkv.weight")
    with open(folder / "rank_00001.safetensors", "r+b") as file:
        file.seek(box.end - 1)
        last = file.read(1)[0]
        file.seek(box.end - 1)
        file.write(bytes([last ^ 1]))
    got = blank(Layout().fragments(0, state))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder).fill(got)
    (problem,) = caught.value.problems
    assert "weight of qkv.weight, region [" in problem.given
    assert f"bytes {box.begin} to {box.end} of {folder / 'rank_00001.safetensors'}" in problem.rule
    qkv = next(fragment.tensor for fragment in got if fragment.spec.name == "qkv.weight").view(3, 6, 2, 5)
    place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.lengths, strict=True))
    assert (qkv[place] == PADDING).all()
    # A tensor whose box is not damaged can still be read.
    assert torch.equal(open_checkpoint(folder).read_full("proj.weight"), state["proj.weight", "weight"])


def test_truncated_and_missing_files_are_told_before_anything_is_copied(tmp_path: Path) -> None:
    state = make_state()
    folder = write_checkpoint(tmp_path, state, Layout(dp=3, seed=1))
    checkpoint = open_checkpoint(folder)
    with open(folder / "rank_00001.safetensors", "r+b") as file:
        file.truncate(checkpoint.manifest.files[1].num_bytes - 1)
    (folder / "rank_00002.safetensors").unlink()
    got = blank(Layout().fragments(0, state))
    with pytest.raises(CheckpointError, match=r"rank_00001.safetensors: \d+ bytes\n.*truncated(.|\n)*rank_00002"):
        checkpoint.fill(got)
    assert all((fragment.tensor == PADDING).all() for fragment in got)
    assert len(problems_of(checkpoint)) == 2


def test_a_command_that_needs_all_of_a_damaged_checkpoint_names_the_others(tmp_path: Path) -> None:
    state = make_state()
    for step in (2, 11, 12):
        write_checkpoint(tmp_path, state, Layout(dp=2), step=step)
    assert open_complete(tmp_path).step == 12
    (tmp_path / "step_0000012" / "rank_00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)rank_00001.*legal: another of the run's, --step 2, 11$"):
        open_complete(tmp_path)
    assert open_complete(tmp_path, step=11).step == 11


def test_a_data_file_that_cannot_be_read_is_an_error_not_a_crash(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, make_state(), Layout())
    checkpoint = open_checkpoint(folder)
    size = checkpoint.manifest.files[0].num_bytes
    checkpoint.fill(blank(Layout().fragments(0, make_state())))
    with open(folder / "rank_00000.safetensors", "r+b") as file:
        file.truncate(size // 2)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.fill(blank(Layout().fragments(0, make_state())))
    (folder / "rank_00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        checkpoint.fill(blank(Layout().fragments(0, make_state())))


def test_a_checkpoint_with_a_rank_missing_is_told_by_region(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {("proj.weight", "weight"): torch.randn(5, 12)}, Layout(tp=2))
    checkpoint = open_checkpoint(folder)
    name = checkpoint.manifest.files[1].name

    def without_second(table: dict[str, Any]) -> None:
        table["files"] = [file for file in table["files"] if file["name"] != name]

    edit_index(folder, lambda tables: without_second(tables[0]))
    manifest = {**json.loads((folder / "manifest.json").read_bytes())}
    without_second(manifest)
    (folder / "manifest.json").write_bytes(signed(manifest))
    holed = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"region \[0:5,6:12\]\n.*stored nowhere"):
        holed.read_full("proj.weight")
    assert "stored nowhere" in problems_of(holed)[0]


def test_damaged_or_missing_small_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, make_state(), Layout())
    (folder / "config.yaml").write_text("seed: 2\n")
    with pytest.raises(CheckpointError, match=r"config.yaml\n.*damaged or edited"):
        open_checkpoint(folder)
    (folder / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"config.yaml\n.*cannot be read: No such file"):
        open_checkpoint(folder)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"manifest.json: format 'None'"):
        open_checkpoint(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="latest names 'step_0000020'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("box_bytes", [12, 1 << 20])
def test_a_checkpoint_of_the_first_version_is_read(tmp_path: Path, box_bytes: int) -> None:
    state = make_state()
    folder = write_checkpoint(tmp_path, state, Layout(2, 2, seed=1), box_bytes=box_bytes, boxes_per_index=8)
    boxes = list(open_checkpoint(folder).boxes())
    make_version_1(folder)
    assert not list(folder.glob("index_*"))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.manifest.version == 1
    assert list(checkpoint.boxes()) == boxes and checkpoint.num_boxes == len(boxes)
    checkpoint.check_files()
    assert problems_of(checkpoint) == []
    wanted = Layout(3).fragments(1, state)
    got = blank(wanted)
    checkpoint.fill(got)
    assert_same(got, wanted)
    flip(folder / "rank_00001.safetensors")
    assert "rank_00001.safetensors" in problems_of(checkpoint)[0]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def indexed(root: Path) -> tuple[Path, dict[str, str]]:
    """Write a checkpoint with several indices; return its folder and the index of each parameter's weight."""
    folder = write_checkpoint(root, make_state(), Layout(2, 2, seed=1), box_bytes=64, boxes_per_index=12)
    found = {}
    for path in folder.glob("index_*.jsonl"):
        directory, _ = read_index(path)
        found |= {each["parameter"]: path.name for each in directory["segments"] if each["kind"] == "weight"}
    assert len(set(found.values())) > 1
    return folder, found


def harm(way: str, path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    if way == "directory damaged":
        content[20] ^= 1
        path.write_bytes(content)
    elif way == "segment damaged":
        content[content.index(b'"wte.weight"', content.index(b"\n")) + 3] ^= 1
        path.write_bytes(content)
    elif way == "cut":
        path.write_bytes(content[:-30])
    elif way == "longer":
        path.write_bytes(content + b"\n")
    elif way == "missing":
        path.unlink()
    elif way == "foreign":
        shutil.copy(other, path)
    elif way == "leads out":
        target = path.parent.parent / "elsewhere"
        path.rename(target)
        path.symlink_to(target)


@pytest.mark.parametrize("way", ["directory damaged", "segment damaged", "missing", "foreign", "leads out"])
def test_only_the_indices_of_wanted_tensors_are_read(tmp_path: Path, way: str) -> None:
    state = make_state()
    folder, index_of = indexed(tmp_path / "one")
    other = write_checkpoint(tmp_path / "two", make_state(5), Layout(2, 2, seed=1), box_bytes=64, boxes_per_index=12)
    bad = index_of["wte.weight"]
    harm(way, folder / bad, other / bad)
    checkpoint = open_checkpoint(folder)
    sound = [name for name, index in index_of.items() if index != bad]
    assert sound
    for name in sound:
        assert torch.equal(checkpoint.read_full(name), state[name, "weight"])
    for action in (lambda: checkpoint.read_full("wte.weight"), checkpoint.check_files):
        with pytest.raises(DamageError, match=bad) as caught:
            action()
        assert caught.value.files == {bad}
    assert bad in problems_of(checkpoint)[0]
    assert bad in str(checkpoint.damage_in({bad})[0])
    assert checkpoint.damage_in({index_of[sound[0]]}) == []


@pytest.mark.parametrize("way", ["cut", "longer", "segment damaged", "directory damaged"])
def test_what_is_hashed_is_all_of_an_index(tmp_path: Path, way: str) -> None:
    """The files of all indices are compared with the manifest, by one process, or a share of them by each of several.

    Every way to look at them finds the same file, and rank 0 confirms what another rank has found.
    """
    folder, index_of = indexed(tmp_path)
    bad = index_of["wte.weight"]
    harm(way, folder / bad, folder)
    for rank in range(3):
        checkpoint = open_checkpoint(folder)
        number = [entry.name for entry in checkpoint.manifest.indices].index(bad)
        if number % 3 != rank:
            checkpoint.check_files(rank=rank, size=3)
            continue
        with pytest.raises(DamageError, match=bad) as caught:
            checkpoint.check_files(rank=rank, size=3)
        assert caught.value.files == {bad}
    assert checkpoint.damage_in({bad})
    found = [problem for problem in problems_of(checkpoint) if bad in problem]
    assert found and len(found) == len(set(found))


def test_the_size_of_a_file_is_looked_at_before_any_index_is_read(tmp_path: Path) -> None:
    """Rank 0 reads what another rank has found damaged, and of a large job all indices take minutes."""
    folder, _ = indexed(tmp_path)
    path = folder / "rank_00001.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    for index_file in folder.glob("index_*.jsonl"):
        index_file.unlink()
    (problem,) = open_checkpoint(folder).damage_in({path.name})
    assert f"{path.name}: {path.stat().st_size} bytes" in problem.given


def test_only_the_segments_of_wanted_regions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows of a tensor are read, and the last are not, where the segment of those is not as it should be."""
    monkeypatch.setattr(index.cut, "__kwdefaults__", {"boxes_per_segment": 4})
    state = {("wte.weight", "weight"): torch.randn(11, 5), ("proj.weight", "weight"): torch.randn(5, 12)}
    folder = write_checkpoint(tmp_path, state, Layout(dp=2, seed=3), box_bytes=20)
    path = folder / "index_00000.jsonl"
    directory, _ = read_index(path)
    place = max(number for number, each in enumerate(directory["segments"]) if each["parameter"] == "wte.weight")
    first, last = Box((0, 0), (3, 5)), Box((10, 0), (1, 5))
    content, manifest = path.read_bytes(), (folder / "manifest.json").read_bytes()

    def damaged() -> None:
        lines = content.splitlines(keepends=True)
        lines[1 + place] = lines[1 + place].replace(b"wte", b"xte")
        path.write_bytes(b"".join(lines))

    def hidden(found: dict[str, Any]) -> None:
        found["segments"][place].update(offset=[0, 0], lengths=[1, 1])

    for change, rule, reads_first in (
        (damaged, "does not match the hash", True),
        (lambda: edit_index(folder, lambda tables: tables.pop(place)), "stored nowhere", True),
        (lambda: edit_index(folder, lambda tables: tables.append(tables[place])), "stored more than once", True),
        (lambda: edit_index(folder, lambda tables: tables[place]["files"][-1]["boxes"].pop()), "stored nowhere", True),
        (lambda: edit_index(folder, directory=hidden), "stored nowhere", False),
    ):
        path.write_bytes(content)
        (folder / "manifest.json").write_bytes(manifest)
        change()
        checkpoint = open_checkpoint(folder)
        if reads_first:
            assert torch.equal(checkpoint.read("wte.weight", first), state["wte.weight", "weight"][:3])
        else:
            with pytest.raises(DamageError, match="not the bounds in the directory"):
                checkpoint.read("wte.weight", first)
        with pytest.raises(DamageError, match=rule) as caught:
            checkpoint.read("wte.weight", last)
        assert caught.value.files == {path.name}
        assert checkpoint.damage_in({path.name})
        with pytest.raises(DamageError):
            open_checkpoint(folder).check_files()
        assert problems_of(checkpoint)


def test_boxes_of_several_indices_fill_a_file_and_its_header(tmp_path: Path) -> None:
    """Each index may be right by itself, and not with the others: to verify is to compare all of them."""
    folder, _ = indexed(tmp_path)
    assert problems_of(open_checkpoint(folder)) == []
    edit_index(folder, lambda tables: tables.pop())
    text = "".join(problems_of(open_checkpoint(folder)))
    assert "stored nowhere" in text and "back to back" in text


@pytest.mark.parametrize("number", [0, 1])
def test_a_box_under_another_key_than_the_header_has_is_refused(tmp_path: Path, number: int) -> None:
    """Two boxes of the same size that change places in an index fit in everything but the file's header.

    That is seen too where the header has been compared with another index before.
    """
    exchanged, other = ("proj.weight", "wte.weight")[:: 1 - 2 * number]
    state = {("proj.weight", "weight"): torch.randn(5, 12), ("wte.weight", "weight"): torch.randn(11, 5)}
    folder = write_checkpoint(tmp_path, state, Layout(), box_bytes=4 * 12, boxes_per_index=2)

    def exchange(tables: list[dict[str, Any]]) -> None:
        first, second = (box for box in tables[0]["files"][0]["boxes"][:2])
        first["offset"], second["offset"] = second["offset"], first["offset"]

    edit_index(folder, exchange, number)
    checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.read_full(other), state[other, "weight"])
    with pytest.raises(DamageError, match=r"rank_00000.safetensors\n.*its header has"):
        checkpoint.read_full(exchanged)


def test_a_header_with_more_than_the_indices_have_is_told(tmp_path: Path) -> None:
    folder, _ = indexed(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    entry = manifest["files"][0]
    content = (folder / entry["name"]).read_bytes()
    metadata = b'"__metadata__":{"format":"pt"}'
    changed = content.replace(metadata, b'"more":{"dtype":"F32"}'.ljust(len(metadata)), 1)
    assert changed != content
    entry["header_sha256"] = hashlib.sha256(changed[: entry["header_bytes"]]).hexdigest()
    (folder / entry["name"]).write_bytes(changed)
    (folder / "manifest.json").write_bytes(signed(manifest))
    assert "its header has {'dtype': 'F32'} for more, the index None" in "".join(problems_of(open_checkpoint(folder)))


def test_files_of_more_ranks_than_a_folder_holds_lie_in_sub_folders(tmp_path: Path) -> None:
    state = make_state()
    folder = write_checkpoint(tmp_path, state, Layout(2, 4, seed=1), boxes_per_index=12, ranks_in_folder=3)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")) == [
        f"ranks_0000{rank // 3}/rank_0000{rank}.safetensors" for rank in range(8)
    ]
    assert {path.suffix for path in folder.iterdir() if path.is_file()} == {".json", ".jsonl", ".yaml"}
    checkpoint = open_complete(folder)
    assert problems_of(checkpoint) == []
    for (name, kind), full in state.items():
        assert torch.equal(checkpoint.read_full(name, kind), full)
    flip(folder / "ranks_00002" / "rank_00006.safetensors")
    assert "ranks_00002/rank_00006.safetensors" in problems_of(checkpoint)[0]
    (folder / "ranks_00001").rename(tmp_path / "elsewhere")
    (folder / "ranks_00001").symlink_to(tmp_path / "elsewhere")
    assert "a link that leads out of the folder" in "".join(problems_of(open_checkpoint(folder)))
    (folder / "ranks_00001").unlink()
    with pytest.raises(DamageError, match=r"ranks_00001/rank_00003.safetensors\n.*cannot be read"):
        open_checkpoint(folder).check_files()
