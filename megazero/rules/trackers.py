"""Rules about trackers of experiments, whose packages are optional; the same for a run and the library."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from megazero.config.engine_sections import ReportConfig
from megazero.errors import Problem


def missing_packages(reports: ReportConfig, spell: Callable[[str, object], str]) -> Iterator[Problem]:
    """Yield a problem for each tracker that is named and whose package is not installed; nothing is imported.

    spell: returns the user's text for a setting and its value.
    """
    for setting, package, title in (
        ("wandb_project", "wandb", "Weights & Biases"),
        ("mlflow_experiment", "mlflow", "MLflow"),
    ):
        name = getattr(reports, setting)
        if name is not None and find_spec(package) is None:
            rule = f"writing to {title} needs the package {package}"
            yield Problem(spell(setting, name), rule, f"pip install 'megazero[{package}]'")
