"""Building a run from a configuration refuses errors before ranks meet, and gives every part its settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import training
from support.each import each
from support.models import pieces
from support.processes import run_ranks
from support.small_runs import CPU, EOD, core_on_rank, owned_boxes, tiny_run
from support.training import boxes, first_weights
from torch import Tensor

from megazero.checkpoint.reader import open_checkpoint
from megazero.config.derived import vocab_rows
from megazero.config.run import RunConfig
from megazero.errors import CheckpointError, ConfigError, UserError
from megazero.optim.schedules import LearningRate
from megazero.parallel.launch import Launch
from megazero.train.build import assemble, batch_layout, check_checkpoint, step_context
from megazero.train.components import RunComponents
from megazero.train.loop import Run, Timetable, train
from megazero.train.start.check import check
from megazero.zero.plan import Lifetime

ALONE = Launch(0, 1, 0)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def refused(**settings: Any) -> str:
    """Return the message with which the checkpoint of a run is refused."""
    config = tiny_run(**settings)
    inputs = check(config, ALONE)
    with pytest.raises(UserError) as caught:
        check_checkpoint(config, inputs, 1)
    return caught.value.render()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Train a run of three steps in this process; return the root of its checkpoints."""
    root = tmp_path / "run"
    finished(train_iters=3, save=str(root), lr_decay_style="linear", lr_decay_iters=10)
    return root


def built(**settings: Any) -> Run:
    config = tiny_run(**settings)
    return assemble(config, ALONE, CPU, check(config, ALONE))


def finished(**settings: Any) -> Run:
    run = built(**settings)
    train(run)
    return run


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_layers": 3}, "--num-layers 3"),
        ({"seed": 9}, "--seed 9"),
        ({"seq_length": 4, "max_position_embeddings": 8}, "--seq-length 4"),
        ({"vocab_size": 40}, "--vocab-size 40"),
        ({"lr_decay_style": "linear", "lr_decay_iters": 11}, "11; the checkpoint was saved with 10"),
    ],
    ids=str,
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_ranks_meet(
    saved: Path, settings: dict[str, Any], told: str
) -> None:
    assert told in refused(load=str(saved), **settings)


def test_a_new_run_from_old_weights_may_have_another_seed(saved: Path) -> None:
    config = tiny_run(load=str(saved), finetune=True, seed=9)
    check_checkpoint(config, check(config, ALONE), 1)


# --- pure parts -------------------------------------------------------------------------------------------------------


@each(
    ("vocab_size", "divisible_by", "tp", "rows"),
    [(29, 1, 1, 29), (29, 1, 2, 30), (29, 8, 1, 32), (50257, 128, 1, 50304), (50257, 128, 2, 50432), (32, 8, 4, 32)],
)
def test_rows_of_the_embedding(vocab_size: int, divisible_by: int, tp: int, rows: int) -> None:
    config = tiny_run(make_vocab_size_divisible_by=divisible_by, tensor_model_parallel_size=tp)
    assert vocab_rows(config, vocab_size) == rows
    assert vocab_rows(tiny_run(pad_vocab_size_to=60_000), vocab_size) == 60_000


# --- the core ---------------------------------------------------------------------------------------------------------


def core_facts(rank: int, tp: int, dp: int, stage: int) -> tuple[list[Any], dict[str, Any]]:
    config = tiny_run(
        tensor_model_parallel_size=tp, zero_stage=stage, global_batch_size=8, eod_mask_loss=True, clip_grad=0.25
    )
    core = core_on_rank(rank, config, tp=tp, dp=dp)
    layout, parts = batch_layout(config, core.mesh, EOD), step_context(config, core)
    core.engine.close()
    facts = {
        "data": (layout.data_rank, layout.data_size, layout.masked_token, layout.num_micro_batches),
        "clip": parts.clip_grad,
        "checks_overflow": parts.checks_overflow,
        "leases": core.engine.plan.gradient.lifetime is Lifetime.LEASED,
        "owned": {box.name for box in owned_boxes(core)},
    }
    return pieces(core.model), facts


@pytest.mark.gloo
def test_first_weights_and_shares_on_two_by_two_ranks() -> None:
    results = run_ranks(4, core_facts, 2, 2, 2)
    expected = first_weights(tiny_run())
    for found, _ in results:
        for name, full_shape, offset, values in found:
            assert full_shape == tuple(expected[name].shape)
            place = tuple(slice(start, start + length) for start, length in zip(offset, values.shape, strict=True))
            assert torch.equal(values, expected[name][place]), name
    assert [facts["data"] for _, facts in results] == [(0, 2, EOD, 2), (0, 2, EOD, 2), (1, 2, EOD, 2), (1, 2, EOD, 2)]
    for _, facts in results:
        assert (facts["clip"], facts["checks_overflow"], facts["leases"]) == (0.25, False, True)
    assert set.union(*(facts["owned"] for _, facts in results)) == set(expected)


def test_nothing_is_masked_unless_it_is_asked_for() -> None:
    core = core_on_rank(0, tiny_run())
    assert batch_layout(tiny_run(), core.mesh, EOD).masked_token is None


def test_batches_are_pinned_for_gpus_only() -> None:
    """Batches are pinned only for GPUs, because torch refuses to pin memory without an accelerator."""
    mesh = core_on_rank(0, tiny_run()).mesh
    for device, pins in (("cpu", False), ("cuda:0", True)):
        assert batch_layout(tiny_run(), replace(mesh, device=torch.device(device)), EOD).pins is pins


@each(("precision", "checks"), [("fp16", True), ("bf16", False), ("fp32", False), ("fp64", False)])
def test_only_fp16_looks_for_overflow_unless_it_is_told_to(precision: str, checks: bool) -> None:
    config = tiny_run(precision=precision)
    assert step_context(config, core_on_rank(0, config)).checks_overflow is checks
    config = tiny_run(precision=precision, check_grad_overflow=True)
    assert step_context(config, core_on_rank(0, config)).checks_overflow


# --- the run ----------------------------------------------------------------------------------------------------------


def weights(core_or_run: Run | RunComponents) -> dict[str, Tensor]:
    engine = core_or_run.context.engine if isinstance(core_or_run, Run) else core_or_run.engine
    found = [box for fragment in engine.owned_state() for box in boxes(fragment)]
    return training.assemble(box for box in found if box.kind == "weight")


def test_a_run_has_what_was_asked_for(tmp_path: Path) -> None:
    run = built(
        train_iters=7,
        eval_iters=2,
        eval_interval=3,
        eval_at_start=True,
        save=str(tmp_path / "save"),
        save_interval=4,
        exit_interval=5,
        exit_duration_in_mins=2.0,
        micro_batch_size=2,
        global_batch_size=6,
        metrics_file=str(tmp_path / "m.jsonl"),
        lr_warmup_iters=2,
        no_save_optim=True,
    )
    assert run.timetable == Timetable(7, 3, True, 4, 5, 120.0)
    assert {name: held.num_batches for name, held in run.held_out.items()} == {"validation": 2, "test": 2}
    assert run.learning_rate == LearningRate(1e-2, 0.0, "constant", 2, 7)
    assert run.saver is not None and (run.saver.root, run.saver.with_optimizer) == (tmp_path / "save", False)
    reporting = run.reporting
    assert (reporting.rates.seq_length, reporting.cuts_rows, reporting.gathers_ranks) == (8, False, True)
    assert len(reporting.writers) == 3
    assert (run.state.iteration, run.state.consumed_samples, run.loader.consumed_samples) == (0, 0, 0)


def test_a_run_that_wants_nothing_has_nothing() -> None:
    run = built()
    assert run.saver is None and dict(run.held_out) == {}
    assert run.timetable == Timetable(5, 1000, False, None, None, None)
    assert not run.reporting.gathers_ranks and len(run.reporting.writers) == 1


def test_the_length_may_be_given_in_samples() -> None:
    assert built(train_iters=None, train_samples=23, micro_batch_size=4).timetable.train_iters == 5


def test_the_configuration_that_is_saved_names_the_vocabulary(tmp_path: Path) -> None:
    built(vocab_size=None, tokenizer_type="ByteTokenizer", save=str(tmp_path))
    assert "vocab_size: 257" in (tmp_path / "config.yaml").read_text()


def test_a_finished_run_that_only_evaluates_leaves_the_saved_configuration(saved: Path) -> None:
    for train_iters in (3, 5):
        run = built(train_iters=train_iters, log_interval=7, load=str(saved), save=str(saved), **GO_ON)
        assert run.saver is not None
        run.saver.close()
        assert ("log_interval: 7" in (saved / "config.yaml").read_text()) == (train_iters > 3)


# --- resuming ---------------------------------------------------------------------------------------------------------

GO_ON: dict[str, Any] = {"lr_decay_style": "linear", "lr_decay_iters": 10}


def test_resuming_takes_everything(saved: Path) -> None:
    run = built(load=str(saved), train_iters=5, **GO_ON)
    assert (run.state.iteration, run.state.consumed_samples, run.state.optimizer_steps) == (3, 6, 3)
    assert run.loader.consumed_samples == 6
    assert run.context.engine.optimizer_step.item() == 3
    checkpoint = open_checkpoint(saved)
    for name, value in weights(run).items():
        assert torch.equal(value, checkpoint.read_full(name, "weight"))
    moments = [box for fragment in run.context.engine.owned_state() for box in boxes(fragment) if box.kind == "exp_avg"]
    for name, value in training.assemble(moments).items():
        assert torch.equal(value, checkpoint.read_full(name, "exp_avg")), name


def test_finetuning_takes_weights_and_starts_over(saved: Path) -> None:
    run = built(load=str(saved), finetune=True, lr=5e-3, seed=9)
    assert (run.state.iteration, run.state.consumed_samples, run.context.engine.optimizer_step.item()) == (0, 0, 0)
    assert run.learning_rate.peak == 5e-3
    checkpoint = open_checkpoint(saved)
    assert all(torch.equal(value, checkpoint.read_full(name, "weight")) for name, value in weights(run).items())
    assert not any(fragment.tensor.any() for fragment in run.context.engine.owned_state() if fragment.kind != "weight")


def test_without_its_optimizer_a_run_goes_on_where_it_stood(saved: Path) -> None:
    run = built(load=str(saved), no_load_optim=True, **GO_ON)
    assert (run.state.iteration, run.loader.consumed_samples, run.context.engine.optimizer_step.item()) == (3, 6, 0)
    assert not any(fragment.tensor.any() for fragment in run.context.engine.owned_state() if fragment.kind != "weight")


def test_another_learning_rate_has_to_be_meant(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--lr 0\.5; the checkpoint was saved with 0\.01"):
        built(load=str(saved), lr=0.5, **GO_ON)
    assert built(load=str(saved), lr=0.5, override_opt_param_scheduler=True, **GO_ON).learning_rate.peak == 0.5
    assert built(load=str(saved), lr=0.5, use_checkpoint_opt_param_scheduler=True).learning_rate.peak == 1e-2


def test_a_schedule_in_steps_goes_on_in_samples(saved: Path) -> None:
    """Three steps of two samples have been taken of a decay over ten."""
    run = built(load=str(saved), train_iters=None, train_samples=20, lr_decay_style="linear")
    assert run.learning_rate.unit == "samples" and run.learning_rate.decay_steps == 20
    with pytest.raises(CheckpointError, match="lengths in samples; the checkpoint was saved with steps"):
        built(load=str(saved), train_iters=None, train_samples=24, lr_decay_style="linear")


def test_a_static_loss_scale_is_the_command_lines(tmp_path: Path) -> None:
    finished(train_iters=1, save=str(tmp_path), precision="fp16", loss_scale=64.0)
    assert built(load=str(tmp_path), train_iters=1, precision="fp16", loss_scale=16.0).state.loss_scale.scale == 16.0


def test_a_dynamic_loss_scale_goes_on(tmp_path: Path) -> None:
    finished(train_iters=3, save=str(tmp_path), precision="fp16", initial_loss_scale=64.0, loss_scale_window=2)
    scale = built(load=str(tmp_path), train_iters=3, precision="fp16", initial_loss_scale=64.0).state.loss_scale
    assert (scale.scale, scale.good_steps) == (128.0, 1)


def test_a_dynamic_loss_scale_does_not_start_from_another_precisions_constant(tmp_path: Path) -> None:
    finished(precision="bf16", save=str(tmp_path))
    resumed = built(precision="fp16", initial_loss_scale=4096.0, load=str(tmp_path), train_iters=8)
    assert resumed.state.loss_scale.scale == 4096.0


def test_a_config_is_not_changed_by_building() -> None:
    config: RunConfig = tiny_run(vocab_size=None, tokenizer_type="ByteTokenizer")
    before = replace(config)
    assemble(config, ALONE, CPU, check(config, ALONE))
    assert config == before


def test_config_errors_are_config_errors() -> None:
    with pytest.raises(ConfigError):
        check(tiny_run(min_lr=1.0), ALONE)
