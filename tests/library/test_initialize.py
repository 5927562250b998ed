"""Tests `megazero.initialize` as users call it: configurations, notices, models under Init, the engine as a model."""

import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.any_models import CASES, adamw, inputs_of, make, train_plain
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.errors import CheckpointError, ConfigError, UsageError
from megazero.library.config import load_engine_config
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.zero.parameters.gathered import GatheredParameters

STEPS = 3


def run(engine: DataParallelEngine, name: str, rank: int = 0, dp: int = 1) -> dict[str, Tensor]:
    for step in range(STEPS):
        engine.backward(CASES[name].loss(engine, step, *[x.chunk(dp)[rank] for x in inputs_of(name, step)]))
        engine.step()
    with GatheredParameters(engine.module):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():  # gradients of attention's key biases are noise, which AdamW amplifies
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


# --- models made under Init ------------------------------------------------------------------------------------------


def config(stage: int, **optimizer: Any) -> dict[str, Any]:
    zero = {"zero_stage": stage, "reduce_bucket_size": 100}
    return {"zero": zero, "precision": {"precision": "fp64"}, "optimizer": optimizer}


def made_under_init(rank: int, name: str, stage: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    mesh = mesh_in_worker(rank, dp=2)
    settings = config(stage, type="AdamW", lr=1e-2, params={"weight_decay": 0.1})
    torch.manual_seed(11 + 100 * rank)  # only rank 0's values are to count
    with megazero.zero.Init(mesh=mesh, dtype=dtype):
        model = CASES[name].make()
    return run(megazero.initialize(model, settings, mesh=mesh), name, rank, 2)


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.float64), (3, None)])
def test_models_made_under_init(stage: int, dtype: torch.dtype | None) -> None:
    """The parameters' number format is the configuration's, whatever format they were made in."""
    for name in ("translator", "convolutions"):
        expected = train_plain(name, STEPS, adamw).weights
        for found in run_ranks(2, made_under_init, name, stage, dtype):
            close(found, expected)


@pytest.mark.parametrize("kind", ["Adagrad", "RMSprop"])
def test_optimizers_by_name_over_partitioned_parameters(kind: str) -> None:
    torch.manual_seed(11)
    with megazero.zero.Init():
        model = CASES["sequential"].make()
    found = run(megazero.initialize(model, config(3, type=kind, lr=0.1)), "sequential")
    close(found, train_plain("sequential", STEPS, lambda p: getattr(torch.optim, kind)(p, lr=0.1)).weights)


# --- configurations --------------------------------------------------------------------------------------------------


def test_a_deepspeed_file(tmp_path: Path) -> None:
    content = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 3e-3}},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="round_robin_gradients"):
        engine = megazero.initialize(nn.Linear(3, 2), str(path))
    assert engine.module.weight.dtype == torch.bfloat16
    assert engine.gradient_accumulation_steps() == 2 and engine.get_lr() == [0.0]
    assert (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()) == (4, 8)


def test_a_wrong_configuration_leaves_the_model_alone() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="train_batch_size"):
        megazero.initialize(model, {"zero": {}, "train_batch_size": 7, "gradient_accumulation_steps": 2})
    assert model.weight.dtype == torch.float32 and "megazero_spec" not in vars(model.weight)


# --- the engine and the model ----------------------------------------------------------------------------------------


class Named(nn.Module):
    kind = "of my own"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, times: int = 1) -> Tensor:
        return self.drop(self.layer(x)) * times

    def describe(self) -> str:
        return f"a model {self.kind}"


@each(
    ("model", "given", "told"),
    [
        ("gpt", {}, "model of type str"),
        (nn.Linear, {}, "model Linear, a class"),
        (nn.Linear(2, 1), None, "config of type NoneType"),
        (nn.Linear(2, 1), 5, "config of type int"),
    ],
)
def test_arguments_of_other_types_are_refused(model: Any, given: Any, told: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=told):
        megazero.initialize(model, given)


def test_an_optimizer_must_be_one() -> None:
    given: Any = "adam"
    with pytest.raises(ConfigError, match="optimizer of type str"):
        megazero.initialize(nn.Linear(2, 1), {"zero": {}}, optimizer=given)


def test_the_engine_stands_for_the_model() -> None:
    model = Named()
    engine = megazero.initialize(model, {"zero": {}})
    assert engine.module is model and engine.describe() == "a model of my own" and engine.layer is model.layer
    assert [name for name, _ in engine.named_parameters()] == ["layer.weight", "layer.bias"]
    assert engine.eval() is engine and not model.training
    x = torch.ones(1, 2)
    torch.testing.assert_close(engine(x, times=3), engine.forward(x) * 3)
    assert engine.train().training and model.drop.training
    assert engine.get_global_grad_norm() is None and not engine.was_step_applied()
    with pytest.raises(AttributeError, match="nonsense"):
        engine.nonsense  # noqa: B018


def test_a_model_has_one_engine() -> None:
    model = make("sequential")
    first = megazero.initialize(model, config(1))
    with pytest.raises(UsageError, match="a model with an engine"):
        megazero.initialize(model, config(1))
    first.close()
    settings = config(2, type="AdamW", lr=1e-2, params={"weight_decay": 0.1})
    close(run(megazero.initialize(model, settings), "sequential"), train_plain("sequential", STEPS, adamw).weights)


# --- frozen models ----------------------------------------------------------------------------------------------------


@each("kind", ["AdamW", "SGD"])
@each("stage", [0, 1, 2, 3])
def test_a_frozen_model_computes_and_is_not_trained(stage: int, kind: str) -> None:
    """Gradients of its inputs come through it; backward and step of the engine are errors that say what is missing."""
    plain, model = (make("sequential").requires_grad_(False) for _ in range(2))
    engine = megazero.initialize(model, config(stage, type=kind, lr=1e-2))
    (x,) = inputs_of("sequential", 0)
    for _ in range(3):
        torch.testing.assert_close(engine(x), plain(x), rtol=1e-12, atol=0)
        with torch.no_grad():
            torch.testing.assert_close(engine(x), plain(x), rtol=1e-12, atol=0)
        assert engine.zero_engine.gathered_numel[0] == 0
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    engine(mine).square().sum().backward()
    plain(theirs).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=0)
    assert engine.zero_engine.gathered_numel[0] == 0
    states = engine.zero_engine.model_state_bytes()
    assert states.gradients == states.master == states.moments == 0
    for call in (lambda: engine.backward(engine(x).sum()), lambda: engine.backward(engine(mine).sum()), engine.step):
        with pytest.raises(UsageError, match=r"of a frozen model\n.*nothing to update\n.*before megazero.initialize"):
            call()
    engine.close()
    with pytest.raises(UsageError, match="an optimizer for a frozen model"):
        megazero.initialize(plain, {"zero": {"zero_stage": stage}}, optimizer=torch.optim.SGD)
    with pytest.raises(UsageError, match="a model without parameters"):
        megazero.initialize(nn.ReLU(), config(stage))


# --- engines without an optimizer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_an_optimizer_none_is_made(stage: int, precision: str, tmp_path: Path) -> None:
    """The engine has working parameters only; what needs an optimizer is an error that says so."""
    dtype = torch.float64 if precision == "fp64" else torch.bfloat16
    plain, model = (make("sequential").to(dtype) for _ in range(2))
    settings = {"zero": {"zero_stage": stage}, "precision": {"precision": precision}}
    engine = megazero.initialize(model, settings)
    (x,) = (part.to(dtype) for part in inputs_of("sequential", 0))
    torch.testing.assert_close(engine(x), plain(x), rtol=1e-12, atol=0)
    states = engine.zero_engine.model_state_bytes()
    assert states.gradients == states.master == states.moments == 0
    assert engine.optimizer is None and engine.lr_scheduler is None and engine.get_lr() == []
    for call in (lambda: engine.backward(engine(x).sum()), engine.step):
        with pytest.raises(UsageError, match=r"without an optimizer\n.*trains nothing(?s:.*)optimizer=\.\.\."):
            call()
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    engine(mine).square().sum().backward()
    plain(theirs).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=0)
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert engine.save_16bit_model(tmp_path / "narrow") and engine.save_fp32_model(tmp_path / "wide")
    engine.load_state_dict({name: value + 1 for name, value in state.items()})
    engine.save_checkpoint(tmp_path / "saved")
    engine.load_state_dict(state)
    engine.load_checkpoint(tmp_path / "saved")
    changed = engine.state_dict()
    assert all(torch.equal(changed[name], value + 1) for name, value in state.items())
    assert engine.zero_engine.gathered_numel[0] == 0
    engine.close()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_engine_without_an_optimizer_evaluates_a_training(tmp_path: Path) -> None:
    """It takes the weights, and cannot put a checkpoint without moments in their place."""
    training = megazero.initialize(make("sequential"), config(1, type="SGD", lr=0.1, params={"momentum": 0.9}))
    run(training, "sequential")
    training.save_checkpoint(tmp_path)
    reader = megazero.initialize(make("sequential"), {"zero": {"zero_stage": 3}, "precision": {"precision": "fp64"}})
    assert reader.load_checkpoint(tmp_path)[0] is not None and reader.global_steps == 0
    expected = training.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in reader.state_dict().items())
    with pytest.raises(CheckpointError, match="which holds checkpoints of"):
        reader.save_checkpoint(tmp_path)
    reader.save_checkpoint(tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"optimizer SGD(?s:.*)none(?s:.*)load_optimizer_states=False"):
        training.load_checkpoint(tmp_path / "weights")


def test_a_schedule_without_an_optimizer() -> None:
    """It is refused, or a notice where DeepSpeed leaves it out; a given optimizer follows it."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}
    with pytest.raises(ConfigError, match=r"scheduler.type: .WarmupLR(?s:.*)there is no optimizer"):
        megazero.initialize(make("sequential"), {"zero": {}, "scheduler": schedule})
    with pytest.warns(UserWarning, match="there is no optimizer"):
        engine = megazero.initialize(make("sequential"), {"zero_optimization": {}, "scheduler": schedule})
    assert engine.lr_scheduler is None
    model = make("sequential")
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = megazero.initialize(model, {"zero": {}, "scheduler": schedule}, optimizer=sgd)
    assert engine.lr_scheduler is not None and engine.optimizer is sgd and engine.get_lr() == [0.0]


def test_a_home_of_states_without_an_optimizer() -> None:
    own = {"zero_stage": 1, "offload_optimizer": "cpu", "delayed_parameter_update": True}
    rule = "it has no effect here: there is no optimizer whose states would live there"
    with pytest.raises(ConfigError) as caught:
        megazero.initialize(make("sequential"), {"zero": own})
    (problem,) = caught.value.problems
    assert (problem.given, problem.rule) == ('config: zero.offload_optimizer: "cpu"', rule)
    theirs = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    with pytest.warns(UserWarning, match=r"zero_optimization.offload_optimizer.device: .cpu.: moot here"):
        megazero.initialize(make("sequential"), theirs).close()
    model = make("sequential")
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    assert megazero.initialize(model, {"zero": own}, optimizer=sgd).zero_engine.plan.share_away == 1.0


# --- two optimizers ---------------------------------------------------------------------------------------------------


def test_two_optimizers_are_refused() -> None:
    """The message names both, and the model stays as it was."""
    model = make("sequential")
    dtype = next(model.parameters()).dtype
    for given in (torch.optim.SGD(model.parameters(), lr=0.5), torch.optim.SGD):
        for settings in (config(1, type="Adam", lr=0.1), load_engine_config(config(1, type="Adam", lr=0.1))):
            with pytest.raises(ConfigError) as caught:
                megazero.initialize(model, settings, optimizer=given)
            (problem,) = caught.value.problems
            assert problem.given == 'config: optimizer.type: "Adam" beside initialize(optimizer=SGD)'
            assert problem.rule == "a training has one optimizer" and "leave out" in problem.legal
    assert next(model.parameters()).dtype == dtype and not hasattr(next(model.parameters()), "megazero_spec")


@pytest.mark.parametrize("as_file", [False, True])
def test_a_given_optimizer_takes_the_place_of_a_deepspeed_configurations(as_file: bool, tmp_path: Path) -> None:
    """It trains as it would alone; the other one is named in a notice."""
    content = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    two = {**content, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    path = tmp_path / "two.json"
    path.write_text(json.dumps(two))
    weights = []
    for given in (content, str(path) if as_file else two):
        model = make("sequential").float()
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            engine = megazero.initialize(model, given, optimizer=sgd)
        moot = [str(each.message) for each in found if "a training has" in str(each.message)]
        notice = (
            'config: optimizer.type: "AdamW": moot here, because initialize(optimizer=SGD) gives the one optimizer that'
            " a training has"
        )
        assert moot == ([] if given is content else [notice])
        assert engine.optimizer is sgd and engine.get_lr() == [0.5] and engine.config.optimizer is None
        (x,) = (part.float() for part in inputs_of("sequential", 0))
        engine.backward(engine(x).square().mean())
        engine.step()
        weights.append(engine.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


# --- public names ----------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    assert {"initialize", "zero"} <= set(dir(megazero))
    access = importlib.import_module("megazero.library.state.access")
    assert {name for name in vars(access) if name.startswith("safe_")} <= set(dir(megazero.zero))
    for name in dir(megazero.zero):
        assert callable(getattr(megazero.zero, name)), name
    for module in (megazero, megazero.zero):
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            module.nonsense  # noqa: B018


def test_importing_loads_nothing_heavy() -> None:
    program = "import sys, megazero, megazero.zero; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
