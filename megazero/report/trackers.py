"""Trackers of experiments, which get a training's figures by name: TensorBoard, Weights & Biases, MLflow.

A tracker exists on rank 0 only, and never communicates with another rank or the device.  Weights & Biases and MLflow
are optional packages.  What either does beyond this machine is its own matter, by its variables of the environment
(`WANDB_MODE=offline` writes a folder alone); MLflow writes to a database in a folder unless it is given a server, and
its telemetry is off unless MLFLOW_DISABLE_TELEMETRY is false.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from megazero.config.engine_sections import ReportConfig
from megazero.errors import ConfigError, Problem, first_line
from megazero.report.metrics import StepPicture
from megazero.report.pictures.raster import to_pixels

# MLflow takes so many parameters or metrics at once, and texts of so many characters.
_MLFLOW_BATCH = 100
_MLFLOW_CHARACTERS = 500


class Tracker(Protocol):
    """A destination for figures by name."""

    def scalars(self, values: Mapping[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        """Write figures after so many steps; consumed_samples: None for those that have no axis of samples."""

    def text(self, title: str, text: str, iteration: int) -> None:
        """Write a text, Markdown."""

    def picture(self, picture: StepPicture) -> None:
        """Write the picture of a step."""

    def flush(self) -> None:
        """Write what is held back."""

    def close(self) -> None:
        """Write everything that is held back, and close; a second call does nothing."""


class TensorBoard:
    """TensorBoard's event files in a folder.  Raises ConfigError if the package is missing or the files can't be."""

    def __init__(self, folder: Path, *, queue_size: int) -> None:
        """queue_size: the points that are held back."""
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            rule = "writing for TensorBoard needs the package tensorboard"
            raise ConfigError(Problem(f"--tensorboard-dir {folder}", rule, "pip install tensorboard")) from error
        try:
            self._events = SummaryWriter(str(folder), max_queue=queue_size)
        except OSError as error:
            given = f"--tensorboard-dir {folder}: {error.strerror or error}"
            raise ConfigError(Problem(given, "TensorBoard's files can be written", "another path")) from error

    def scalars(self, values: Mapping[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        for tag, value in values.items():
            self._events.add_scalar(tag, value, iteration)
            if consumed_samples is not None:
                self._events.add_scalar(f"vs-samples/{tag}", value, consumed_samples)

    def text(self, title: str, text: str, iteration: int) -> None:
        self._events.add_text(title, text, iteration)

    def picture(self, picture: StepPicture) -> None:
        self._events.add_image(
            f"pictures/{picture.title}", to_pixels(picture.svg), picture.iteration, dataformats="HWC"
        )

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases:
    """A run of Weights & Biases; every row of its history has the columns "iteration" and "consumed-samples"."""

    def __init__(self, config: ReportConfig, folder: Path, settings: Mapping[str, Any]) -> None:
        """folder: for its files, in wandb/ below it.  settings: the configuration, which it shows beside the run."""
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._html = wandb.Html
        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            group=config.wandb_group,
            dir=str(folder.resolve()),
            config=dict(settings),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="iteration")

    def scalars(self, values: Mapping[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        axes = {"iteration": iteration} | ({} if consumed_samples is None else {"consumed-samples": consumed_samples})
        self._run.log({**axes, **values})

    def text(self, title: str, text: str, iteration: int) -> None:
        self._run.log({"iteration": iteration, title: text})

    def picture(self, picture: StepPicture) -> None:
        self._run.log({"iteration": picture.iteration, f"pictures/{picture.title}": self._html(picture.svg)})

    def flush(self) -> None:
        """Do nothing: a process of its own writes."""

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of an experiment in MLflow."""

    def __init__(self, config: ReportConfig, folder: Path, settings: Mapping[str, Any]) -> None:
        """folder: for the database and files, where no server is given.  settings: become the run's parameters."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before its import, which would begin to call home
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        uri, files = config.mlflow_tracking_uri, None
        if uri is None:
            folder.mkdir(parents=True, exist_ok=True)
            uri, files = f"sqlite:///{folder.resolve() / 'mlflow.db'}", (folder.resolve() / "files").as_uri()
        self._metric = Metric
        self._client: Any = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(config.mlflow_experiment)
        number = (
            self._client.create_experiment(config.mlflow_experiment, artifact_location=files)
            if experiment is None
            else experiment.experiment_id
        )
        self._run = self._client.create_run(number, run_name=config.mlflow_run_name).info.run_id
        self._is_open = True
        params = [Param(name, str(value)[:_MLFLOW_CHARACTERS]) for name, value in settings.items()]
        for start in range(0, len(params), _MLFLOW_BATCH):
            self._client.log_batch(self._run, params=params[start : start + _MLFLOW_BATCH])

    def scalars(self, values: Mapping[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(tag, value, now, iteration) for tag, value in values.items()]
        if consumed_samples is not None:
            metrics.append(self._metric("consumed-samples", consumed_samples, now, iteration))
        for start in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MLFLOW_BATCH])

    def text(self, title: str, text: str, iteration: int) -> None:
        self._client.log_text(self._run, text, f"{title}/iteration-{iteration}.md")

    def picture(self, picture: StepPicture) -> None:
        self._client.log_text(self._run, picture.svg, f"pictures/{picture.title}-{picture.iteration}.svg")

    def flush(self) -> None:
        """Do nothing: each figure is sent as it comes."""

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._client.set_terminated(self._run)


class Tolerated:
    """A tracker whose failure ends no training: its first failure is printed, and nothing more is written to it."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], report: Callable[[str], None]) -> None:
        """report: prints a line.  A tracker that cannot be opened has failed already."""
        self._name = name
        self._report = report
        self._tracker: Tracker | None = None
        try:
            self._tracker = open_tracker()
        except Exception as error:
            self._fail(error)

    def scalars(self, values: Mapping[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        self._try(lambda tracker: tracker.scalars(values, iteration, consumed_samples))

    def text(self, title: str, text: str, iteration: int) -> None:
        self._try(lambda tracker: tracker.text(title, text, iteration))

    def picture(self, picture: StepPicture) -> None:
        self._try(lambda tracker: tracker.picture(picture))

    def flush(self) -> None:
        self._try(lambda tracker: tracker.flush())

    def close(self) -> None:
        self._try(lambda tracker: tracker.close())

    def _try(self, write: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            write(self._tracker)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._tracker = None
        self._report(f"{self._name} has failed, and gets nothing more: {first_line(error)}")


def open_trackers(
    config: ReportConfig, *, folder: Path | None, settings: Mapping[str, Any], report: Callable[[str], None]
) -> Sequence[Tracker]:
    """Return the trackers that the configuration names, besides TensorBoard.

    folder: of the training's files, below which theirs lie; None: below the present one.
    settings: the configuration by name.  report: prints a line.
    """
    trackers: list[Tracker] = []
    if config.wandb_project is not None:
        place = config.wandb_save_dir or (Path() if folder is None else folder)
        trackers.append(Tolerated("Weights & Biases", lambda: WeightsAndBiases(config, place, settings), report))
    if config.mlflow_experiment is not None:
        store = (folder or Path()) / "mlflow"
        trackers.append(Tolerated("MLflow", lambda: Mlflow(config, store, settings), report))
    return trackers


def flattened(config: Any) -> dict[str, Any]:
    """Return a configuration's settings by dotted name, as values that JSON can represent."""
    assert is_dataclass(config) and not isinstance(config, type), "a configuration is a dataclass"
    return dict(_items("", asdict(config)))


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _items(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        yield name, [dict(_items("", each)).get("", str(each)) for each in value]
    elif value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        yield name, value
    else:
        yield name, str(value)
