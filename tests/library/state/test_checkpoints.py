"""Tests that a training of the library is saved and resumed: bitwise at its layout, to 1e-9 in float64 at others."""

import copy
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launch import load_program
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import megazero
from megazero.checkpoint.reader import open_checkpoint
from megazero.errors import CheckpointError, UsageError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.state.access import safe_get_full_fp32_param
from megazero.zero.parameters.gathered import GatheredParameters

VERIFY = Path(__file__).parents[3] / "tools" / "checkpoint.py"
SAMPLES, BEFORE, AFTER = 8, 3, 3
Named = dict[str, Tensor]


class Odd(nn.Module):
    """A model with tied, frozen, unused, empty and one-element parameters, and with buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("angles", torch.linspace(0, 1, 6).view(2, 3).t())  # not dense
        self.register_buffer("turns", torch.tensor([1 + 2j, 3 - 4j]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.frozen(self.tied(hidden)) * self.scale + self.nothing.sum()


def make() -> Odd:
    torch.manual_seed(3)
    return Odd()


def config(stage: int, precision: str = "fp64", **more: Any) -> dict[str, Any]:
    settings = {"zero": {"zero_stage": stage, "reduce_bucket_size": 30}, "precision": {"precision": precision}}
    if precision == "fp16":
        settings["precision"] |= {"initial_loss_scale": 2.0**18, "loss_scale_window": 2}
    settings["scheduler"] = {"type": "linear", "params": {"lr_decay_iters": 20, "lr_warmup_iters": 4}}
    settings["optimizer"] = {"type": "AdamW", "lr": 0.05, "params": {"weight_decay": 0.1}}
    return {**settings, **more}


def engine_of(stage: int, precision: str = "fp64", mesh: Any = None, **more: Any) -> DataParallelEngine:
    return megazero.initialize(make(), config(stage, precision, **more), mesh=mesh)


def train(engine: DataParallelEngine, first: int, steps: int, *, same: bool = False) -> None:
    """Take steps on this rank's part of each batch, or on the whole batch on every rank."""
    dp = engine.mesh.axis("dp")
    dtype = next(engine.module.parameters()).dtype
    for step in range(first, first + steps):
        batch = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        part = batch if same else batch.chunk(dp.size)[dp.rank]
        engine.backward(engine(part.to(dtype)).float().square().mean())
        engine.step()


def figures(engine: DataParallelEngine) -> Named:
    """Return master weights, moments, frozen weights and buffers, whole."""
    found = {name: buffer.clone() for name, buffer in engine.module.named_buffers() if name != "scratch"}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        if master is None:
            with GatheredParameters(parameter):
                master = parameter.detach().clone()
        found[name] = master
    for number, state in engine.optimizer.state_dict()["state"].items():
        found |= {f"{number} {kind}": value.clone() for kind, value in state.items()}
    return found


def counters(engine: DataParallelEngine) -> list[Any]:
    return [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.loss_scale, engine.get_lr()]


def gap(one: Named, other: Named) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one if one[name].numel())


# --- one process: stages and precisions, pairwise ---------------------------------------------------------------------

# (stage and precision that save, stage and precision that load): all pairs of stages, and of 16-bit and wide formats.
PAIRS = [
    (0, "fp32", 0, "fp32"), (1, "bf16", 1, "bf16"), (2, "fp16", 2, "fp16"), (3, "bf16", 3, "bf16"),
    (0, "fp64", 3, "fp64"), (1, "fp64", 2, "fp64"), (2, "fp64", 0, "fp64"), (3, "fp64", 1, "fp64"),
    (0, "bf16", 2, "bf16"), (3, "fp16", 0, "fp16"), (2, "fp32", 3, "fp32"), (1, "fp16", 3, "fp16"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "precision", "next_stage", "next_precision"), PAIRS)
def test_a_resumed_training_ends_as_one_that_was_not_stopped(
    stage: int, precision: str, next_stage: int, next_precision: str, tmp_path: Path
) -> None:
    """In one process every stage computes the same, so what is resumed at another stage is equal to the bit too."""
    state = {"epoch": 2, "best": math.inf, "names": ["a", None, True], "seen": {"x": 0.1}}
    whole = engine_of(stage, precision)
    train(whole, 0, BEFORE)
    folder = whole.save_checkpoint(tmp_path, client_state=state)
    train(whole, BEFORE, AFTER)
    resumed = engine_of(next_stage, next_precision)
    assert resumed.load_checkpoint(tmp_path) == (folder, state)
    train(resumed, BEFORE, AFTER)
    assert counters(resumed) == counters(whole) and whole.global_samples == BEFORE + AFTER
    assert gap(figures(resumed), figures(whole)) == 0.0
    assert load_program(VERIFY).main(["verify", str(folder)]) == 0


@pytest.mark.parametrize("pair", [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16"), ("fp64", "fp16")])
def test_another_precision_takes_all_that_it_can_hold(pair: tuple[str, str], tmp_path: Path) -> None:
    saved, loaded = engine_of(1, pair[0]), engine_of(3, pair[1])
    train(saved, 0, BEFORE)
    saved.save_checkpoint(tmp_path)
    loaded.load_checkpoint(tmp_path)
    one, other = figures(saved), figures(loaded)
    wide = [name for name in one if name not in ("frozen.weight", *dict(saved.module.named_buffers()))]
    assert gap({n: one[n].float() for n in wide}, {n: other[n].float() for n in wide}) == 0.0
    train(loaded, BEFORE, 1)
    assert loaded.global_steps == BEFORE + 1


# --- several processes ------------------------------------------------------------------------------------------------


def stop(rank: int, dp: int, stage: int, precision: str, folder: str) -> None:
    engine = engine_of(stage, precision, mesh_in_worker(rank, dp=dp))
    train(engine, 0, BEFORE, same=True)
    engine.save_checkpoint(folder, client_state={"rank": rank})
    engine.close()


def resume(rank: int, dp: int, stage: int, precision: str, folder: str) -> tuple[Named, Named]:
    """Resume, and return the state; first whole trainings at this layout, if the checkpoint is from this layout."""
    engine = engine_of(stage, precision, mesh_in_worker(rank, dp=dp))
    _, client_state = engine.load_checkpoint(folder)
    assert client_state == {"rank": 0}
    train(engine, BEFORE, AFTER, same=True)
    found = figures(engine)
    engine.close()
    whole = engine_of(stage, precision, mesh_in_worker(rank, dp=dp))
    train(whole, 0, BEFORE + AFTER, same=True)
    expected = figures(whole)
    whole.close()
    return found, expected


@pytest.mark.gloo
@pytest.mark.parametrize(("first", "second"), [((2, 3), (3, 2)), ((3, 2), (2, 0)), ((2, 0), (3, 3)), ((2, 1), (1, 3))])
def test_other_numbers_of_processes_and_stages_go_on(
    first: tuple[int, int], second: tuple[int, int], tmp_path: Path
) -> None:
    run_ranks(first[0], stop, *first, "fp64", str(tmp_path))
    for found, expected in run_ranks(second[0], resume, *second, "fp64", str(tmp_path)):
        assert gap(found, expected) < 1e-9


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "bf16"), (2, "fp16")])
def test_the_same_processes_go_on_to_the_bit(stage: int, precision: str, tmp_path: Path) -> None:
    run_ranks(2, stop, 2, stage, precision, str(tmp_path))
    for found, expected in run_ranks(2, resume, 2, stage, precision, str(tmp_path)):
        assert gap(found, expected) == 0.0


# --- optimizers and schedules -----------------------------------------------------------------------------------------


def groups_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": parameters[::2], "lr": 0.03}, {"params": parameters[1::2]}]
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=0.01)
    return made


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "NAdam", "ASGD"])
def test_a_given_optimizer_and_torchs_schedule_go_on(kind: str, tmp_path: Path) -> None:
    """ASGD keeps numbers that differ between param groups."""

    def begin() -> tuple[DataParallelEngine, LambdaLR]:
        model = make()
        optimizer = groups_of(model, kind)
        settings = config(2)
        del settings["scheduler"], settings["optimizer"]
        return megazero.initialize(model, settings, optimizer=optimizer), LambdaLR(optimizer, lambda n: 1 / (1 + n))

    def go(engine: DataParallelEngine, schedule: LambdaLR, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            train(engine, step, 1)
            schedule.step()

    whole, schedule = begin()
    go(whole, schedule, 0, BEFORE)
    saved = {name: value for name, value in schedule.state_dict().items() if name != "lr_lambdas"}
    whole.save_checkpoint(tmp_path, client_state={"schedule": saved})
    go(whole, schedule, BEFORE, AFTER)
    resumed, other = begin()
    _, client_state = resumed.load_checkpoint(tmp_path)
    other.load_state_dict({**client_state["schedule"], "lr_lambdas": [None, None]})
    go(resumed, other, BEFORE, AFTER)
    assert resumed.get_lr() == whole.get_lr() and gap(figures(resumed), figures(whole)) == 0.0


def test_torchs_adamw_and_the_configurations_go_on_from_each_other(tmp_path: Path) -> None:
    def torchs() -> DataParallelEngine:
        model = make()
        trained = [p for p in model.parameters() if p.requires_grad]
        settings = config(1)
        del settings["optimizer"]
        optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.1, foreach=False)
        return megazero.initialize(model, settings, optimizer=optimizer)

    for name, begin, other in (("a", torchs, lambda: engine_of(2)), ("b", lambda: engine_of(2), torchs)):
        whole, resumed = begin(), other()
        train(whole, 0, BEFORE)
        whole.save_checkpoint(tmp_path / name)
        resumed.load_checkpoint(tmp_path / name)
        train(whole, BEFORE, AFTER)
        train(resumed, BEFORE, AFTER)
        assert gap(figures(whole), figures(resumed)) < 1e-9


def test_an_optimizer_that_has_not_stepped_is_saved_and_taken(tmp_path: Path) -> None:
    first = engine_of(1, optimizer={"type": "Adam", "lr": 0.05})
    first.save_checkpoint(tmp_path)
    other = engine_of(2, optimizer={"type": "Adam", "lr": 0.05})
    train(other, 0, 2)
    other.load_checkpoint(tmp_path)
    assert other.optimizer.state_dict()["state"] == {} and other.global_steps == 0
    train(first, 0, 2)
    train(other, 0, 2)
    assert gap(figures(first), figures(other)) == 0.0


def test_parts_can_be_left_out(tmp_path: Path) -> None:
    saved = engine_of(1)
    train(saved, 0, BEFORE)
    saved.save_checkpoint(tmp_path)
    weights = saved.state_dict()

    module_only = engine_of(2)
    train(module_only, 9, 1)
    module_only.load_checkpoint(tmp_path, load_module_only=True)
    assert module_only.global_steps == 1 and module_only.optimizer.state_dict()["state"] == {}
    anew = engine_of(2)
    anew.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert anew.global_steps == BEFORE and anew.get_lr() == saved.get_lr()
    assert anew.optimizer.state_dict()["state"] == {}
    unscheduled = engine_of(2)
    rates = unscheduled.get_lr()
    unscheduled.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert unscheduled.get_lr() == rates and unscheduled.optimizer.state_dict()["state"][0]["step"] == BEFORE
    for engine in (module_only, anew, unscheduled):
        assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())
    anew.save_checkpoint(tmp_path / "anew")
    assert engine_of(3).load_checkpoint(tmp_path / "anew")[0] is not None, "counts of a new optimizer are sound"


# --- folders ----------------------------------------------------------------------------------------------------------


def test_tags_name_checkpoints(tmp_path: Path) -> None:
    engine = engine_of(0)
    for step, tag in enumerate((None, "best", 7, "best", None)):
        train(engine, step, 1)
        engine.save_checkpoint(tmp_path, tag, {"tag": tag})
    assert [folder.name for folder in sorted(tmp_path.glob("step_*"))] == [f"step_000000{n}" for n in (1, 3, 4, 5)]
    for tag, step in (("best", 4), ("7", 3), (7, 3), ("step_0000001", 1), (None, 5)):
        path, state = engine_of(1).load_checkpoint(tmp_path, tag)
        assert path == tmp_path / f"step_000000{step}" and state["tag"] in (tag, 7, None)
    with pytest.raises(CheckpointError, match=r"tag 'worst'(?s:.*)best") as unknown:
        engine.load_checkpoint(tmp_path, "worst")
    assert "7" in unknown.value.problems[0].legal


def test_older_checkpoints_without_a_tag_go(tmp_path: Path) -> None:
    engine = engine_of(0)
    for step in range(6):
        train(engine, step, 1)
        engine.save_checkpoint(tmp_path, "kept" if step == 0 else None, keep_last=2)
    assert [folder.name[-1] for folder in sorted(tmp_path.glob("step_*"))] == ["1", "5", "6"]
    engine.save_checkpoint(tmp_path)
    assert (tmp_path / "latest").read_text() == "step_0000006_2\n", (
        "saved again at a step: a new folder, then the old goes"
    )
    assert not (tmp_path / "step_0000006").exists()
    with pytest.raises(UsageError, match="keep_last=0"):
        engine.save_checkpoint(tmp_path, keep_last=0)


def test_another_trainings_folder_is_left_alone(tmp_path: Path) -> None:
    first, other = engine_of(0), engine_of(0)
    train(first, 0, 1)
    before = first.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of run(?s:.*)load_checkpoint of this folder"):
        other.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    train(other, 1, 1)
    other.save_checkpoint(tmp_path)
    assert before.is_dir() and open_checkpoint(tmp_path).step == 2


def test_a_long_client_state_does_not_hide_whose_checkpoint_it_is(tmp_path: Path) -> None:
    engine = engine_of(0)
    engine.save_checkpoint(tmp_path, "a", {"order": list(range(40_000))})
    engine.save_checkpoint(tmp_path, "b")
    assert len(list(tmp_path.glob("step_*"))) == 2
    assert engine_of(0).load_checkpoint(tmp_path, "a")[1]["order"][-1] == 39_999


def test_nothing_to_load(tmp_path: Path) -> None:
    engine = engine_of(0)
    assert engine.load_checkpoint(tmp_path / "none", missing_ok=True) == (None, {})
    with pytest.raises(CheckpointError, match="there is no such folder"):
        engine.load_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="there is no checkpoint in this folder"):
        engine.load_checkpoint(tmp_path)


# --- damage and refusals ----------------------------------------------------------------------------------------------


def damage(folder: Path) -> None:
    path = next(folder.glob("rank_*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_unless_it_was_named(tmp_path: Path) -> None:
    engine = engine_of(0)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    expected = figures(engine)
    train(engine, 1, 1)
    damage(engine.save_checkpoint(tmp_path, "two"))
    other = engine_of(1)
    with pytest.warns(UserWarning, match="damaged") as warned:
        path, _ = other.load_checkpoint(tmp_path)
    assert path == tmp_path / "step_0000001" and "is sound and taken instead" in str(warned[-1].message)
    assert gap(figures(other), expected) == 0.0
    with pytest.raises(CheckpointError, match=r"(?s:.*)a sound checkpoint before training goes on"):
        other.load_checkpoint(tmp_path, "two")


class Longer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)
        self.unused = nn.Linear(3, 4)
        del self.frozen
        self.register_buffer("angles", torch.zeros(7))


def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    engine = engine_of(0)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    other = megazero.initialize(Longer(), config(2))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        other.load_checkpoint(tmp_path)
    told = str(caught.value)
    for name in ("more.weight", "more.bias", "unused.weight of shape [4, 3]", "angles of shape [7]"):
        assert name in told, told
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    fewer = make()
    del fewer.frozen, fewer.turns
    with pytest.raises(CheckpointError, match=r"frozen.weight(?s:.*)turns(?s:.*)no such parameter"):
        megazero.initialize(fewer, config(1)).load_checkpoint(tmp_path)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"type": "SGD", "lr": 0.05}}, r"optimizer SGD; .* was saved with AdamW"),
    ({"scheduler": {"type": "linear", "params": {"lr_decay_iters": 21, "lr_warmup_iters": 4}}}, "lr_decay_iters"),
    ({"scheduler": None}, r"scheduler: type None(?s:.*)load_lr_scheduler_states=False"),
]


@pytest.mark.parametrize(("changed", "told"), REFUSED)
def test_another_optimizer_or_schedule_is_refused(changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    engine = engine_of(0)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=told):
        engine_of(0, **changed).load_checkpoint(tmp_path)


def test_other_options_are_replaced_with_a_warning(tmp_path: Path) -> None:
    engine = engine_of(0)
    engine.optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    other = engine_of(0, optimizer={"type": "AdamW", "lr": 0.05, "params": {"weight_decay": 0.2}})
    with pytest.warns(UserWarning) as warned:
        other.load_checkpoint(tmp_path)
    assert [str(each.message) for each in warned] == [
        "param group 0: betas (0.8, 0.9) of the checkpoint replaces (0.9, 0.999)",
        "param group 0: weight_decay 0.1 of the checkpoint replaces 0.2",
    ]
    assert other.optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_client_state_is_json_and_comes_back_as_it_was(tmp_path: Path) -> None:
    engine = engine_of(0)
    bad = {"at": (1, 2), "deep": [{"tensor": torch.ones(2)}], 3: "x"}
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(tmp_path, client_state=bad)
    told = str(caught.value)
    for place in ("client_state['at'] of type tuple", "client_state['deep'][0]['tensor'] of type Tensor", "the key 3"):
        assert place in told
    assert not list(tmp_path.glob("step_*"))


def test_a_step_in_progress_is_refused(tmp_path: Path) -> None:
    engine = engine_of(0, gradient_accumulation_steps=2)
    x = torch.ones(4, 5, dtype=torch.float64)
    engine.backward(engine(x).sum())
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(UsageError, match="between a backward pass and the end of its step"):
            call(tmp_path)


def saved_alone(rank: int, folder: str) -> str:
    """Save with a full disk on rank 1."""
    engine = engine_of(2, mesh=mesh_in_worker(rank, dp=2))
    train(engine, 0, 1)
    engine.save_checkpoint(folder, "one")
    bad = {"x": torch.ones(1)} if rank == 1 else {}
    try:
        engine.save_checkpoint(folder, "two", bad)
    except CheckpointError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.gloo
def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    told = run_ranks(2, saved_alone, str(tmp_path))
    assert told[0] == told[1] and "rank 1: client_state['x']" in told[0]
    manifest = json.loads((tmp_path / "step_0000001" / "manifest.json").read_text())
    assert manifest["progress"]["tag"] == "one" and len(list(tmp_path.glob("step_*"))) == 1


class Interrupted(torch.optim.SGD):
    """An optimizer in whose update a user presses Ctrl-C, when its learning rate is 0.5."""

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        if self.param_groups[0]["lr"] == 0.5:
            raise KeyboardInterrupt
        return done


@pytest.mark.parametrize(("stage", "home"), [(0, "none"), (2, "cpu"), (3, "none"), (2, "nvme")])
def test_after_an_interrupted_update_there_is_no_step_and_no_save_before_a_load(
    stage: int, home: str, tmp_path: Path
) -> None:
    engines = []
    for _ in range(2):
        model, settings = make(), config(stage)
        del settings["optimizer"], settings["scheduler"]
        settings["zero"] |= {"offload_optimizer": home, **({"nvme_path": str(tmp_path)} if home == "nvme" else {})}
        optimizer = Interrupted(model.parameters(), lr=0.05, momentum=0.9)
        engines.append(megazero.initialize(model, settings, optimizer=optimizer))
    through, engine = engines
    for one in engines:
        train(one, 0, BEFORE)
    engine.save_checkpoint(tmp_path)
    kept = copy.deepcopy((engine.state_dict(), engine.optimizer.state_dict()))
    engine.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(KeyboardInterrupt):
        train(engine, BEFORE, 1)
    engine.optimizer.param_groups[0]["lr"] = 0.05
    saves = (engine.save_checkpoint, engine.save_16bit_model, engine.save_fp32_model)
    calls = [lambda: train(engine, BEFORE, 1), *(partial(save, tmp_path) for save in saves)]
    calls += [engine.state_dict, engine.optimizer.state_dict]
    for call in calls if stage else ():  # a load right after it is one too
        with pytest.raises(UsageError, match=r"(?s)has ended an update.*load_checkpoint"):
            call()
    if home != "cpu":
        engine.load_checkpoint(tmp_path)
    else:  # with what a program of plain PyTorch saves
        engine.load_state_dict(kept[0])
        with pytest.raises(UsageError, match="has ended an update"):
            train(engine, BEFORE, 1)
        engine.optimizer.load_state_dict(kept[1])
        engine.load_state_dict(kept[0])  # the buffers, which the refused step's forward has changed
    for one in engines:
        train(one, BEFORE, AFTER)
    expected = figures(through)
    assert all(torch.equal(value, expected[name]) for name, value in figures(engine).items())
