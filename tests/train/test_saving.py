"""Tests of checkpoints: from one layout into another, what --load finds, and what must agree with the run."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.models import Piece, box_index, build_gpt, context, pieces
from support.processes import run_ranks
from support.small_runs import DrawnSamples, core_on_rank, owned_boxes, tiny_run
from support.training import Saved, assemble
from torch import Tensor

from megazero.checkpoint.engine_state import restore_engine
from megazero.checkpoint.reader import Checkpoint, open_checkpoint
from megazero.checkpoint.runs import read_run
from megazero.checkpoint.state import TrainState
from megazero.config.run import CheckpointConfig, RunConfig
from megazero.config.yaml_file import to_yaml
from megazero.data.loader import build_step_batch
from megazero.errors import CheckpointError
from megazero.model.gpt import GPT
from megazero.optim.loss_scaler import LossScale
from megazero.train.build import batch_layout, step_context
from megazero.train.components import RunComponents
from megazero.train.saving import Saver, check_compatible, check_shapes, choose_run, find_checkpoint
from megazero.train.step import StepControls, training_step
from megazero.zero.parameters.gathered import GatheredParameters

GLOBAL_BATCH = 4
STATE = TrainState(LossScale(8.0, good_steps=2), iteration=2, consumed_samples=8, optimizer_steps=2)
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def config_of(tp: int, dp: int, stage: int, **settings: Any) -> RunConfig:
    return tiny_run(
        **{
            "tensor_model_parallel_size": tp,
            "zero_stage": stage,
            "micro_batch_size": GLOBAL_BATCH // dp,
            "global_batch_size": GLOBAL_BATCH,
            "precision": "bf16",
            **settings,
        }
    )


def saver_of(root: Path, core: RunComponents, config: RunConfig, *, with_optimizer: bool = True) -> Saver:
    extra = {"seed": 1234, "seq_length": 8}
    run = choose_run(CheckpointConfig(save=root), core.mesh)
    saver = Saver(root, run, core.engine, core.mesh, to_yaml(config), extra, with_optimizer)
    saver.begin()
    return saver


def train_steps(core: RunComponents, config: RunConfig, steps: int) -> None:
    parts, layout = step_context(config, core), batch_layout(config, core.mesh, None)
    for step in range(steps):
        batch = build_step_batch(DrawnSamples(), step * GLOBAL_BATCH, layout)
        training_step(parts, batch, StepControls(1e-2, 1.0))


def save_on_rank(rank: int, root: Path, layout: tuple[int, int, int], with_optimizer: bool) -> list[Saved]:
    """Take two steps and save a checkpoint; return the state that this rank owned."""
    tp, dp, _ = layout
    config = config_of(*layout)
    core = core_on_rank(rank, config, tp=tp, dp=dp)
    train_steps(core, config, 2)
    saver = saver_of(root, core, config, with_optimizer=with_optimizer)
    saver.save(STATE)
    core.engine.close()
    return owned_boxes(core)


class Loaded(NamedTuple):
    """The state that a rank owned before and after loading, and its working parameters after loading."""

    before: list[Saved]
    after: list[Saved]
    working: list[Piece]


def load_on_rank(rank: int, root: Path, layout: tuple[int, int, int], with_optimizer: bool) -> Loaded:
    tp, dp, _ = layout
    config = config_of(*layout, seed=77)  # other first values, so that loading changes them
    core = core_on_rank(rank, config, tp=tp, dp=dp)
    before = owned_boxes(core)
    restore_engine(open_checkpoint(root), core.engine, core.mesh.control, with_optimizer=with_optimizer)
    with GatheredParameters(core.model):
        working = pieces(core.model)
    core.engine.close()
    return Loaded(before, owned_boxes(core), working)


def full(ranks: list[list[Saved]], kind: str) -> dict[str, Tensor]:
    return assemble(piece for rank in ranks for piece in rank if piece.kind == kind)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ((1, 2, 2), (2, 1, 0)),
        ((2, 1, 1), (1, 2, 2)),
        ((2, 1, 0), (1, 1, 1)),
        ((1, 1, 2), (2, 2, 2)),
        ((1, 2, 3), (2, 2, 1)),
        ((2, 1, 0), (1, 4, 3)),
    ],
    ids=str,
)
def test_a_checkpoint_of_one_layout_fills_another(
    layout: tuple[int, int, int], other: tuple[int, int, int], tmp_path: Path
) -> None:
    saved = run_ranks(layout[0] * layout[1], save_on_rank, tmp_path, layout, True)
    loaded = run_ranks(other[0] * other[1], load_on_rank, tmp_path, other, True)
    for kind in KINDS:
        expected = full(saved, kind)
        assert not equal(full([rank.before for rank in loaded], kind), expected)
        assert equal(full([rank.after for rank in loaded], kind), expected)
    weights = full(saved, "weight")
    for piece in (piece for rank in loaded for piece in rank.working):
        master = weights[piece.name][box_index(piece.offset, tuple(piece.values.shape))]
        assert torch.equal(piece.values, master.bfloat16()), "working parameters follow the masters"


@pytest.mark.gloo
def test_weights_alone(tmp_path: Path) -> None:
    saved = run_ranks(2, save_on_rank, tmp_path / "weights", (1, 2, 1), False)
    kinds = {
        kind for parameter in open_checkpoint(tmp_path / "weights").parameters.values() for kind in parameter.kinds
    }
    assert kinds == {"weight"}
    loaded = run_ranks(2, load_on_rank, tmp_path / "weights", (2, 1, 1), False)
    assert equal(full([rank.after for rank in loaded], "weight"), full(saved, "weight"))
    for kind in ("exp_avg", "exp_avg_sq"):
        assert all(not value.any() for value in full([rank.after for rank in loaded], kind).values())


def test_moments_stay_where_only_weights_are_wanted(tmp_path: Path) -> None:
    save_on_rank(0, tmp_path, (1, 1, 1), True)
    loaded = load_on_rank(0, tmp_path, (1, 1, 1), False)
    assert all(not value.any() for value in full([loaded.after], "exp_avg").values())


# --- what a checkpoint holds ------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Make a run with one checkpoint in this process; return its root."""
    save_on_rank(0, tmp_path / "run", (1, 1, 1), True)
    return tmp_path / "run"


def test_progress_is_the_state_and_what_goes_beside_it(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert checkpoint.step == 2
    run = read_run(saved)
    assert run is not None
    assert checkpoint.progress == {**STATE.to_json(), "seed": 1234, "seq_length": 8, "run": run.to_json()}
    assert TrainState.from_json(checkpoint.progress, step=2) == STATE


def test_the_configuration_lies_beside_and_within(saved: Path) -> None:
    text = to_yaml(config_of(1, 1, 1))
    assert (saved / "config.yaml").read_text() == text
    assert (saved / "step_0000002" / "config.yaml").read_text() == text


# --- what is found ----------------------------------------------------------------------------------------------------


def find(path: Path | None) -> Checkpoint | None:
    found = find_checkpoint(CheckpointConfig(load=path))
    return found and found.checkpoint


def test_without_a_checkpoint_a_run_starts(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("not a folder")
    assert find(None) is None
    for name in ("empty", "not there yet", "file"):
        assert find(tmp_path / name) is None


def test_a_configuration_alone_is_no_checkpoint(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    (saved / "config.yaml").rename(tmp_path / "killed" / "config.yaml")
    assert find(tmp_path / "killed") is None


def test_checkpoints_are_found_by_root_by_folder_and_by_another_name(saved: Path, tmp_path: Path) -> None:
    folder = saved / "step_0000002"
    for path in (saved, folder):
        found = find(path)
        assert found is not None and found.folder == folder
    folder.rename(tmp_path / "best")
    found = find(tmp_path / "best")
    assert found is not None and found.step == 2


def test_a_run_killed_before_it_wrote_latest_is_found(saved: Path) -> None:
    (saved / "latest").unlink()
    assert find(saved) is not None


def test_a_step_that_is_named_must_be_there(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        find(saved / "step_0000009")


def test_a_root_whose_latest_is_gone_does_not_start_over(saved: Path, tmp_path: Path) -> None:
    (saved / "step_0000002").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="names 'step_0000002'"):
        find(saved)


# --- what must agree --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "seq_length", "flags"),
    [(1234, 8, []), (1, 8, ["--seed"]), (1234, 16, ["--seq-length"]), (1, 16, ["--seed", "--seq-length"])],
)
def test_a_resumed_run_takes_the_same_samples(saved: Path, seed: int, seq_length: int, flags: list[str]) -> None:
    checkpoint = open_checkpoint(saved)
    if not flags:
        return check_compatible(checkpoint, seed=seed, seq_length=seq_length)
    with pytest.raises(CheckpointError) as caught:
        check_compatible(checkpoint, seed=seed, seq_length=seq_length)
    assert [problem.given.split()[0] for problem in caught.value.problems] == flags
    for problem in caught.value.problems:
        assert "--finetune" in problem.legal


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, ""),
        ({"num_layers": 1}, "the model has no such parameter"),
        ({"num_layers": 3}, "layers.2"),
        ({"hidden_size": 32}, "embedding.word.weight"),
        ({"vocab_size": 28}, "embedding.word.weight"),
        ({"untie_embeddings_and_output_weights": True}, "head.weight"),
    ],
    ids=str,
)
def test_shapes_are_compared(saved: Path, settings: dict[str, Any], told: str) -> None:
    model = shapes_of(**settings)
    if not told:
        return check_shapes(open_checkpoint(saved), model, kinds=KINDS)
    with pytest.raises(CheckpointError, match=told):
        check_shapes(open_checkpoint(saved), model, kinds=KINDS)


def test_a_checkpoint_of_weights_alone_has_no_moments(tmp_path: Path) -> None:
    save_on_rank(0, tmp_path, (1, 1, 1), False)
    check_shapes(open_checkpoint(tmp_path), shapes_of(), kinds=("weight",))
    with pytest.raises(CheckpointError, match="exp_avg"):
        check_shapes(open_checkpoint(tmp_path), shapes_of(), kinds=KINDS)


def shapes_of(**settings: Any) -> GPT:
    """Build the model on the meta device, with shapes and without values."""
    config = config_of(1, 1, 1, **settings)
    return build_gpt(config.model, context(device=torch.device("meta")), vocab_size=config.model.vocab_size or 0)
