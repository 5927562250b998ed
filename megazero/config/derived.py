"""Computes figures that follow from the configuration and the world size, with pure functions.

The functions require that `rules.check` found no problem.  `world_size` is the number of processes of the job.
"""

from pathlib import Path
from typing import Literal

from megazero.config.engine_sections import LimitConfig
from megazero.config.model import ModelConfig
from megazero.config.run import RunConfig

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


def ffn_hidden_size(model: ModelConfig) -> int:
    """Return the inner width of the feed-forward layer, in elements."""
    return 4 * model.hidden_size if model.ffn_hidden_size is None else model.ffn_hidden_size


def max_position_embeddings(model: ModelConfig) -> int:
    """Return the number of rows of the position table."""
    return model.seq_length if model.max_position_embeddings is None else model.max_position_embeddings


def padded_vocab_size(vocab_size: int, *, divisible_by: int, tensor_parallel_size: int) -> int:
    """Return the rows of the embedding over all tensor-parallel ranks: the next multiple of divisible_by x degree."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def num_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters of the whole model, without the padding of the vocabulary.

    vocab_size: ids before padding.
    """
    hidden, inner = model.hidden_size, ffn_hidden_size(model)
    attention = 4 * hidden * hidden + 4 * hidden
    feed_forward = 2 * hidden * inner + inner + hidden
    norms = 2 * hidden
    tables = vocab_size * (2 if model.untie_embeddings_and_output_weights else 1) + max_position_embeddings(model)
    return model.num_layers * (attention + feed_forward + 2 * norms) + tables * hidden + norms


def model_parallel_size(config: RunConfig) -> int:
    """Return the number of processes that together hold one copy of the model."""
    return config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size


def num_virtual_chunks(config: RunConfig) -> int:
    """Return the number of chunks of layers on every pipeline stage."""
    length = config.parallel.num_layers_per_virtual_pipeline_stage
    return 1 if length is None else config.model.num_layers // (config.parallel.pipeline_model_parallel_size * length)


def pipeline_schedule(config: RunConfig) -> Schedule:
    """Return the schedule, the order of forwards and backwards; "auto" is replaced by the one that it stands for."""
    given = config.parallel.pipeline_schedule
    if given == "auto":
        return "interleaved" if num_virtual_chunks(config) > 1 else "1f1b"
    return given


def given_split(config: RunConfig) -> tuple[int, ...] | None:
    """Return the user's number of layers of every chunk, in the model's order; None if layers are split by cost."""
    text = config.parallel.pipeline_split
    return None if text is None else tuple(int(word) for word in text.split(","))


def data_parallel_size(config: RunConfig, world_size: int) -> int:
    """Return the number of copies of the model that are trained side by side."""
    return world_size // model_parallel_size(config)


def samples_per_micro_step(config: RunConfig, world_size: int) -> int:
    """Return the number of samples in one micro-batch of every data-parallel process, all processes together."""
    return config.training.micro_batch_size * data_parallel_size(config, world_size)


def tensorboard_dir(config: RunConfig) -> Path | None:
    """Return the folder for TensorBoard, the one that is given or the one of --tensorboard; None without either."""
    given, save = config.logging.tensorboard_dir, config.checkpoint.save
    return save / "tensorboard" if given is None and save is not None and config.logging.tensorboard else given


def global_batch_size(config: RunConfig, world_size: int) -> int:
    """Return the number of samples in one step."""
    given = config.training.global_batch_size
    return samples_per_micro_step(config, world_size) if given is None else given


def num_micro_batches(config: RunConfig, world_size: int) -> int:
    """Return the number of micro-batches per step on each data-parallel process (gradient accumulation)."""
    return global_batch_size(config, world_size) // samples_per_micro_step(config, world_size)


def train_iters(config: RunConfig, world_size: int) -> int:
    """Return the number of steps of the whole run; samples that don't fill a last global batch are left out."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    assert config.training.train_samples is not None, "rules.check lets no run through without a length"
    return config.training.train_samples // global_batch_size(config, world_size)


def lr_decay_iters(config: RunConfig, world_size: int) -> int:
    """Return the step at which the learning rate reaches min_lr."""
    given = config.optimizer.lr_decay_iters
    return train_iters(config, world_size) if given is None else given


def collective_limit_minutes(limits: LimitConfig) -> float:
    """Return the minutes that a collective may wait."""
    seconds = limits.distributed_timeout_seconds_after_init
    return limits.distributed_timeout_minutes if seconds is None else seconds / 60


def join_limit_minutes(limits: LimitConfig) -> float:
    """Return the minutes that processes wait for each other at the start."""
    return limits.distributed_join_timeout_minutes or max(10.0, limits.distributed_timeout_minutes)
