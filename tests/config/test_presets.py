"""Tests of the presets: models have the sizes in their names, and C1 to C5 are the ZeRO paper's configurations."""

import re
from dataclasses import replace

import pytest
import torch
from support.each import each

from megazero.comm.local import LocalCommunicator
from megazero.config import derived
from megazero.config.model import ModelConfig
from megazero.config.presets import PRESETS, ZERO_CONFIGS
from megazero.config.run import FIELDS
from megazero.model.gpt import GPT
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions


def parameters(row: dict[str, int]) -> int:
    """Return GPT-2's number of parameters, counted from the published architecture (tied head, biases everywhere)."""
    h, layers = row["hidden_size"], row["num_layers"]
    attention = h * 3 * h + 3 * h + h * h + h
    feed_forward = h * 4 * h + 4 * h + 4 * h * h + h
    norms = 2 * (2 * h)
    embeddings = (row["vocab_size"] + row["max_position_embeddings"]) * h
    return layers * (attention + feed_forward + norms) + embeddings + 2 * h


# Layers, width, heads and parameters of each model.
MODELS = {
    "gpt2-124m": (12, 768, 12, 124_439_808),
    "gpt2-355m": (24, 1024, 16, 354_823_168),
    "gpt2-774m": (36, 1280, 20, 774_030_080),
    "gpt2-1.5b": (48, 1600, 25, 1_557_611_200),
    "gpt3-125m": (12, 768, 12, 125_226_240),
    "gpt3-350m": (24, 1024, 16, 355_871_744),
    "gpt3-760m": (24, 1536, 16, 760_300_032),
    "gpt3-1.3b": (24, 2048, 16, 1_315_723_264),
    "gpt3-2.7b": (32, 2560, 32, 2_651_553_280),
    "gpt3-6.7b": (32, 4096, 32, 6_658_404_352),
    "gpt3-13b": (40, 5120, 40, 12_853_386_240),
    "gpt3-175b": (96, 12288, 96, 174_604_259_328),
    "zero-1.5b": (48, 1600, 16, 1_557_611_200),
    "zero-8b": (72, 3072, 24, 8_314_143_744),
    "zero-20b": (98, 4096, 32, 19_945_279_488),
    "zero-40b": (88, 6144, 32, 40_184_776_704),
    "zero-40b-wide": (50, 8192, 32, 40_690_753_536),
    "zero-60b": (132, 6144, 32, 60_119_623_680),
    "zero-60b-wide": (75, 8192, 32, 60_826_075_136),
    "zero-80b": (100, 8192, 64, 80_961_396_736),
    "zero-100b": (125, 8192, 64, 101_096_718_336),
    "zero-120b": (150, 8192, 64, 121_232_039_936),
    "zero-140b": (175, 8192, 64, 141_367_361_536),
    "zero-150b": (187, 8192, 64, 151_032_315_904),
    "zero-170b": (212, 8192, 64, 171_167_637_504),
    "zero-dp-1.5b": (34, 1920, 16, 1_603_363_200),
    "zero-dp-2.5b": (54, 1920, 16, 2_488_598_400),
    "zero-dp-4b": (64, 2304, 24, 4_196_936_448),
    "zero-dp-6b": (52, 3072, 24, 6_048_420_864),
    "zero-dp-8b": (72, 3072, 24, 8_314_143_744),
    "zero-dp-10b": (50, 4096, 32, 10_279_047_168),
    "zero-dp-11b": (54, 4096, 32, 11_084_566_528),
    "zero-dp-12b": (58, 4096, 32, 11_890_085_888),
    "zero-dp-13b": (62, 4096, 32, 12_695_605_248),
    "megatron-8.3b": (72, 3072, 32, 8_314_143_744),
    "turing-nlg-17b": (78, 4256, 28, 17_176_845_728),
}


# Parameters as published: with all matrices, norms and biases, and both ends.
KIN = {
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "bloom-560m": 559_214_592,
    "bloom-176b": 176_247_271_424,
}


def test_every_preset_is_checked() -> None:
    assert PRESETS.keys() == MODELS.keys() | KIN.keys() and not MODELS.keys() & KIN.keys()


@each("name", KIN)
def test_llama_and_its_kin_have_as_many_parameters_as_published(name: str) -> None:
    model = ModelConfig(**dict(PRESETS[name]))
    assert model.vocab_size is not None
    assert derived.num_parameters(model, model.vocab_size) == built(model) == KIN[name]


@each("name", MODELS)
def test_a_preset_has_the_published_shape_and_as_many_parameters_as_are_built(name: str) -> None:
    row = dict(PRESETS[name])
    layers, hidden, heads, expected = MODELS[name]
    assert (row["num_layers"], row["hidden_size"], row["num_attention_heads"]) == (layers, hidden, heads)
    assert row["seq_length"] == row["max_position_embeddings"] == (2048 if name.startswith("gpt3") else 1024)
    assert hidden % heads == 0 and row["vocab_size"] == 50_257
    model = ModelConfig(**row)
    assert parameters(row) == derived.num_parameters(model, row["vocab_size"]) == built(model) == expected
    ((number, unit),) = re.findall(r"-([\d.]+)([mb])", name)
    assert expected / (1e6 if unit == "m" else 1e9) == pytest.approx(float(number), rel=0.07)  # names are rounded


def built(model: ModelConfig) -> int:
    """Return the number of parameters of the model that a run builds, on the meta device.

    Of a model with many layers one and two of them are built, since each layer has as many as any other.
    """
    if model.num_layers > 12:
        first, second = (built(replace(model, num_layers=number)) for number in (1, 2))
        return first + (model.num_layers - 1) * (second - first)
    meta, size = torch.device("meta"), model.vocab_size
    assert size is not None, "every preset has a vocabulary"
    tp = TensorParallel(LocalCommunicator(), RandomRegions(0, 0, torch.device("cpu")), torch.float32, meta)
    gpt = GPT(model, vocab_size=size, tp=tp, padded_vocab_size=size)
    return sum(parameter.numel() for parameter in gpt.parameters())


@pytest.mark.parametrize("more", [{"untie_embeddings_and_output_weights": True}, {"ffn_hidden_size": 20}])
def test_parameters_of_other_models_are_counted(more: dict[str, int]) -> None:
    shape = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "vocab_size": 10}
    model = ModelConfig(**shape, **more)
    assert derived.num_parameters(model, 10) == built(model)


def test_rows_name_settings_of_the_model() -> None:
    names = {info.name for info in FIELDS if info.section == "model"}
    assert all(set(row) <= names for row in PRESETS.values())


# ZeRO, table 3: the states that are partitioned beside the optimizer's, and the memory in which checkpoints lie.
@each(
    ("name", "gradients", "activations", "in_cpu"),
    [
        ("C1", False, False, False),
        ("C2", False, True, False),
        ("C3", True, False, False),
        ("C4", True, True, False),
        ("C5", True, True, True),
    ],
)
def test_the_papers_configurations(name: str, gradients: bool, activations: bool, in_cpu: bool) -> None:
    row = dict(ZERO_CONFIGS[name])
    assert row == {
        "zero_stage": 2 if gradients else 1,
        "recompute_granularity": "full",
        "contiguous_checkpointing": True,
        "contiguous_gradients": True,
        "partition_activations": activations,
        "checkpoint_in_cpu": in_cpu,
    }
    assert set(row) <= {info.name for info in FIELDS if info.section in ("zero", "activations")}
