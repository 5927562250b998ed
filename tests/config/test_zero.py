"""Tests of the settings of ZeRO: stages, defaults, aliases and ranges."""

import sys

import pytest
from pydantic import ValidationError
from support.each import each

from megazero.config.engine_sections import ZeroConfig
from megazero.config.fields import describe


def test_stages_0_to_3_are_legal() -> None:
    assert [ZeroConfig(zero_stage=stage).zero_stage for stage in range(4)] == [0, 1, 2, 3]


def test_defaults_are_megazeros_own() -> None:
    zero = ZeroConfig()
    assert (zero.zero_stage, zero.reduce_bucket_size, zero.allgather_bucket_size) == (1, None, None)
    assert (zero.param_persistence_threshold, zero.max_reuse_distance) == (0, 0)
    assert (zero.prefetch_bucket_size, zero.max_live_parameters) == (None, 10**9)
    assert zero.model_persistence_threshold == sys.maxsize and zero.sub_group_size == 10**9
    assert (zero.communication_data_type, zero.gradient_predivide_factor) == ("auto", 1.0)
    off = {"prescale_gradients", "enable_sanity_checks", "delayed_parameter_update", "offload_gradients_nvme"}
    off |= {"hierarchical_collectives", "mics_hierarchical_params_gather", "zero_quantized_weights"}
    off |= {
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "zero_quantized_stochastic",
        "zero_error_feedback",
    }
    switches = {info.name: info.default for info in describe("zero", ZeroConfig) if info.kind in ("bool", "switch")}
    assert {name for name, value in switches.items() if not value} == off and len(switches) == 23


def test_stage_3s_settings_have_deepspeeds_other_name_too() -> None:
    aliased = {
        info.name for info in describe("zero", ZeroConfig) if f"stage3-{info.name.replace('_', '-')}" in info.aliases
    }
    assert aliased == {
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
    }


@each(
    ("name", "value"),
    [
        ("zero_stage", 4),
        ("zero_stage", -1),
        ("reduce_bucket_size", -1),
        ("sub_group_size", -1),
        ("gradient_predivide_factor", 0),
        ("communication_data_type", "int8"),
    ],
)
def test_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        ZeroConfig(**{name: value})
