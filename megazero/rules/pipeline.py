"""Rules about pipelines and about splitting activations along the sequence; `rules.check` tries them.

A *chunk* is a run of layers on one pipeline stage.  `advice` yields notices about settings of these kinds that are
legal and do little.
"""

import math
from collections.abc import Callable, Iterator

from megazero.config import derived
from megazero.config.nearest import flags, near_divisors, neighbours
from megazero.config.run import RunConfig
from megazero.config.validate import Unknown
from megazero.errors import Problem
from megazero.units import counted

_STAGES = "--pipeline-model-parallel-size"
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage"


def pipeline_settings_need_a_pipeline(config: RunConfig, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size > 1:
        return
    settings = []
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        settings.append((_VIRTUAL, str(parallel.num_layers_per_virtual_pipeline_stage)))
    if parallel.pipeline_schedule in ("interleaved", "zero-bubble"):
        settings.append(("--pipeline-schedule", parallel.pipeline_schedule))
    if parallel.pipeline_split is not None:
        settings.append(("--pipeline-split", parallel.pipeline_split))
    if settings:
        yield Problem(
            f"{' '.join(f'{flag} {value}' for flag, value in settings)} with {_STAGES} 1",
            "chunks and their order are of a pipeline of at least 2 pipeline stages",
            f"{_STAGES} 2, or leave out {', '.join(flag for flag, _ in settings)}",
        )


def chunks_are_whole(config: RunConfig, world_size: int) -> Iterator[Problem]:
    length, stages = config.parallel.num_layers_per_virtual_pipeline_stage, _stages(config)
    if length is None or stages == 1 or _has_whole_chunks(config):
        return
    layers = config.model.num_layers
    remedies = (
        flags(_VIRTUAL, _lengths(config, length)),
        flags("--num-layers", neighbours(max(layers, 2 * stages * length), stages * length)),
        f"or leave out {_VIRTUAL}",
    )
    yield Problem(
        f"{_VIRTUAL} {length} with --num-layers {layers} {_STAGES} {stages}",
        f"a pipeline stage has a whole number of chunks, at least 2: num_layers is {stages} pipeline stages x 2 or more"
        " chunks x their layers (one chunk a pipeline stage is what there is without the setting)",
        ", ".join(filter(None, remedies)),
    )


def schedule_fits_chunks(config: RunConfig, world_size: int) -> Iterator[Problem]:
    schedule, stages = config.parallel.pipeline_schedule, _stages(config)
    if stages == 1 or not _has_whole_chunks(config):
        return
    chunks = derived.num_virtual_chunks(config)
    if schedule == "interleaved" and chunks == 1:
        lengths = flags(_VIRTUAL, _lengths(config, config.model.num_layers // stages))
        yield Problem(
            f"--pipeline-schedule interleaved without {_VIRTUAL}",
            "pipeline stages take turns when each has several chunks",
            ", ".join(filter(None, (lengths, "--pipeline-schedule 1f1b"))),
        )
    if schedule not in ("auto", "interleaved") and chunks > 1:
        yield Problem(
            f"--pipeline-schedule {schedule} with {_VIRTUAL} {config.parallel.num_layers_per_virtual_pipeline_stage}",
            f"with several chunks a pipeline stage, here {chunks}, the schedule is the interleaved one",
            f"--pipeline-schedule interleaved, or leave out {_VIRTUAL}",
        )


def micro_batches_fill_turns(config: RunConfig, world_size: int) -> Iterator[Problem]:
    stages = turns(config)
    if stages == 1 or world_size % derived.model_parallel_size(config):
        return
    per_micro_step = derived.samples_per_micro_step(config, world_size)
    batch = derived.global_batch_size(config, world_size)
    if batch % per_micro_step == 0 and batch % (per_micro_step * stages):
        count = counted(batch // per_micro_step, "micro-batch")
        yield Problem(
            f"--global-batch-size {batch}, which is {count}, with {_STAGES} {stages}",
            f"the interleaved schedule takes micro-batches in turns of {stages}: their number is a multiple of the"
            " pipeline size",
            flags("--global-batch-size", neighbours(batch, per_micro_step * stages)),
        )


def turns(config: RunConfig) -> int:
    """Return the number of micro-batches in a turn of the requested schedule: its stages if interleaved, else 1.

    A length of chunks requests it, too, even an illegal one, since legal values near it would.
    """
    parallel = config.parallel
    asked = parallel.num_layers_per_virtual_pipeline_stage is not None or parallel.pipeline_schedule == "interleaved"
    return parallel.pipeline_model_parallel_size if asked else 1


def known(read: Callable[[], int | None], otherwise: int | None) -> int | None:
    """Return the result of `read`, or `otherwise` if it reads an invalid setting."""
    try:
        return read()
    except Unknown:
        return otherwise


def inner_stages_have_layers(config: RunConfig, world_size: int) -> Iterator[Problem]:
    layers, stages, tensor = config.model.num_layers, _stages(config), config.parallel.tensor_model_parallel_size
    if layers < stages - 2:
        fitting = [size for size in range(1, layers + 3) if world_size % (size * tensor) == 0]
        fills_job, more_layers = world_size % (stages * tensor) == 0, f"--num-layers {stages - 2}"
        yield Problem(
            f"{_STAGES} {stages} --num-layers {layers}",
            "every pipeline stage has a layer; only the first, with the embedding, and the last, with the head, may"
            " have none",
            ", ".join([f"{_STAGES} {size}" for size in fitting[-1:]] + [more_layers] * (fills_job or not fitting)),
        )


def split_has_all_layers(config: RunConfig, world_size: int) -> Iterator[Problem]:
    text, layers, stages = config.parallel.pipeline_split, config.model.num_layers, _stages(config)
    if text is None or stages == 1 or not _has_whole_chunks(config) or layers < stages - 2:
        return
    words = [word.strip() for word in text.split(",")]
    split = [int(word) for word in words if word.isdecimal()]
    count = stages * derived.num_virtual_chunks(config)
    if len(split) == len(words) == count and sum(split) == layers and all(split[1:-1]):
        return
    found = f" ({counted(len(split), 'chunk')}, {counted(sum(split), 'layer')})" if len(split) == len(words) else ""
    yield Problem(
        f"--pipeline-split {text}{found}",
        f"a split is {count} whole numbers with commas between them, one for every chunk, which add up to"
        f" {counted(layers, 'layer')}; only the first and the last may be 0",
        f"--pipeline-split {_even(layers, count)}, or leave out --pipeline-split",
    )


def _even(layers: int, count: int) -> str:
    """Return the most even split of layers into `count` chunks; if layers are too few, the outer chunks have none."""
    if layers < count:
        return ",".join(["1" if layers == count - 1 else "0", *["1"] * (count - 2), "0"])
    return ",".join(str(layers // count + (chunk < layers % count)) for chunk in range(count))


def sequence_is_split_evenly(config: RunConfig, world_size: int) -> Iterator[Problem]:
    tensor, micro = config.parallel.tensor_model_parallel_size, config.training.micro_batch_size
    length = config.model.seq_length
    if config.parallel.sequence_parallel and micro * length % tensor:
        yield Problem(
            f"--sequence-parallel with --tensor-model-parallel-size {tensor}, --micro-batch-size {micro} and"
            f" --seq-length {length}",
            f"the {micro} x {length} tokens of a micro-batch are split evenly: tensor_model_parallel_size divides"
            " their number",
            ", ".join(_even_sizes(config, world_size)),
        )


def _even_sizes(config: RunConfig, world_size: int) -> list[str]:
    """Return flags with sizes that split evenly: those that also fit the batch and the positions, if there are any."""
    tensor, micro = config.parallel.tensor_model_parallel_size, config.training.micro_batch_size
    length, rows = config.model.seq_length, known(lambda: config.model.max_position_embeddings, None)
    step = tensor // math.gcd(tensor, length)
    lengths = neighbours(length, tensor // math.gcd(tensor, micro))
    micros = neighbours(micro, step)
    per_copy = known(lambda: _samples_per_turn(config, world_size), None)
    fitting = micros if per_copy is None else near_divisors(per_copy, micro, multiple_of=step)
    covered = [size for size in lengths if rows is None or size <= rows]
    both = [("--micro-batch-size", fitting), ("--seq-length", covered)]
    if not any(sizes for _, sizes in both):
        both = [("--micro-batch-size", micros), ("--seq-length", lengths)]
    return [flags(flag, sizes) for flag, sizes in both if sizes]


def _samples_per_turn(config: RunConfig, world_size: int) -> int | None:
    """Return the number that the size of a micro-batch must divide: the samples per turn on one copy of the model.

    None if the global batch size is not given, or does not fit the job.
    """
    batch, processes = config.training.global_batch_size, derived.model_parallel_size(config)
    if batch is None or world_size % processes:
        return None
    samples, rest = divmod(batch, derived.data_parallel_size(config, world_size) * turns(config))
    return None if rest else samples


def advice(config: RunConfig) -> Iterator[str]:
    """Yield notices about settings that do little, one line each."""
    if config.activations.recompute_granularity == "full" and derived.pipeline_schedule(config) == "zero-bubble":
        yield (
            "--pipeline-schedule zero-bubble with --recompute-granularity full: later pipeline stages keep what weight"
            " gradients are made from until their turn comes, so recomputation saves little there"
        )


def _stages(config: RunConfig) -> int:
    return config.parallel.pipeline_model_parallel_size


def _has_whole_chunks(config: RunConfig) -> bool:
    """Return True if the layers of a chunk, if given, make at least two chunks per stage and leave no remainder."""
    length, layers = config.parallel.num_layers_per_virtual_pipeline_stage, config.model.num_layers
    return length is None or (layers % (_stages(config) * length) == 0 and layers > _stages(config) * length)


def _lengths(config: RunConfig, length: int) -> list[int]:
    """Return numbers of layers per chunk near `length` with which every pipeline stage has two chunks or more."""
    whole, rest = divmod(config.model.num_layers, _stages(config))
    return [] if rest else [near for near in near_divisors(whole, min(length, whole - 1)) if near < whole]


RULES = (
    pipeline_settings_need_a_pipeline,
    chunks_are_whole,
    schedule_fits_chunks,
    micro_batches_fill_turns,
    inner_stages_have_layers,
    split_has_all_layers,
    sequence_is_split_evenly,
)
