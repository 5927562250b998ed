"""The deterministic mode sets what libraries need, refuses what forbids it, and changes nothing on a CPU."""

import os
from collections.abc import Iterator

import pytest
import torch
from support.small_runs import tiny_run

from megazero.comm.gpu_environment import DETERMINISTIC, deterministic_variables
from megazero.errors import ConfigError
from megazero.train.determinism import use_deterministic_mode

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the variables for the test, and restore them and torch's settings afterwards."""
    for name in DETERMINISTIC:
        monkeypatch.setenv(name, "")  # so that it is restored even if it was unset
        monkeypatch.delenv(name)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def test_what_the_user_has_set_stays_if_it_is_deterministic() -> None:
    assert deterministic_variables({}) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}
    assert deterministic_variables({"NCCL_ALGO": "Ring", "HOME": "/"}) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert deterministic_variables({"NCCL_ALGO": "Tree", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}) == {}


@pytest.mark.parametrize("name", ["CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"])
def test_what_forbids_it_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deterministic_variables({name: "NVLS"})
    (problem,) = caught.value.problems
    assert problem.given == f"{name}=NVLS" and all(value in problem.rule for value in DETERMINISTIC[name])
    assert problem.legal == f"{name}={DETERMINISTIC[name][0]}, or leave it unset"


def test_on_a_gpu_torch_and_its_libraries_are_set_and_the_price_is_told() -> None:
    (line,) = use_deterministic_mode(tiny_run(deterministic_mode=True), GPU)
    assert line.startswith("--deterministic-mode: resuming is bitwise") and "slower" in line
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert [os.environ[name] for name in DETERMINISTIC] == [":4096:8", "^NVLS"]


def test_a_cpu_needs_nothing() -> None:
    assert list(use_deterministic_mode(tiny_run(), GPU)) == []
    (line,) = use_deterministic_mode(tiny_run(deterministic_mode=True), CPU)
    assert list(use_deterministic_mode(tiny_run(deterministic_mode=True, device="cpu"), CPU)) == [], "said already"
    assert "moot here" in line and not torch.are_deterministic_algorithms_enabled()
    assert not any(name in os.environ for name in DETERMINISTIC)
