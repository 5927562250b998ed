"""Describes in a few lines what a configuration makes of a run, before processes have met or torch is loaded."""

from collections.abc import Iterator
from pathlib import Path

from megazero.config import derived
from megazero.config.corpora import train_words
from megazero.config.model import ModelConfig
from megazero.config.run import RunConfig
from megazero.data.samples import SampleSource
from megazero.train.start.inputs import RunInputs
from megazero.units import counted, format_count


def outline_sizes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield lines about the layout, the batch and the length, for a configuration that breaks no rule."""
    parallel, precision = config.parallel, config.precision.precision
    copies = derived.data_parallel_size(config, world_size)
    stages, slices = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    schedule = f", {derived.pipeline_schedule(config)}" if stages > 1 else ""
    yield (
        f"layout: pipeline {stages} x data {copies} x tensor {slices} = {counted(world_size, 'process')}{schedule};"
        f" ZeRO stage {config.zero.zero_stage}; {precision}"
    )
    micro, count = config.training.micro_batch_size, derived.num_micro_batches(config, world_size)
    run = derived.run_length(config, world_size)
    samples, length = run.sizes.largest, config.model.seq_length
    yield (
        f"a step: {counted(samples, 'sample')} = {micro} x {counted(count, 'micro-batch')} x {copies} data-parallel;"
        f" {samples * length:,} tokens"
    )
    if len(run.sizes.sizes) > 1:
        yield f"global batch size: {run.sizes}"
    samples = run.sizes.samples_after(run.steps)
    tokens = samples * length if run.rows is None else run.rows.tokens_after(run.steps, run.sizes)
    if run.rows is not None:
        yield f"curriculum: rows of {run.rows} tokens"
    untrained = sum(map(len, derived.untrained_steps(config)))
    trained = f"; {counted(untrained, 'step')} of them without training" if untrained else ""
    yield f"length: {counted(run.steps, 'step')}, {samples:,} samples, {format_count(tokens)} tokens{trained}"


def outline(config: RunConfig, world_size: int, inputs: RunInputs, *, source: Path | None) -> Iterator[str]:
    """Yield lines about the whole run, whose configuration and files have passed `check`.

    source: the checkpoint that it starts from, None for initial weights.
    """
    yield from outline_sizes(config, world_size)
    model = config.model
    padded = derived.vocab_rows(config, inputs.vocab_size)
    count = derived.num_parameters(model, inputs.vocab_size)
    yield (
        f"model: {counted(model.num_layers, 'layer')} of width {model.hidden_size},"
        f" {counted(model.num_attention_heads, 'head')}{_kind(model)}; {count:,} parameters ({format_count(count)});"
        f"{_trained(model)} vocabulary"
        f" {inputs.vocab_size}, padded to {padded}"
    )
    data = config.data
    paths = "made-up tokens" if data.mock_data else " ".join(train_words(data)[1:])
    if isinstance(inputs.train, SampleSource):
        run = derived.run_length(config, world_size)
        passes = run.sizes.samples_after(run.steps) / inputs.train.samples_per_epoch
        paths += f", {inputs.train.num_tokens:,} tokens for training, read {passes:.3g} times"
    yield f"data: {paths}{', loss on answers only' * bool(inputs.masked)}"
    groups = [f"{held_out.split} {held_out.group}" for held_out in inputs.held_out.values() if held_out.group]
    if groups:
        yield f"evaluated by themselves: {', '.join(groups)}"
    yield from inputs.notices
    start = "initial weights" if source is None else f"{source}{', its parameters alone' * config.checkpoint.finetune}"
    saved = "nothing is saved" if config.checkpoint.save is None else f"saves to {config.checkpoint.save}"
    yield f"start: from {start}; {saved}"


def _trained(model: ModelConfig) -> str:
    """Return how many parameters are trained, where it is not all."""
    if not model.lora_rank:
        return ""
    count = derived.num_adapter_parameters(model)
    return f" {count:,} of them in adapters of rank {model.lora_rank}, which alone are trained;"


def _kind(model: ModelConfig) -> str:
    """Return what the model has that GPT-2 has not, each after a comma."""
    groups = derived.num_key_value_heads(model)
    found = {
        f"keys and values of {groups}": groups != model.num_attention_heads,
        model.normalization: model.normalization != "LayerNorm",
        model.position_embedding_type: model.position_embedding_type in ("rope", "alibi"),
        "no positions": model.position_embedding_type == "none",
        "SwiGLU": model.swiglu,
        "squared ReLU": model.squared_relu,
        "no biases": model.disable_bias_linear,
    }
    return "".join(f", {words}" for words, is_there in found.items() if is_there)
