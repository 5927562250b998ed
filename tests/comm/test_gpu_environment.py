"""Tests of the environment variables that a process with a GPU sets: all defaults, and nothing over the user's."""

import pytest

from megazero.comm.gpu_environment import defaults_line, missing_defaults

ALL = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "12",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


def test_all_defaults() -> None:
    assert missing_defaults({}, cores=12) == ALL
    assert missing_defaults({}, cores=96)["TORCHINDUCTOR_COMPILE_THREADS"] == "32"


@pytest.mark.parametrize("name", ALL)
def test_what_the_user_has_set_stands(name: str) -> None:
    assert missing_defaults({name: ""}, cores=12) == {key: value for key, value in ALL.items() if key != name}


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_the_allocators_older_names_count_as_the_users_choice(name: str) -> None:
    assert "PYTORCH_ALLOC_CONF" not in missing_defaults({name: "backend:native"}, cores=12)


def test_they_are_one_line() -> None:
    assert defaults_line({"A": "1", "B": "x"}) == "environment: A=1 B=x"
    assert missing_defaults(ALL, cores=3) == {}
