"""Every optimizer takes the steps of torch's own on the plain model, and any layout resumes from its checkpoints."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from support.checkpoints import saved_states
from support.processes import run_ranks
from support.published_optimizers import reference_class
from support.reference import decayed, gradients, mean_loss
from support.small_runs import VOCAB, DrawnSamples, core_on_rank, owned_boxes, reference_batch, tiny_run, train_run
from support.training import Saved, assemble, first_weights
from torch import Tensor

from megazero.checkpoint.reader import open_checkpoint
from megazero.config.engine_sections import OptimizerConfig
from megazero.config.lengths import RunLength
from megazero.config.optimizers import OPTIMIZERS, RUN_NAMES
from megazero.data.loader import BatchLoader
from megazero.errors import CheckpointError, ConfigError
from megazero.model.gpt import INPUT_AND_OUTPUT
from megazero.optim.schedules import LearningRate
from megazero.parallel.param_spec import named_specs
from megazero.train.build import batch_layout, step_context
from megazero.train.start.inputs import RunInputs
from megazero.train.step import StepControls, training_step

GLOBAL_BATCH = 4
STEPS = 4
LR = 0.01
CLIP = 0.5
# Settings of a run for a logarithmic warm-up that does not begin at 0.
SCHEDULE: dict[str, Any] = {"lr_warmup_iters": 3, "lr_warmup_init": 0.002, "lr_warmup_type": "log"}

# Settings of a run, the name of torch's optimizer, and the same settings as its arguments.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "adam": ({"adam_beta1": 0.8, "adam_beta2": 0.9}, "AdamW", {"betas": (0.8, 0.9), "weight_decay": 0.1}),
    "coupled adam": (
        {"optimizer_params": ("decoupled_weight_decay=false", "amsgrad=true")},
        "Adam",
        {"amsgrad": True, "weight_decay": 0.1},
    ),
    "sgd": (
        {"sgd_momentum": 0.8, "optimizer_params": ("nesterov=true",)},
        "SGD",
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    ),
    "adagrad": (
        {"optimizer_params": ("initial_accumulator_value=0.1", "lr_decay=0.1")},
        "Adagrad",
        {"initial_accumulator_value": 0.1, "lr_decay": 0.1, "weight_decay": 0.1},
    ),
    "adadelta": ({}, "Adadelta", {"weight_decay": 0.1}),
    "adamax": ({"adam_beta1": 0.8}, "Adamax", {"betas": (0.8, 0.999), "weight_decay": 0.1}),
    "nadam": ({"adam_eps": 1e-6}, "NAdam", {"eps": 1e-6, "weight_decay": 0.1}),
    "radam": ({}, "RAdam", {"weight_decay": 0.1}),
    "rmsprop": (
        {"optimizer_params": ("alpha=0.9", "momentum=0.5", "centered=true")},
        "RMSprop",
        {"alpha": 0.9, "momentum": 0.5, "centered": True, "weight_decay": 0.1},
    ),
    "rprop": ({"optimizer_params": ("etas=0.4,1.3",)}, "Rprop", {"etas": (0.4, 1.3)}),
    "asgd": ({"optimizer_params": ("t0=1",)}, "ASGD", {"t0": 1.0, "weight_decay": 0.1}),
    "lamb": (
        {"adam_beta1": 0.8, "optimizer_params": ("max_coeff=0.5",)},
        "Lamb",
        {"betas": (0.8, 0.999), "weight_decay": 0.1, "max_coeff": 0.5},
    ),
    "adafactor": (
        {"optimizer_params": ("beta2_decay=-0.6", "eps=1e-4,1e-2", "d=1.5")},
        "Adafactor",
        {"beta2_decay": -0.6, "eps": (1e-4, 1e-2), "d": 1.5, "weight_decay": 0.1},
    ),
    "lion": ({"lion_beta1": 0.8}, "Lion", {"betas": (0.8, 0.98), "weight_decay": 0.1}),
}


def settings_of(case: str, **more: Any) -> dict[str, Any]:
    settings, kind, options = CASES[case]
    name = "adam" if kind in ("AdamW", "Adam") else kind.lower()
    decay = {"weight_decay": 0.1} if "weight_decay" in options else {}
    return {"optimizer": name, "global_batch_size": GLOBAL_BATCH, "clip_grad": CLIP, **decay, **settings, **more}


def test_every_optimizer_is_tried() -> None:
    in_8_bits = {kind for kind in RUN_NAMES.values() if OPTIMIZERS[kind].package}  # in test_eight_bit.py
    assert {kind for _, kind, _ in CASES.values()} == {*RUN_NAMES.values(), "Adam"} - in_8_bits


def rate(step: int, peak: float = LR) -> float:
    config = OptimizerConfig(lr=peak, lr_decay_style="constant", **SCHEDULE)
    return LearningRate.from_config(config, RunLength(9)).at(step)


def plain_weights(
    case: str, decay: Callable[[int], float | None] = lambda _: None, decoupled: float | None = None
) -> dict[str, Tensor]:
    """Train the plain model with torch's optimizer, a group with weight decay, one without, and clipping by hand."""
    _, kind, options = CASES[case]
    live = {name: value.clone().requires_grad_(True) for name, value in first_weights(tiny_run()).items()}
    held = {name: in_module(name, value) for name, value in live.items()}
    no_decay = {"weight_decay": 0.0} if "weight_decay" in options else {}
    ends = {name for name in live if name in INPUT_AND_OUTPUT} if decoupled else set()
    groups = [
        {"params": [value for name, value in held.items() if decayed(name) and name not in ends]},
        {"params": [value for name, value in held.items() if not decayed(name)], **no_decay},
        {"params": [held[name] for name in ends]},
    ]
    optimizer = reference_class(kind)(groups, lr=LR, **options)
    for step in range(STEPS):
        loss = mean_loss(live, reference_batch(step * GLOBAL_BATCH, GLOBAL_BATCH, masked=False))
        grads = gradients(loss, live)
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        for name, value in held.items():
            value.grad = grads[name].view(value.shape) * min(1.0, CLIP / (float(norm) + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        if decoupled is not None:
            optimizer.param_groups[2]["lr"] = rate(step, decoupled)
        if (weight_decay := decay(step)) is not None:
            optimizer.param_groups[0]["weight_decay"] = weight_decay
        optimizer.step()
    return {name: value.detach() for name, value in live.items()}


def in_module(name: str, value: Tensor) -> Tensor:
    """Return a view of a weight in the shape of the module's parameter: a matrix, or of one dim."""
    return value.detach().view((-1, value.shape[-1]) if decayed(name) else -1)


def train_on_rank(
    rank: int, case: str, stage: int, dp: int = 1, tp: int = 1, more: Mapping[str, Any] = MappingProxyType({})
) -> list[Saved]:
    layout = {"zero_stage": stage, "tensor_model_parallel_size": tp}
    config = tiny_run(**settings_of(case, **layout, micro_batch_size=GLOBAL_BATCH // dp, **more))
    schedule = LearningRate.from_config(config.optimizer, RunLength(STEPS))
    core = core_on_rank(rank, config, dp=dp, tp=tp)
    parts = step_context(config, core)
    with BatchLoader(DrawnSamples(), batch_layout(config, core.mesh, None), prefetch=0) as loader:
        for step in range(STEPS):
            controls = StepControls(
                rate(step),
                1.0,
                weight_decay=schedule.weight_decay_at(step),
                decoupled_lr=schedule.decoupled_at(step),
            )
            training_step(parts, next(loader), controls)
    saved = owned_boxes(core)  # also of states in files, which end with the engine
    core.engine.close()
    return saved


def weights(ranks: list[list[Saved]]) -> dict[str, Tensor]:
    return assemble(box for rank in ranks for box in rank if box.kind == "weight")


def close(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    """Check that tensors, keyed by name or by name and kind of state, are close to the expected ones.

    The biases of keys are left out: their gradient is only rounding error, of which Rprop and RMSprop make whole steps.
    """
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        rows = [0, 2] if "attention.qkv.bias" in str(key) else slice(None)
        torch.testing.assert_close(found[key][rows], value[rows], rtol=1e-8, atol=1e-10, msg=str(key))


@pytest.mark.parametrize("case", ["adam", "sgd"])
def test_weight_decay_increases_where_there_is_one(case: str) -> None:
    """Biases and norms stay without weight decay, also where that of the others begins at 0."""
    case = next(name for name in CASES if name.startswith(case))
    more = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.6}
    found = weights([train_on_rank(0, case, 1, more=more)])
    close(found, plain_weights(case, lambda step: 0.6 * step / STEPS))


@pytest.mark.parametrize("case", ["adam", "sgd"])
def test_the_word_embedding_has_a_rate_of_its_own(case: str) -> None:
    case = next(name for name in CASES if name.startswith(case))
    more = {"decoupled_lr": 3 * LR, "lr_decay_style": "constant", "lr": LR, **SCHEDULE}
    found = weights([train_on_rank(0, case, 3, more=more)])
    close(found, plain_weights(case, decoupled=3 * LR))


PATTERNS = ("*.bias lr=0.02 weight_decay=0.3", "layers.1.* lr=0.005", "embedding.* weight_decay=0.0")


def weights_by_pattern(case: str) -> dict[str, Tensor]:
    """Train the plain model with param groups whose rates and decays are written by hand, as `PATTERNS` say."""
    _, kind, options = CASES[case]
    live = {name: value.clone().requires_grad_(True) for name, value in first_weights(tiny_run()).items()}
    held = {name: in_module(name, value) for name, value in live.items()}
    factors, groups = [], []
    for name, value in held.items():
        factor, decay = 1.0, 0.1 if decayed(name) else 0.0
        if name.endswith(".bias"):
            factor, decay = 2.0, 0.3
        elif name.startswith("layers.1."):
            factor = 0.5
        elif name.startswith("embedding."):
            decay = 0.0
        factors.append(factor)
        groups.append({"params": [value], "weight_decay": decay})
    optimizer = reference_class(kind)(groups, lr=LR, **options)
    for step in range(STEPS):
        grads = gradients(mean_loss(live, reference_batch(step * GLOBAL_BATCH, GLOBAL_BATCH, masked=False)), live)
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        for name, value in held.items():
            value.grad = grads[name].view(value.shape) * min(1.0, CLIP / (float(norm) + 1e-6))
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = factor * rate(step)
        optimizer.step()
    return {name: value.detach() for name, value in live.items()}


@pytest.mark.parametrize("case", ["adam", "sgd", "lamb", "adafactor"])
def test_patterns_have_rates_and_decays_of_their_own(case: str) -> None:
    close(weights([train_on_rank(0, case, 3, more={"lr": LR, "param_groups": PATTERNS})]), weights_by_pattern(case))


@pytest.mark.gloo
@pytest.mark.parametrize(("case", "stage", "dp", "tp"), [("adam", 1, 2, 2), ("nadam", 3, 2, 1), ("adafactor", 2, 2, 2)])
def test_patterns_on_several_ranks(case: str, stage: int, dp: int, tp: int) -> None:
    more = {"lr": LR, "param_groups": PATTERNS}
    found = weights(run_ranks(dp * tp, train_on_rank, case, stage, dp, tp, more))
    close(found, weights_by_pattern(case))


@pytest.mark.parametrize("case", ["adam", "sgd"])
def test_an_own_weight_decay_does_not_increase(case: str) -> None:
    """What a pattern says nothing of increases, with the others."""
    case = next(name for name in CASES if name.startswith(case))
    increase = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.6}
    own = {"lr": LR, "param_groups": ("layers.0.*.weight weight_decay=0.6", "layers.1.*.weight lr=0.02")}
    config = tiny_run(**settings_of(case, **increase, **own))
    core = core_on_rank(0, config)
    context = step_context(config, core)
    found = sorted(len(group["params"]) for group in context.decayed) if case == "sgd" else len(context.decayed)
    assert found and all(group["weight_decay"] == 0.6 for group in context.decayed)
    names = {spec.name for spec, p in named_specs(core.model) if moves(core, context.decayed, spec, p)}
    assert "layers.0.mlp.up.weight" not in names
    assert {"layers.1.mlp.up.weight", "embedding.word.weight"} <= names
    assert [factor for _, factor in context.scaled] == [2.0] * len(context.scaled) != []
    core.engine.close()


def moves(core: Any, groups: Any, spec: Any, parameter: Any) -> bool:
    optimizer = core.engine.settings.optimizer
    own = optimizer.options[optimizer.group_of(spec, parameter)]
    return any(own is group for group in groups)


@pytest.mark.gloo
def test_a_pattern_may_match_on_one_pipeline_stage_only(tmp_path: Path) -> None:
    more = {"lr": LR, "param_groups": PATTERNS}
    whole_run(0, 1, run_settings("nadam", tmp_path / "one", **more))
    layout = {"pipeline_model_parallel_size": 2, "zero_stage": 1}
    run_ranks(2, whole_run, 2, run_settings("nadam", tmp_path / "two", **layout, **more))
    close(saved_states(open_checkpoint(tmp_path / "two")), saved_states(open_checkpoint(tmp_path / "one")))
    with pytest.raises(ConfigError, match=r"--param-groups: layer.0(?s:.*)legal: layers.0"):
        whole_run(0, 1, run_settings("nadam", tmp_path / "none", param_groups=("layer.0.mlp.up.weight lr=1",)))


@pytest.mark.parametrize("case", CASES)
def test_steps_are_torchs(case: str) -> None:
    expected = plain_weights(case)
    for stage in (0, 3):
        close(weights([train_on_rank(0, case, stage)]), expected)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("case", "stage", "dp", "tp"),
    [
        ("sgd", 2, 2, 1),
        ("nadam", 3, 2, 1),
        ("adamax", 1, 1, 2),
        ("lamb", 0, 2, 2),
        ("lamb", 1, 4, 1),
        ("lamb", 2, 2, 2),
        ("lamb", 3, 2, 2),
        ("adafactor", 0, 2, 2),
        ("adafactor", 1, 1, 4),
        ("adafactor", 3, 4, 1),
        ("lion", 1, 4, 1),
        ("lion", 3, 2, 2),
    ],
)
def test_steps_are_torchs_on_several_ranks(case: str, stage: int, dp: int, tp: int) -> None:
    close(weights(run_ranks(dp * tp, train_on_rank, case, stage, dp, tp)), plain_weights(case))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("case", "stage", "home"),
    [
        ("lamb", 3, "cpu"),
        ("lamb", 2, "nvme"),
        ("adafactor", 3, "cpu"),
        ("adafactor", 2, "nvme"),
        ("lion", 1, "cpu"),
        ("lion", 2, "nvme"),
        ("rmsprop", 3, "nvme"),
    ],
)
def test_steps_are_torchs_with_states_elsewhere(case: str, stage: int, home: str, tmp_path: Path) -> None:
    """The states of half of the elements, or of all in blocks of 500, have their home in host memory or in files."""
    moved: dict[str, Any] = {"offload_optimizer": home, "sub_group_size": 500, "reduce_bucket_size": 2000}
    moved |= {"nvme_path": str(tmp_path)} if home == "nvme" else {"offload_optimizer_ratio": 0.5}
    close(weights(run_ranks(2, train_on_rank, case, stage, 2, 1, moved)), plain_weights(case))


# --- a cycle of rate and momentum -------------------------------------------------------------------------------------

CYCLE: dict[str, Any] = {
    "lr_decay_style": "OneCycle",
    "min_lr": LR / 4,
    "lr_decay_params": ("cycle_first_step_size=2", "cycle_second_step_size=1", "cycle_max_mom=0.95"),
}
# Of updates 0 to 3: two steps up and one down.
CYCLED = [(LR / 4, 0.8), (LR * 5 / 8, 0.875), (LR, 0.8), (LR / 4, 0.95)]


@pytest.mark.parametrize("case", ["adam", "adamax"])
def test_a_cycle_moves_the_rate_and_the_first_beta(case: str, tmp_path: Path) -> None:
    """A run takes the steps of torch's optimizer whose groups are set by hand, also when it is resumed in the cycle."""
    settings = {**run_settings(case, tmp_path), **CYCLE, "clip_grad": 0.0, "lr_decay_iters": None}
    settings = {name: value for name, value in settings.items() if name not in (*SCHEDULE, "adam_beta1")}
    inputs = RunInputs(DrawnSamples(), {}, VOCAB, None)
    train_run(0, 1, {**settings, "exit_interval": 2}, inputs)
    train_run(0, 1, {**settings, "load": str(tmp_path)}, inputs)
    _, kind, options = CASES[case]
    live = {name: value.clone().requires_grad_(True) for name, value in first_weights(tiny_run()).items()}
    groups = [{"params": [value for name, value in live.items() if decayed(name) == yes]} for yes in (True, False)]
    groups[1]["weight_decay"] = 0.0
    optimizer = reference_class(kind)(groups, lr=LR, **options)
    for step, (lr, momentum) in enumerate(CYCLED):
        grads = gradients(mean_loss(live, reference_batch(step * GLOBAL_BATCH, GLOBAL_BATCH, masked=False)), live)
        for name, value in live.items():
            value.grad = grads[name]
        for group in optimizer.param_groups:
            group.update(lr=lr, betas=(momentum, group["betas"][1]))
        optimizer.step()
    close(
        {name: values for (name, kind), values in saved_states(open_checkpoint(tmp_path)).items() if kind == "weight"},
        live,
    )


def test_a_momentum_that_would_reach_one_is_refused_before_training(tmp_path: Path) -> None:
    rising = {**CYCLE, "lr_decay_params": ("cycle_first_step_size=1", "decay_step_size=1", "decay_mom_rate=0.2")}
    with pytest.raises(ConfigError, match=r"a momentum of 1.08 at update 3"):
        train_run(0, 1, settings_of("nadam", mock_data=True, **rising, train_iters=4, micro_batch_size=1))


def test_an_optimizer_without_betas_keeps_its_momentum() -> None:
    told = train_run(0, 1, settings_of("sgd", mock_data=True, **CYCLE, train_iters=1, micro_batch_size=1))
    assert "the momentum is not cycled, because the optimizer has no betas" in told.text


# --- overflow --------------------------------------------------------------------------------------------------------


def test_an_overflow_leaves_the_optimizer_as_it_was() -> None:
    """A step whose loss is scaled beyond fp16's range leaves weights, moments and counts as they were."""
    config = tiny_run(**settings_of("nadam", precision="fp16"))
    core = core_on_rank(0, config)
    parts = step_context(config, core)
    with BatchLoader(DrawnSamples(), batch_layout(config, core.mesh, None), prefetch=0) as loader:
        training_step(parts, next(loader), StepControls(LR, 1.0))
        before, numbers = owned_boxes(core), core.engine.optimizer_numbers()
        report = training_step(parts, next(loader), StepControls(LR, 1e30))
        assert report.skipped.item() == 1.0 and core.engine.optimizer_numbers() == numbers
        assert {box.kind for box in before} == {"weight", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(a.values, b.values) for a, b in zip(before, owned_boxes(core), strict=True))
        assert training_step(parts, next(loader), StepControls(LR, 1.0)).skipped.item() == 0.0
    assert not all(torch.equal(a.values, b.values) for a, b in zip(before, owned_boxes(core), strict=True))
    core.engine.close()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def run_settings(case: str, folder: Path, **more: Any) -> dict[str, Any]:
    paths = {"mock_data": True, "save": str(folder), "micro_batch_size": 1, "train_iters": STEPS, "lr_decay_iters": 9}
    return settings_of(case, **paths, **SCHEDULE, **more)


def whole_run(rank: int, size: int, settings: dict[str, Any]) -> None:
    train_run(rank, size, settings)


# Every form of state: averages of two kinds with their largest, none but momentum, one, step sizes, scalars, averages
# of rows and columns.
@pytest.mark.parametrize(
    "case", ["coupled adam", "sgd", "adagrad", "rprop", "asgd", "nadam", "lamb", "lion", "adafactor"]
)
def test_a_resumed_run_is_the_run_that_stayed(case: str, tmp_path: Path) -> None:
    """A resumed run equals an uninterrupted one to the bit, for every state that the optimizer keeps."""
    whole_run(0, 1, run_settings(case, tmp_path / "stayed"))
    whole_run(0, 1, run_settings(case, tmp_path / "left", exit_interval=2))
    whole_run(0, 1, run_settings(case, tmp_path / "left", load=str(tmp_path / "left")))
    stayed, left = saved_states(open_checkpoint(tmp_path / "stayed")), saved_states(open_checkpoint(tmp_path / "left"))
    assert stayed.keys() == left.keys() and len({kind for _, kind in stayed}) > (1 if case != "sgd" else 0)
    assert all(torch.equal(left[key], value) for key, value in stayed.items())
    one, other = (open_checkpoint(tmp_path / name).progress for name in ("left", "stayed"))
    assert {**one, "run": None} == {**other, "run": None}  # two runs


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("case", "stages"),
    [
        ("rmsprop", (2, 0)),
        ("asgd", (0, 3)),
        ("sgd", (1, 2)),
        ("lamb", (3, 1)),
        ("lion", (0, 2)),
        ("adafactor", (3, 1)),
    ],
)
def test_another_layout_goes_on(case: str, stages: tuple[int, int], tmp_path: Path) -> None:
    """Two tensor-parallel ranks resume from two data-parallel ones and end as one uninterrupted process does."""
    whole_run(0, 1, run_settings(case, tmp_path / "one"))
    settings = run_settings(case, tmp_path / "two", zero_stage=stages[0], exit_interval=2)
    run_ranks(2, whole_run, 2, settings)
    split = {"tensor_model_parallel_size": 2, "zero_stage": stages[1], "load": str(tmp_path / "two")}
    run_ranks(2, whole_run, 2, run_settings(case, tmp_path / "two", **split))
    close(saved_states(open_checkpoint(tmp_path / "two")), saved_states(open_checkpoint(tmp_path / "one")))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("case", "stage", "dp", "tp"), [("lamb", 1, 2, 1), ("lamb", 2, 1, 2), ("lamb", 3, 2, 1), ("adafactor", 1, 1, 2)]
)
def test_figures_of_pipeline_stages_count_what_they_share_once(
    case: str, stage: int, dp: int, tp: int, tmp_path: Path
) -> None:
    """Two pipeline stages, which both have the word embedding, train as one process does."""
    whole_run(0, 1, run_settings(case, tmp_path / "one"))
    layout = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": tp, "zero_stage": stage}
    run_ranks(2 * dp * tp, whole_run, 2 * dp * tp, run_settings(case, tmp_path / "two", **layout))
    close(saved_states(open_checkpoint(tmp_path / "two")), saved_states(open_checkpoint(tmp_path / "one")))


def test_another_optimizer_does_not_go_on(tmp_path: Path) -> None:
    whole_run(0, 1, run_settings("sgd", tmp_path, exit_interval=2))
    with pytest.raises(CheckpointError, match=r"--optimizer of kind AdamW(?s:.*)saved with SGD(?s:.*)--no-load-optim"):
        whole_run(0, 1, run_settings("adam", tmp_path, load=str(tmp_path)))
    whole_run(0, 1, run_settings("adam", tmp_path, load=str(tmp_path), no_load_optim=True))
    assert {kind for _, kind in saved_states(open_checkpoint(tmp_path))} == {"weight", "exp_avg", "exp_avg_sq"}


def test_a_checkpoint_before_the_first_update_goes_on(tmp_path: Path) -> None:
    """A checkpoint without optimizer state, because every step so far has overflowed, can be resumed."""
    settings = run_settings("nadam", tmp_path, precision="fp16", initial_loss_scale=2.0**100)
    whole_run(0, 1, {**settings, "exit_interval": 1})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.progress["optimizer_numbers"] is None and {
        kind for _, kind in saved_states(open_checkpoint(tmp_path))
    } == {"weight"}
    whole_run(0, 1, {**settings, "load": str(tmp_path)})
    assert open_checkpoint(tmp_path).step == STEPS


def test_parameters_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--optimizer-params: nesterov: true(?s:.*)alpha"):
        whole_run(0, 1, settings_of("rmsprop", optimizer_params=("nesterov=true",), mock_data=True))
