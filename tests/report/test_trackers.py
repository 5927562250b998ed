"""Weights & Biases offline and MLflow in a folder get a run's figures and its configuration; both are read back."""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import each
from support.small_runs import tiny_run, train_run

import megazero
from megazero.config.engine_sections import ReportConfig
from megazero.errors import ConfigError
from megazero.parallel.launch import Launch
from megazero.report.metrics import StepPicture
from megazero.report.trackers import Tolerated, flattened, open_trackers
from megazero.rules.trackers import missing_packages
from megazero.train.start.check import check

STEPS = 3
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4 4"><rect width="2" height="2"/></svg>'


# --- what needs no package --------------------------------------------------------------------------------------------


class Failing:
    """A tracker that fails at one call, and counts all of them."""

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.calls: list[str] = []

    def scalars(self, values: Mapping[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        self._call("scalars")

    def text(self, title: str, text: str, iteration: int) -> None:
        self._call("text")

    def picture(self, picture: StepPicture) -> None:
        self._call("picture")

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.failing:
            raise ConnectionError("the server is gone\nwith details")


@each("failing", ["scalars", "text", "picture", "flush", "close"])
def test_a_tracker_that_fails_is_told_once_and_left_alone(failing: str) -> None:
    told: list[str] = []
    inner = Failing(failing)
    tracker = Tolerated("MLflow", lambda: inner, told.append)
    for _ in range(2):
        tracker.scalars({"loss/train": 1.0}, 1, 8)
        tracker.text("run/layout", "one rank", 0)
        tracker.picture(StepPicture("ledger", 2, SVG))
        tracker.flush()
        tracker.close()
    order = ["scalars", "text", "picture", "flush", "close"]
    assert inner.calls == order[: order.index(failing) + 1]
    assert told == ["MLflow has failed, and gets nothing more: ConnectionError: the server is gone"]


def test_a_tracker_that_cannot_be_opened_is_told_too() -> None:
    def refuse() -> Failing:
        raise PermissionError("not you")

    told: list[str] = []
    Tolerated("Weights & Biases", refuse, told.append).scalars({}, 1)
    assert told == ["Weights & Biases has failed, and gets nothing more: PermissionError: not you"]


def test_a_missing_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megazero.rules.trackers.find_spec", lambda name: None)
    reports = ReportConfig(wandb_project="p", mlflow_experiment="e")
    found = list(missing_packages(reports, lambda name, value: f"{name} is {value}"))
    assert [(problem.given, problem.legal) for problem in found] == [
        ("wandb_project is p", "pip install 'megazero[wandb]'"),
        ("mlflow_experiment is e", "pip install 'megazero[mlflow]'"),
    ]
    assert list(missing_packages(ReportConfig(), lambda name, value: name)) == []


@pytest.mark.parametrize("door", ["run", "library"])
def test_it_is_found_before_processes_meet(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megazero.rules.trackers.find_spec", lambda name: None)
    monkeypatch.setattr("megazero.library.initialize.mesh_and_buffers", lambda *arguments: pytest.fail("ranks meet"))
    with pytest.raises(ConfigError, match="needs the package wandb"):
        if door == "run":
            check(tiny_run(mock_data=True, wandb_project="p"), Launch(0, 1, 0))
        else:
            foreign = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "wandb": {"enabled": True}}
            megazero.initialize(torch.nn.Linear(1, 1), foreign)


def test_without_a_name_no_tracker_is_opened(tmp_path: Path) -> None:
    assert list(open_trackers(ReportConfig(), folder=tmp_path, settings={}, report=print)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_has_dotted_names_and_plain_values() -> None:
    settings = flattened(ReportConfig(wandb_save_dir=Path("w"), wandb_project="p"))
    assert settings["wandb_save_dir"] == "w" and settings["timing_log_level"] == 0
    assert settings["mlflow_experiment"] is None


# --- whole runs -------------------------------------------------------------------------------------------------------


def run(folder: Path, **settings: Any) -> str:
    """Train a small run that evaluates; return what it prints."""
    own = {"train_iters": STEPS, "save": str(folder / "save"), "eval_iters": 1, "log_interval": 2}
    return train_run(0, 1, {**own, "mock_data": True, **settings}).text


def histories(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an offline run's history, and in the end its configuration.

    Its file is a log in blocks of 32 KiB, of records with a header of 7 bytes: checksum, length, and whether it is
    whole (1), or a first, middle or last part (2, 3, 4).
    """

    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("offline-run-*/*.wandb")
    data, place, parts, config = path.read_bytes(), 7, b"", {}
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record, parts = Record(), b""
            record.ParseFromString(data[place - length : place] if kind == 1 else parts)
            if record.WhichOneof("record_type") == "history":
                yield {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
            if record.WhichOneof("record_type") == "run":
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
    yield config


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    told = run(
        tmp_path,
        wandb_project="small",
        wandb_exp_name="first",
        log_params_norm=True,
        log_validation_ppl_to_tensorboard=True,
    )
    assert "has failed" not in told
    *rows, config = histories(tmp_path / "save" / "wandb")
    assert config["optimizer.lr"] == 0.01 and config["reports.wandb_exp_name"] == "first"
    losses = {row["iteration"]: row for row in rows if "loss/train" in row}
    assert list(losses) == [1, 2, 3] and losses[3]["consumed-samples"] == 3 * losses[1]["consumed-samples"]
    assert all(f"{losses[number]['loss/train']:.6E}" in told for number in (1, 3))
    assert [row["iteration"] for row in rows if "loss/validation-perplexity" in row] == [3]
    assert "speed/seconds-per-step" in {name for row in rows for name in row}
    assert [row["iteration"] for row in rows if "optimizer/params-norm" in row] == [1, 2, 3]


def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told to anybody else: telemetry is off before MLflow is imported."""
    if find_spec("mlflow") is None or find_spec("sqlalchemy") is None:
        pytest.skip("mlflow and sqlalchemy are not installed")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "")  # so that what the run sets is taken back
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    told = run(tmp_path, mlflow_experiment="small", mlflow_run_name="first", log_timers_to_tensorboard=True)
    assert "has failed" not in told and os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'save' / 'mlflow' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
    assert found.data.params["optimizer.lr"] == "0.01" and found.data.params["reports.mlflow_run_name"] == "first"
    losses = {point.step: point.value for point in client.get_metric_history(found.info.run_id, "loss/train")}
    assert list(losses) == [1, 2, 3]
    assert f"lm loss: {losses[1]:.6E}" in told
    assert [point.step for point in client.get_metric_history(found.info.run_id, "time/step")] == [2, 3]
    assert (tmp_path / "save" / "mlflow" / "files").is_dir()


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_the_library_tracks_its_steps(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    if package == "wandb":
        own = {"wandb": {"enabled": True, "project": "p", "team": "t", "group": "g"}, "gradient_clipping": 0.0}
        optimizer: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.5}}
    else:
        own, optimizer = {"reports": {"mlflow_experiment": "p"}}, {"type": "SGD", "lr": 0.5}
    model = torch.nn.Linear(1, 1, bias=False)
    engine = megazero.initialize(model, {**own, "optimizer": optimizer, "gradient_accumulation_steps": 2})
    expected = []
    for _ in range(3):
        losses = [model.weight.detach().square().item() * factor for factor in (1.0, 2.0)]
        expected.append(sum(losses) / 2)
        for factor in (1.0, 2.0):
            engine.backward((engine(torch.ones(1, 1)) ** 2).sum() * factor)
            engine.step()
    engine.close()
    if package == "wandb":
        *rows, config = histories(tmp_path / "wandb")
        assert config["reports.wandb_entity"] == "t" and config["reports.wandb_group"] == "g"
        points = [(row["iteration"], row["loss/train"], row["optimizer/learning-rate"]) for row in rows]
    else:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
        (found,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
        history = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
        rates = [point.value for point in history["optimizer/learning-rate"]]
        points = [(p.step, p.value, lr) for p, lr in zip(history["loss/train"], rates, strict=True)]
    assert points == [(number, pytest.approx(loss), 0.5) for number, loss in enumerate(expected, 1)]
