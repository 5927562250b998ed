"""Tests of loading: any layout can read what any other wrote, and every damage is reported."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sharded_state import PADDING, PARAMETERS, Layout, assert_same, blank, make_state, write_checkpoint

from megazero.checkpoint.reader import Checkpoint, SavedParameter, open_checkpoint, open_complete
from megazero.errors import CheckpointError
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
    box = next(box for box in checkpoint.manifest.files[1].boxes if box.parameter == "qkv.weight")
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
    files = checkpoint.manifest.files[:1]
    manifest = type(checkpoint.manifest)(1, {}, checkpoint.manifest.config, checkpoint.manifest.tensors, files)
    holed = Checkpoint(folder, manifest, "")
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
