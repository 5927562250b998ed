"""Computes figures that follow from the configuration and the world size, with pure functions.

The functions require that `rules.check` found no problem.  `world_size` is the number of processes of the job.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megazero.config.curriculum import RowLengths, row_lengths_of
from megazero.config.engine_sections import LimitConfig, OptimizerConfig, ZeroConfig
from megazero.config.lengths import RateLengths, RunLength
from megazero.config.model import ModelConfig
from megazero.config.run import RunConfig
from megazero.config.schedules import RATE_SETTINGS
from megazero.config.step_sizes import StepSizes, read_rampup, read_schedule
from megazero.config.values import as_span
from megazero.errors import Problem

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


def ffn_hidden_size(model: ModelConfig) -> int:
    """Return the inner width of the feed-forward layer, in elements."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    # Three matrices of this width are as large as two of 4 h; Megatron-LM rounds it in this way.
    return int(4 * model.hidden_size * 2 / 3) // 64 * 64 if model.swiglu else 4 * model.hidden_size


def head_width(model: ModelConfig) -> int:
    """Return the width of an attention head, in elements."""
    return model.hidden_size // model.num_attention_heads if model.kv_channels is None else model.kv_channels


def num_key_value_heads(model: ModelConfig) -> int:
    """Return the number of heads of keys and of values in a block."""
    return model.num_query_groups if model.group_query_attention else model.num_attention_heads


def key_value_heads_of_rank(model: ModelConfig, tensor_parallel_size: int) -> int:
    """Return the number of heads of keys, and of values, that a tensor-parallel process computes in a block.

    Without whole groups, its queries share one, or have one each where they belong to several.
    """
    groups = num_key_value_heads(model)
    if groups % tensor_parallel_size == 0:
        return groups // tensor_parallel_size
    return 1 if tensor_parallel_size % groups == 0 else model.num_attention_heads // tensor_parallel_size


def key_value_cache_bytes(
    model: ModelConfig, *, layers: int, rows: int, positions: int, tensor_parallel_size: int, element_bytes: int
) -> int:
    """Return the bytes of the cache of keys and values with which a process generates text.

    layers: of its pipeline stage.  rows: texts at the same time.  positions: tokens of the longest.
    """
    elements = rows * positions * key_value_heads_of_rank(model, tensor_parallel_size) * head_width(model)
    return 2 * layers * elements * element_bytes


def has_qkv_bias(model: ModelConfig) -> bool:
    """Return True if queries, keys and values have biases."""
    return model.add_qkv_bias or not model.disable_bias_linear


def rotary_width(model: ModelConfig) -> int:
    """Return the number of a head's elements that rotary positions turn."""
    return int(head_width(model) * model.rotary_percent)


def max_position_embeddings(model: ModelConfig) -> int:
    """Return the length of the longest sequence that the model takes, in tokens; the rows of a position table."""
    return model.seq_length if model.max_position_embeddings is None else model.max_position_embeddings


def padded_vocab_size(vocab_size: int, *, divisible_by: int, tensor_parallel_size: int) -> int:
    """Return the rows of the embedding over all tensor-parallel ranks: the next multiple of divisible_by x degree."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def vocab_rows(config: RunConfig, vocab_size: int) -> int:
    """Return the rows of the run's embedding over all tensor-parallel ranks."""
    given = config.model.pad_vocab_size_to
    if given is not None:
        return given
    return padded_vocab_size(
        vocab_size,
        divisible_by=config.model.make_vocab_size_divisible_by,
        tensor_parallel_size=config.parallel.tensor_model_parallel_size,
    )


def num_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters of the whole model, without the padding of the vocabulary.

    vocab_size: ids before padding.
    """
    hidden, inner, width = model.hidden_size, ffn_hidden_size(model), head_width(model)
    per_norm = 1 if model.normalization == "RMSNorm" else 2
    qkv = (model.num_attention_heads + 2 * num_key_value_heads(model)) * width
    block = block_matrices(model) + 2 * per_norm * hidden
    if has_qkv_bias(model):
        block += qkv
    if not model.disable_bias_linear:
        block += hidden + inner * (1 + model.swiglu) + hidden
    if model.qk_layernorm:
        block += 2 * per_norm * width
    tables = vocab_size * (2 if model.untie_embeddings_and_output_weights else 1)
    if model.position_embedding_type == "learned_absolute":
        tables += max_position_embeddings(model)
    outside = tables * hidden + (1 + model.embed_layernorm) * per_norm * hidden
    return model.num_layers * block + outside + num_adapter_parameters(model)


def lora_scale(model: ModelConfig) -> float:
    """Return what an adapter's product is multiplied by, alpha / r."""
    alpha = model.lora_rank if model.lora_alpha is None else model.lora_alpha
    return alpha / model.lora_rank


def num_adapter_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the adapters of the whole model: rank x (inputs + outputs) of each."""
    hidden, inner, queries = model.hidden_size, ffn_hidden_size(model), model.num_attention_heads * head_width(model)
    pairs = 2 * num_key_value_heads(model) * head_width(model)
    is_fused = num_key_value_heads(model) == model.num_attention_heads
    widths = {
        "linear_qkv": hidden + queries + pairs + (0 if is_fused else hidden),  # grouped queries have two layers
        "linear_proj": queries + hidden,
        "linear_fc1": hidden + (1 + model.swiglu) * inner,
        "linear_fc2": inner + hidden,
    }
    return model.num_layers * model.lora_rank * sum(widths[target] for target in model.lora_targets)


def block_matrices(model: ModelConfig) -> int:
    """Return the number of elements of a block's matrices."""
    heads = 2 * model.num_attention_heads + 2 * num_key_value_heads(model)
    return model.hidden_size * (heads * head_width(model) + (2 + model.swiglu) * ffn_hidden_size(model))


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


def num_replicas(zero: ZeroConfig, data_parallel_size: int) -> int:
    """Return the number of shard groups into which ZeRO divides the data-parallel processes."""
    if zero.zero_stage == 0:
        return 1
    if zero.mics_shard_size > 0:
        return data_parallel_size // zero.mics_shard_size
    return zero.num_distributed_optimizer_instances


def secondary_size(zero: ZeroConfig) -> int:
    """Return the number of processes over which gathered parameters are partitioned a second time; 1: they are not."""
    return zero.zero_hpz_partition_size if zero.zero_stage == 3 else 1


def samples_per_micro_step(config: RunConfig, world_size: int) -> int:
    """Return the number of samples in one micro-batch of every data-parallel process, all processes together."""
    return config.training.micro_batch_size * data_parallel_size(config, world_size)


def tensorboard_dir(config: RunConfig) -> Path | None:
    """Return the folder for TensorBoard, the one that is given or the one of --tensorboard; None without either."""
    given, save = config.logging.tensorboard_dir, config.checkpoint.save
    return save / "tensorboard" if given is None and save is not None and config.logging.tensorboard else given


def tracks_scalars(config: RunConfig) -> bool:
    """Return True if figures go to TensorBoard or to another tracker."""
    return tensorboard_dir(config) is not None or config.reports.tracks


def profile_folder(config: RunConfig) -> Path | None:
    """Return the folder for traces of torch's profiler; None where nothing is written for TensorBoard nor saved."""
    parent = tensorboard_dir(config) or config.checkpoint.save
    return None if parent is None else parent / "profile"


def step_sizes(config: RunConfig, world_size: int) -> StepSizes:
    """Return the number of samples in every step, by the samples consumed before it.

    Words of --rampup-batch-size or --step-batch-size-schedule that break their rules are passed over.
    """
    training = config.training
    given = training.global_batch_size
    last = samples_per_micro_step(config, world_size) if given is None else given
    varied: StepSizes | Problem | None = None
    if training.step_batch_size_schedule:
        varied = read_schedule(training.step_batch_size_schedule, config.model.seq_length)
    elif training.rampup_batch_size:
        varied = read_rampup(training.rampup_batch_size, last)
    return varied if isinstance(varied, StepSizes) else StepSizes.constant(last)


def row_lengths(config: RunConfig) -> RowLengths:
    """Return the length of the rows of every training step; whole ones without a curriculum that keeps its rules."""
    length = config.model.seq_length
    return row_lengths_of(config.curriculum, length) or RowLengths.constant(length)


def global_batch_size(config: RunConfig, world_size: int) -> int:
    """Return the number of samples in one step; where it changes, in the last ones, and in one of an evaluation."""
    return step_sizes(config, world_size).sizes[-1]


def num_micro_batches(config: RunConfig, world_size: int) -> int:
    """Return the most micro-batches per step on each data-parallel process (gradient accumulation)."""
    return step_sizes(config, world_size).largest // samples_per_micro_step(config, world_size)


def length_in_samples(config: RunConfig) -> int | None:
    """Return the length of the run in samples; None if it is given in steps, or in tokens of cut rows."""
    tokens = None if config.curriculum.curriculum_learning else config.training.train_tokens
    given = (config.training.train_samples, None if tokens is None else tokens // config.model.seq_length)
    return min((samples for samples in given if samples is not None), default=None)


def last_iteration(
    config: RunConfig, world_size: int, *, iteration: int = 0, consumed_samples: int = 0, consumed_tokens: int = 0
) -> int:
    """Return the step at which the run ends; samples that don't fill a last global batch are left out.

    iteration, consumed_samples, consumed_tokens: the progress so far; earlier steps may have had other batch sizes.
    """
    samples, steps, sizes = length_in_samples(config), config.training.train_iters, step_sizes(config, world_size)
    ends = [] if steps is None else [steps]
    if samples is not None:
        ends.append(iteration + sizes.steps_until(samples, consumed=consumed_samples))
    if config.curriculum.curriculum_learning and (tokens := config.training.train_tokens) is not None:
        progress = {"steps": iteration, "samples": consumed_samples, "tokens": consumed_tokens}
        ends.append(row_lengths(config).steps_until(tokens, sizes, **progress))
    assert ends, "rules.check lets no run through without a length"
    return min(ends)


def untrained_steps(config: RunConfig) -> tuple[range, ...]:
    """Return the spans of steps, counted from 1, that do not train."""
    spans = (as_span(word, alone=True) for word in config.training.skip_train_iteration_range)
    return tuple(span for span in spans if span is not None)


def run_length(config: RunConfig, world_size: int) -> RunLength:
    """Return the length of the whole run in steps and samples."""
    sizes, steps = step_sizes(config, world_size), last_iteration(config, world_size)
    samples, given = length_in_samples(config), config.training.train_iters
    ends_by_steps = samples is None or (given is not None and sizes.samples_after(given) <= samples)
    rows = row_lengths(config)
    cut = rows if rows.varies else None
    return RunLength(steps, sizes, None if ends_by_steps else samples, config.model.seq_length, cut)


def train_iters(config: RunConfig, world_size: int) -> int:
    """Return the number of steps of the whole run."""
    return last_iteration(config, world_size)


def rate_lengths(optimizer: OptimizerConfig, run: RunLength) -> RateLengths:
    """Return the lengths of the schedule of rates, in samples if one of them is given so or batch sizes change.

    Lengths in steps then become the samples of these steps, and lengths in tokens are divided by those of a sample.
    """
    last_steps = optimizer.lr_wsd_decay_iters or 0
    decay_steps = optimizer.lr_decay_iters or run.steps
    by_steps = RateLengths("steps", optimizer.lr_warmup_iters, decay_steps, last_steps, run.steps)
    if optimizer.lr_decay_style in RATE_SETTINGS:  # a sweep has a shape of its own, in steps
        return by_steps
    if run.rows is not None and (optimizer.lr_decay_tokens is not None or optimizer.lr_warmup_tokens):
        return _lengths_in_tokens(optimizer, run, run.rows)
    decay = optimizer.lr_decay_samples
    if optimizer.lr_decay_tokens is not None:
        decay_length: float = run.samples_of_tokens(optimizer.lr_decay_tokens)
    elif decay is not None:
        decay_length = decay
    elif optimizer.lr_decay_iters is not None:
        decay_length = run.sizes.samples_after(optimizer.lr_decay_iters)
    else:
        decay_length = run.total_samples
    if optimizer.lr_warmup_tokens:
        warmup: float = run.samples_of_tokens(optimizer.lr_warmup_tokens)
    else:
        warmup = optimizer.lr_warmup_samples or run.sizes.samples_after(optimizer.lr_warmup_iters)
    # These last steps end with the decay, in whose middle the batch may still grow.
    before = run.sizes.samples_after(max(run.sizes.steps_until(math.ceil(decay_length)) - last_steps, 0))
    fall = optimizer.lr_wsd_decay_samples or (decay_length - before if last_steps else 0)
    given = (decay, optimizer.lr_decay_tokens, optimizer.lr_warmup_samples, optimizer.lr_warmup_tokens)
    by_default = optimizer.lr_decay_iters is None and run.samples is not None
    # Without a warm-up an inverse square root begins with that of one sample, as in Megatron-LM.
    from_one = optimizer.lr_decay_style == "inverse-square-root" and not (warmup or optimizer.lr_warmup_fraction)
    counts_samples = any((*given, optimizer.lr_wsd_decay_samples, from_one, by_default)) or len(run.sizes.sizes) > 1
    lengths = RateLengths("samples", warmup, decay_length, fall, run.total_samples) if counts_samples else by_steps
    fraction = optimizer.lr_warmup_fraction
    return lengths if fraction is None else replace(lengths, warmup=fraction * lengths.decay)


def _lengths_in_tokens(optimizer: OptimizerConfig, run: RunLength, rows: RowLengths) -> RateLengths:
    """Return the lengths of the schedule of rates in tokens of rows that are cut, also those in steps."""
    whole = rows.tokens_after(run.steps, run.sizes)
    decay = optimizer.lr_decay_tokens or (
        whole if optimizer.lr_decay_iters is None else rows.tokens_after(optimizer.lr_decay_iters, run.sizes)
    )
    warmup: float = optimizer.lr_warmup_tokens or rows.tokens_after(optimizer.lr_warmup_iters, run.sizes)
    if optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * decay
    last_steps = optimizer.lr_wsd_decay_iters or 0
    before = rows.tokens_after(max(rows.steps_until(decay, run.sizes) - last_steps, 0), run.sizes)
    return RateLengths("tokens", warmup, decay, decay - before if last_steps else 0, whole)


def lr_decay_iters(config: RunConfig, world_size: int) -> int:
    """Return the step at which the learning rate reaches min_lr, rounded up where it is given in samples or tokens."""
    run = run_length(config, world_size)
    lengths = rate_lengths(config.optimizer, run)
    if lengths.unit == "steps":
        return int(lengths.decay)
    if run.rows is not None and lengths.unit == "tokens":
        whole = run.rows.steps_until(int(lengths.decay), run.sizes)
        return whole + (run.rows.tokens_after(whole, run.sizes) < lengths.decay)
    steps = run.sizes.steps_until(math.ceil(lengths.decay))
    return steps + (run.sizes.samples_after(steps) < lengths.decay)


def collective_limit_minutes(limits: LimitConfig) -> float:
    """Return the minutes that a collective may wait."""
    seconds = limits.distributed_timeout_seconds_after_init
    return limits.distributed_timeout_minutes if seconds is None else seconds / 60


def join_limit_minutes(limits: LimitConfig) -> float:
    """Return the minutes that processes wait for each other at the start."""
    return limits.distributed_join_timeout_minutes or max(10.0, limits.distributed_timeout_minutes)
