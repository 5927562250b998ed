"""Tests of the files for Kubernetes and SkyPilot: their commands are runs, and the projects' own models accept them."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.source_tree import ROOT

from megazero.command_line.parse import parse
from megazero.command_line.processes import split_processes

FOLDER = ROOT / "scripts" / "launch"
RUNTIME, JOB = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
SKY: dict[str, Any] = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())


def check_run(words: list[str], *, nodes: int, processes: int) -> None:
    """Assert that the words are a valid run on this many nodes, which saves where it resumes."""
    own = split_processes(words)
    assert own.number == processes
    config = parse(own.rest, world_size=nodes * processes).config
    assert config.checkpoint.save is not None and config.checkpoint.save == config.checkpoint.load


def test_the_job_of_kubernetes_is_a_run() -> None:
    trainer = JOB["spec"]["trainer"]
    assert trainer["command"] == ["megazero", "pretrain"]
    processes = int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"])
    assert trainer["numProcPerNode"] == processes
    check_run(trainer["args"], nodes=trainer["numNodes"], processes=processes)


def test_the_runtime_of_kubernetes_is_the_one_that_the_job_names() -> None:
    reference = JOB["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (RUNTIME["kind"], RUNTIME["metadata"]["name"])
    (job,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    paths = [word for word in JOB["spec"]["trainer"]["args"] if "=/" in word]
    assert len(paths) == 4 and all(f"={mounted['shared']}/" in word for word in paths)


def test_kubeflows_models_accept_both() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    for document, name in ((RUNTIME, "TrainingRuntime"), (JOB, "TrainJob")):
        assert document["kind"] == name
        found = getattr(models, f"TrainerV1alpha1{name}").from_dict(document)
        kept = found.to_dict()
        assert differing(document, kept) == [], "fields that the model does not have"


def differing(given: Any, kept: Any, path: str = "") -> list[str]:
    """Return the paths of what was given and not kept."""
    if isinstance(given, dict):
        lost = [f"{path}/{name}" for name in given if not isinstance(kept, dict) or name not in kept]
        return lost + [
            one
            for name in given
            if f"{path}/{name}" not in lost
            for one in differing(given[name], kept[name], f"{path}/{name}")
        ]
    if isinstance(given, list):
        return [one for n, item in enumerate(given) for one in differing(item, kept[n], f"{path}/{n}")]
    return [] if str(given) == str(kept) else [path]


def test_the_task_of_skypilot_is_a_run() -> None:
    count = SKY["resources"]["accelerators"].partition(":")[2]
    variables = {"$SKYPILOT_NUM_GPUS_PER_NODE": count, "$RUN": SKY["envs"]["RUN"]}
    text = SKY["run"]
    for name, value in variables.items():
        text = text.replace(name, value)
    words = shlex.split(text.replace("\\\n", " "))
    assert words[:2] == [".venv/bin/megazero", "pretrain"]
    check_run(words[2:], nodes=SKY["num_nodes"], processes=int(count))
    (shared,) = SKY["file_mounts"]
    assert SKY["envs"]["RUN"].startswith(f"{shared}/")


def test_skypilot_accepts_the_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(SKY, schemas.get_task_schema())
    jsonschema.validate(SKY["resources"], schemas.get_resources_schema())
    (place,) = SKY["file_mounts"].values()
    jsonschema.validate(place, schemas.get_storage_schema())
