"""The split of a run's model into pipeline stages, and the schedule of each stage."""

from dataclasses import replace

from megazero.activations.assemble import configured_plan
from megazero.config import derived
from megazero.config.engine_sections import ActivationConfig
from megazero.config.run import RunConfig
from megazero.parallel.layer_split import Chunk, balanced_split, chunks_of, cut, model_costs
from megazero.pipeline.passes import most_in_flight
from megazero.pipeline.stage_plan import StagePlan


def pipeline_split(config: RunConfig, padded_vocab_size: int) -> tuple[int, ...]:
    """Return the layers of every chunk, in model order: as given, or balanced with the embedding and the head."""
    given = derived.given_split(config)
    if given is not None:
        return given
    model = config.model
    costs = model_costs(
        hidden=model.hidden_size,
        matrices=derived.block_matrices(model),
        heads_width=model.num_attention_heads * derived.head_width(model),
        seq=model.seq_length,
        padded_vocab=padded_vocab_size,
    )
    num_chunks = config.parallel.pipeline_model_parallel_size * derived.num_virtual_chunks(config)
    return balanced_split(
        model.num_layers,
        num_chunks,
        layer_cost=costs.layer,
        embedding_cost=costs.embedding,
        head_cost=costs.head,
    )


def stage_chunks(config: RunConfig, stage: int, padded_vocab_size: int) -> tuple[Chunk, ...]:
    """Return the chunks of the model that belong to a pipeline stage."""
    chunks = cut(pipeline_split(config, padded_vocab_size))
    return chunks_of(chunks, stage=stage, num_stages=config.parallel.pipeline_model_parallel_size)


def stage_plan(config: RunConfig, stage: int) -> StagePlan:
    """Return the schedule of a pipeline stage."""
    return StagePlan(
        schedule=derived.pipeline_schedule(config),
        num_stages=config.parallel.pipeline_model_parallel_size,
        num_chunks=derived.num_virtual_chunks(config),
        stage=stage,
        retains_gathered=config.zero.zero3_reshard_after == "window",
    )


def activation_config(config: RunConfig) -> ActivationConfig:
    """Return the activation section as it takes effect.

    Only full recomputation has activation checkpoints; with a split sequence they are slices already.
    """
    section = config.activations
    if section.recompute_granularity != "full":
        return ActivationConfig(
            recompute_granularity=section.recompute_granularity, logits_chunk_bytes=section.logits_chunk_bytes
        )
    is_split = config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size > 1
    return replace(section, partition_activations=False) if is_split else section


def num_checkpoints(config: RunConfig, stage: int, padded_vocab_size: int, num_micro_batches: int) -> int:
    """Return the largest number of checkpoints in memory on a stage: those of all micro-batches in flight."""
    plan = configured_plan(config.activations)
    in_flight = most_in_flight(stage_plan(config, stage).step(num_micro_batches).actions)
    chunks = stage_chunks(config, stage, padded_vocab_size)
    return sum(plan.num_checkpoints(len(chunk.layers)) * in_flight[index] for index, chunk in enumerate(chunks))


def describe_stages(config: RunConfig, padded_vocab_size: int) -> list[str]:
    """Return lines that list the chunks of each pipeline stage; none for a single stage."""
    num_stages = config.parallel.pipeline_model_parallel_size
    if num_stages == 1:
        return []
    lines = [
        f"  stage {stage}: " + " and ".join(map(_describe, stage_chunks(config, stage, padded_vocab_size)))
        for stage in range(num_stages)
    ]
    most = _MOST_STAGES_SHOWN
    shown = lines if len(lines) <= most else [*lines[: most - 2], "  ...", lines[-1]]
    return [f"pipeline stages, schedule {derived.pipeline_schedule(config)}", *shown]


_MOST_STAGES_SHOWN = 16


def _describe(chunk: Chunk) -> str:
    """Describe a chunk, such as "embedding, layers 0-5"."""
    first, last = chunk.layers.start, chunk.layers.stop - 1
    layers = [f"layer {first}" if first == last else f"layers {first}-{last}"] if chunk.layers else []
    return ", ".join([*["embedding"] * chunk.is_first, *layers, *["final norm and head"] * chunk.is_last])
