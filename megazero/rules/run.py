"""Rules between settings, one small function each, and `check`, which tries them all.

A rule takes the configuration and the world size (processes of the job), and yields a Problem for every setting that
breaks it: the given value, the rule, and the nearest legal values.  Ranges of single settings are defined with the
settings.  The rules need neither a process group nor a device; of the file system they use only which files exist.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator

from megazero.config import derived
from megazero.config.nearest import flags, near_divisors, neighbours
from megazero.config.optimizers import OPTIMIZERS, RUN_NAMES
from megazero.config.run import RunConfig
from megazero.config.step_sizes import RAMPUP, SCHEDULE, read_rampup, read_schedule
from megazero.config.validate import Unknown
from megazero.config.values import Diagnostics, as_span
from megazero.errors import Problem
from megazero.rules import activations as activation_rules
from megazero.rules import files as file_rules
from megazero.rules import float8 as float8_rules
from megazero.rules import pipeline as pipeline_rules
from megazero.rules.adapters import ADAPTER_RULES
from megazero.rules.curriculum import CURRICULUM_RULES
from megazero.rules.optimizer import choose_for_run, sweep_for_run
from megazero.rules.states import STATE_RULES, StateRule, optimizer_fits, shard_groups_are_equal
from megazero.units import counted

_TENSOR, _PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_UNTRAINED = "--skip-train-iteration-range"

Rule = Callable[[RunConfig, int], Iterable[Problem]]


def check(config: RunConfig, world_size: int) -> tuple[Problem, ...]:
    """Return every problem between the settings.  A rule that needs an invalid setting is skipped."""
    return tuple(problem for rule in RULES for problem in _try(rule, config, world_size))


def corpus_is_named(config: RunConfig, world_size: int) -> bool:
    """Return True if the settings of the corpus break no rule, so that only opening it can find further problems."""
    return not any(_try(rule, config, world_size) for rule in file_rules.CORPUS_RULES)


def advice(config: RunConfig, world_size: int) -> tuple[str, ...]:
    """Return one-line notices about legal settings that have a cost; none while there are problems."""
    return () if check(config, world_size) else costs(config, world_size)


def costs(config: RunConfig, world_size: int) -> tuple[str, ...]:
    """Return the advice on settings that break no rule."""
    return (
        *_optimizer_advice(config),
        *_narrow_sum_advice(config, world_size),
        *pipeline_rules.advice(config),
        *float8_rules.advice(config),
    )


def _optimizer_advice(config: RunConfig) -> list[str]:
    diagnostics = Diagnostics()
    choose_for_run(config.optimizer, diagnostics)
    sweep_for_run(config.optimizer, diagnostics)
    name, slices = config.optimizer.optimizer, config.parallel.tensor_model_parallel_size
    if OPTIMIZERS[RUN_NAMES[name]].package and slices > 1:
        diagnostics.notices.append(
            f"--optimizer {name} with --tensor-model-parallel-size {slices}: slices of matrices have other blocks than"
            " the whole, so that moments are rounded otherwise than with another size"
        )
    return diagnostics.notices


def _narrow_sum_advice(config: RunConfig, world_size: int) -> Iterator[str]:
    precision, count = config.precision, derived.num_micro_batches(config, world_size)
    narrow = precision.precision == "bf16" and not precision.accumulate_allreduce_grads_in_fp32
    if narrow and count > 1:
        yield (
            f"--bf16: the gradients of {count} micro-batches are added up in bf16;"
            " --accumulate-allreduce-grads-in-fp32 keeps them in fp32, for 2 more bytes a gradient element"
        )


def _try(rule: Rule, config: RunConfig, world_size: int) -> tuple[Problem, ...]:
    try:
        return tuple(rule(config, world_size))
    except Unknown:
        return ()


# --- model and layout ------------------------------------------------------------------------------------------------


def heads_divide_hidden_size(config: RunConfig, world_size: int) -> Iterator[Problem]:
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    if config.model.kv_channels is None and hidden % heads:
        yield Problem(
            f"--hidden-size {hidden} --num-attention-heads {heads}",
            "every head has the same width: num_attention_heads divides hidden_size",
            flags("--num-attention-heads", near_divisors(hidden, heads))
            + ", "
            + flags("--hidden-size", neighbours(hidden, heads)),
        )


def groups_divide_heads(config: RunConfig, world_size: int) -> Iterator[Problem]:
    heads, groups = config.model.num_attention_heads, derived.num_key_value_heads(config.model)
    if heads % groups:
        yield Problem(
            f"--num-query-groups {groups} --num-attention-heads {heads}",
            "every group has as many attention heads: num_query_groups divides num_attention_heads",
            flags("--num-query-groups", near_divisors(heads, groups)),
        )


def padding_holds_the_vocabulary(config: RunConfig, world_size: int) -> Iterator[Problem]:
    rows, degree = config.model.pad_vocab_size_to, config.parallel.tensor_model_parallel_size
    least = config.model.vocab_size or 1
    if rows is not None and (rows % degree or rows < least):
        fitting = [size for size in neighbours(max(rows, least), degree) if size >= least]
        yield Problem(
            f"--pad-vocab-size-to {rows}" + f" --vocab-size {least}" * (rows < least) + f" {_TENSOR} {degree}",
            "a padded vocabulary holds all ids, and every tensor-parallel process has as many of them",
            flags("--pad-vocab-size-to", fitting or [-(-least // degree) * degree]),
        )


def rotary_width_is_even(config: RunConfig, world_size: int) -> Iterator[Problem]:
    width = derived.rotary_width(config.model)
    if config.model.position_embedding_type == "rope" and (width % 2 or width == 0):
        head = derived.head_width(config.model)
        legal = [size for size in (width - width % 2, width + 1 + width % 2) if 0 < size <= head and size % 2 == 0]
        yield Problem(
            f"--position-embedding-type rope with {width} of a head's {head} elements rotated",
            "rotary positions turn pairs of elements: their number, the head's width x rotary_percent, is even",
            ", ".join(
                [
                    *(f"--rotary-percent {math.ceil(1e6 * size / head) / 1e6:g}" for size in legal[:1]),
                    "--kv-channels WIDTH",
                ]
            ),
        )


def there_is_one_activation(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.model.swiglu and config.model.squared_relu:
        rule = "the feed-forward layer has one activation"
        yield Problem("--swiglu --squared-relu", rule, "--swiglu, --squared-relu")


def tensor_parallel_divides_heads(config: RunConfig, world_size: int) -> Iterator[Problem]:
    heads, degree = config.model.num_attention_heads, config.parallel.tensor_model_parallel_size
    if heads % degree:
        yield Problem(
            f"--tensor-model-parallel-size {degree} --num-attention-heads {heads}",
            "a head lives on one process: tensor_model_parallel_size divides num_attention_heads",
            flags(_TENSOR, near_divisors(_tensor_degrees(config, world_size, heads), degree)),
        )


def _tensor_degrees(config: RunConfig, world_size: int, heads: int) -> int:
    """Return the number that every tensor-parallel degree that fits the heads and the job divides.

    If the pipeline size does not divide the job, no degree fits it, so only the heads are considered.
    """
    stages = pipeline_rules.known(lambda: config.parallel.pipeline_model_parallel_size, 1) or 1
    return heads if world_size % stages else math.gcd(heads, world_size // stages)


def tensor_parallel_divides_ffn(config: RunConfig, world_size: int) -> Iterator[Problem]:
    inner, degree = derived.ffn_hidden_size(config.model), config.parallel.tensor_model_parallel_size
    if inner % degree:
        yield Problem(
            f"--tensor-model-parallel-size {degree} with feed-forward width {inner}",
            "every process has an equal part of the feed-forward layer: tensor_model_parallel_size divides its width",
            flags("--ffn-hidden-size", neighbours(inner, degree)),
        )


def positions_cover_sequence(config: RunConfig, world_size: int) -> Iterator[Problem]:
    rows, length = config.model.max_position_embeddings, config.model.seq_length
    if rows is not None and length > rows:
        yield Problem(
            f"--seq-length {length} --max-position-embeddings {rows}",
            "every token of a sample has a position: seq_length is at most max_position_embeddings",
            f"--seq-length {rows}, --max-position-embeddings {length}",
        )


def layout_divides_world(config: RunConfig, world_size: int) -> Iterator[Problem]:
    tensor, pipeline = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    if world_size % (tensor * pipeline):
        heads = pipeline_rules.known(lambda: config.model.num_attention_heads, None)
        layers = pipeline_rules.known(lambda: config.model.num_layers, None)
        legal = [*_legal_layouts(tensor, pipeline, world_size, heads=heads, layers=layers)]
        yield Problem(
            f"{counted(world_size, 'process')} with {_TENSOR} {tensor} {_PIPELINE} {pipeline}",
            "copies of the model fill the job: tensor size x pipeline size divides the number of processes",
            ", ".join(legal or _legal_layouts(tensor, pipeline, world_size)),
        )


def _legal_layouts(
    tensor: int, pipeline: int, world_size: int, *, heads: int | None = None, layers: int | None = None
) -> Iterator[str]:
    """Yield other numbers of processes, and other values of one of the two sizes, each of which solves the problem.

    Values that the number of heads or layers forbids are left out, if these numbers are known.
    """
    most_stages = max(world_size, pipeline) if layers is None else layers + 2
    heads_fit, layers_fit = heads is None or heads % tensor == 0, pipeline <= most_stages
    if heads_fit and layers_fit:
        yield from (counted(count, "process") for count in neighbours(world_size, tensor * pipeline))
    if layers_fit and world_size % pipeline == 0:
        yield flags(_TENSOR, near_divisors(math.gcd(world_size // pipeline, heads or 0), tensor))
    if heads_fit and world_size % tensor == 0:
        sizes = near_divisors(world_size // tensor, min(pipeline, most_stages))
        yield from (f"{_PIPELINE} {size}" for size in sizes if size <= most_stages)


def backend_fits_device(config: RunConfig, world_size: int) -> Iterator[Problem]:
    legal = {"nccl": "cuda", "gloo": "cpu"}
    backend, device = config.parallel.distributed_backend, config.parallel.device
    if device != "auto" and legal.get(backend, device) != device:
        other = next(name for name, kind in legal.items() if kind == device)
        yield Problem(
            f"--distributed-backend {backend} --device {device}",
            "nccl moves GPU memory, gloo moves CPU memory",
            f"--distributed-backend {other}, --device {legal[backend]}",
        )


def flash_takes_no_mask(config: RunConfig, world_size: int) -> Iterator[Problem]:
    kernel = config.training.attention_backend
    is_biased = config.model.position_embedding_type == "alibi"
    if (config.data.reset_attention_mask or is_biased) and kernel in ("flash", "flash3"):
        given = "--position-embedding-type alibi" if is_biased else "--reset-attention-mask"
        yield Problem(
            f"{given} --attention-backend {kernel}",
            "FlashAttention takes no mask: other kernels keep documents apart and add ALiBi's bias",
            ", ".join(f"--attention-backend {name}" for name in ("auto", "fused", "efficient", "unfused")),
        )


def flash3_drops_nothing(config: RunConfig, world_size: int) -> Iterator[Problem]:
    dropout = config.model.attention_dropout
    if config.training.attention_backend == "flash3" and dropout > 0:
        yield Problem(
            f"--attention-backend flash3 --attention-dropout {dropout:g}",
            "FlashAttention 3 has no dropout",
            "--attention-dropout 0, --attention-backend auto",
        )


def deterministic_attention_is_not_cudnns(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.training.deterministic_mode and config.training.attention_backend == "fused":
        yield Problem(
            "--deterministic-mode --attention-backend fused",
            "torch has no deterministic backward of cuDNN's attention",
            ", ".join(f"--attention-backend {name}" for name in ("auto", "flash", "efficient", "unfused")),
        )


def timed_hops_differ(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield a problem of runs in which measured bandwidths would decide where the same bits are needed."""
    if config.training.deterministic_mode and config.zero.hierarchical_collectives == "auto":
        yield Problem(
            "--hierarchical-collectives auto --deterministic-mode",
            "another run may measure another number of hops to be faster, which adds in another order",
            "--hierarchical-collectives on or off, or leave out --deterministic-mode",
        )


def timed_kernels_differ(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield problems of runs in which --compile max would take other kernels where the same bits are needed."""
    if config.training.compile != "max":
        return
    if config.training.deterministic_mode:
        yield Problem(
            "--compile max --deterministic-mode",
            "another run may find another kernel fastest, which adds in another order",
            "--compile on, or leave out --deterministic-mode",
        )
    parallel = config.parallel
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield Problem(
            f"--compile max --tensor-model-parallel-size {parallel.tensor_model_parallel_size}",
            "tensor-parallel ranks compute the same norms, of which each would take the kernel that it finds fastest;"
            " with other kernels their weights drift apart",
            "--sequence-parallel, by which every rank has tokens of its own, or --compile on",
        )


def recorded_passes_stay_in_place(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield problems of runs in which a block's recorded passes would read or write where nothing of theirs is."""
    training, parallel, zero = config.training, config.parallel, config.zero
    if not training.enable_cuda_graph:
        return
    given = "--enable-cuda-graph"
    if training.compile == "off":
        yield Problem(f"{given} --compile off", "the passes of compiled blocks are recorded", "--compile on")
    if config.logging.ledger or config.logging.ledger_limit is not None:
        rule = "a ledger watches operations, which a recorded pass repeats unseen"
        yield Problem(f"{given} with a ledger", rule, "leave out --ledger and --ledger-limit")
    for name, size in (
        ("tensor", parallel.tensor_model_parallel_size),
        ("pipeline", parallel.pipeline_model_parallel_size),
    ):
        if size > 1:
            rule = (
                "collectives within a block are called by the host"
                if name == "tensor"
                else "a recorded pass has one micro-batch, and pipelines have several under way"
            )
            flag = f"--{name}-model-parallel-size"
            yield Problem(f"{given} {flag} {size}", rule, f"{flag} 1")
    if zero.zero_stage == 3:
        rule = "recorded passes read parameters where they were, and stage 3 gathers them anew for each use"
        yield Problem(f"{given} --zero-stage 3", rule, "--zero-stage 2")
    if config.activations.recompute_granularity != "none":
        given_too = f"{given} --recompute-granularity {config.activations.recompute_granularity}"
        rule = "what a recorded forward saves has a place of its own, so recomputing it frees nothing"
        yield Problem(given_too, rule, f"--recompute-granularity none, or leave out {given}")
    if config.precision.fp8_format is not None:
        rule = "the host chooses where 8-bit products find scales and weights, in every pass"
        yield Problem(f"{given} --fp8-format {config.precision.fp8_format}", rule, f"leave out {given} or --fp8-format")
    for flag, is_given in (
        ("--reset-position-ids", config.data.reset_position_ids),
        ("--reset-attention-mask", config.data.reset_attention_mask),
        ("--curriculum-learning", config.curriculum.curriculum_learning),
    ):
        if is_given:
            rule = "a recorded pass has the length, positions and mask of the micro-batch that it was recorded with"
            yield Problem(f"{given} {flag}", rule, f"leave out {given} or {flag}")


def ledger_watches_uncompiled_blocks(config: RunConfig, world_size: int) -> Iterator[Problem]:
    limit = config.logging.ledger_limit
    choice = config.training.compile
    if choice in ("on", "max") and (config.logging.ledger or limit is not None):
        yield compiled_under_ledger("--ledger" if config.logging.ledger else f"--ledger-limit {limit:g}", choice)


def compiled_under_ledger(ledger: str, choice: str) -> Problem:
    """Return the problem of a run that is compiled under a ledger.  ledger: the flag that keeps it, or other words."""
    otherwise = f", or leave out {ledger}" if ledger.startswith("--") else ""
    return Problem(
        f"--compile {choice} with {ledger}",
        "the ledger watches single operations, which compiled blocks don't run",
        f"--compile auto, --compile off{otherwise}",
    )


# --- batch and length ------------------------------------------------------------------------------------------------


def batch_sizes_are_read(config: RunConfig, world_size: int) -> Iterator[Problem]:
    training = config.training
    if training.rampup_batch_size and training.step_batch_size_schedule:
        given = f"{RAMPUP} {' '.join(training.rampup_batch_size)} and {SCHEDULE}"
        yield Problem(given, "global batch sizes change by one rule", "one of the two")
    elif training.step_batch_size_schedule:
        sizes = read_schedule(training.step_batch_size_schedule, config.model.seq_length)
        if isinstance(sizes, Problem):
            yield sizes
        elif training.global_batch_size not in (None, sizes.sizes[-1]):
            words = " ".join(training.step_batch_size_schedule)
            given = f"--global-batch-size {training.global_batch_size} and {SCHEDULE} {words}"
            rule = f"the schedule holds all global batch sizes, of which the last is {sizes.sizes[-1]}"
            yield Problem(given, rule, f"--global-batch-size {sizes.sizes[-1]}, or without it")
    elif training.rampup_batch_size and world_size % derived.model_parallel_size(config) == 0:
        sizes = read_rampup(
            training.rampup_batch_size, training.global_batch_size or derived.samples_per_micro_step(config, world_size)
        )
        if isinstance(sizes, Problem):
            yield sizes


def micro_batches_fill_every_batch(config: RunConfig, world_size: int) -> Iterator[Problem]:
    training = config.training
    if not (training.rampup_batch_size or training.step_batch_size_schedule):
        return
    if world_size % derived.model_parallel_size(config):
        return
    micro, copies = training.micro_batch_size, derived.data_parallel_size(config, world_size)
    turns = pipeline_rules.known(lambda: pipeline_rules.turns(config), 1) or 1
    unit = micro * copies * turns
    sizes = derived.step_sizes(config, world_size)
    wrong = [size for size in sizes.sizes if size % unit]
    if not wrong or (sizes.sizes[-1] % unit and not training.step_batch_size_schedule):
        return  # what is wrong with --global-batch-size has a rule of its own
    of_turns = f" x {turns} of a turn of the interleaved schedule" if turns > 1 else ""
    rule = (
        f"each of the ramp's sizes is a whole number of micro-batches everywhere: {micro} x {copies}{of_turns} divides"
    )
    listed = ", ".join(str(size) for size in wrong[:5]) + ", ..." * (len(wrong) > 5)
    on = f"on {counted(copies, 'data-parallel process')} with --micro-batch-size {micro}, sizes {listed}"
    if training.step_batch_size_schedule:
        legal = ", ".join(f"{' or '.join(map(str, neighbours(size, unit)))} for {size}" for size in wrong[:5])
        yield Problem(f"{SCHEDULE} {' '.join(training.step_batch_size_schedule)} {on}", f"{rule} them", legal)
        return
    start, increment, samples = training.rampup_batch_size
    first, step = sizes.sizes[0], sizes.sizes[1] - sizes.sizes[0]
    fitting = [
        f"{RAMPUP} {near} {divisor} {samples}"
        for near in neighbours(first, unit)
        if near < sizes.sizes[-1]
        for divisor in near_divisors(sizes.sizes[-1] - near, step, multiple_of=unit)
    ]
    given = f"{RAMPUP} {start} {increment} {samples} {on}"
    yield Problem(given, f"{rule} START and INCREMENT", ", ".join(fitting) or f"leave out {RAMPUP}")


def micro_batches_fill_global_batch(config: RunConfig, world_size: int) -> Iterator[Problem]:
    given = config.training.global_batch_size
    if given is None or config.training.step_batch_size_schedule or world_size % derived.model_parallel_size(config):
        return
    micro, copies = config.training.micro_batch_size, derived.data_parallel_size(config, world_size)
    if given % (micro * copies):
        turns = pipeline_rules.known(lambda: pipeline_rules.turns(config), 1) or 1
        yield Problem(
            f"--global-batch-size {given} with --micro-batch-size {micro} on"
            f" {counted(copies, 'data-parallel process')}",
            f"a step is a whole number of micro-batches everywhere: {micro} x {copies} divides global_batch_size",
            flags("--global-batch-size", neighbours(given, micro * copies * turns)),
        )


def length_is_given_once(config: RunConfig, world_size: int) -> Iterator[Problem]:
    steps, samples = config.training.train_iters, config.training.train_samples
    if steps is None and samples is None and config.training.train_tokens is None:
        yield Problem("neither --train-iters nor --train-samples", "a run has a length", "--train-iters N")
    if steps is not None and samples is not None:
        yield Problem(f"--train-iters {steps} and --train-samples {samples}", "a run has one length", "one of the two")


def length_is_a_step(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if world_size % derived.model_parallel_size(config):
        return
    batch, length = derived.step_sizes(config, world_size).at(0), derived.row_lengths(config).at(0)
    samples, tokens = config.training.train_samples, config.training.train_tokens
    if samples is not None and samples < batch:
        yield Problem(
            f"--train-samples {samples}",
            f"a run has at least one step, and a step has {batch} samples",
            f"--train-samples {batch}",
        )
    if tokens is not None and tokens // length < batch:
        yield Problem(
            f"--train-tokens {tokens}, which at {_length_of_rows(config, length)} are {_samples(tokens, length)}",
            f"a run has at least one step, and a step has {batch} samples",
            f"--train-tokens {batch * length}",
        )


def untrained_steps_ascend(config: RunConfig, world_size: int) -> Iterator[Problem]:
    rule = "a span of steps is A-B, the first and the last one that do not train, or one step, counted from 1"
    spans = ((word, as_span(word, alone=True)) for word in config.training.skip_train_iteration_range)
    yield from file_rules.spans_ascend(_UNTRAINED, spans, "step", 1, rule, f"{_UNTRAINED} 8401-8800")


def last_step_trains(config: RunConfig, world_size: int) -> Iterator[Problem]:
    spans = derived.untrained_steps(config)
    if not spans or world_size % derived.model_parallel_size(config):
        return
    last, end = derived.train_iters(config, world_size), spans[-1].stop - 1
    if end >= last:
        legal = f"spans that end at step {last - 1}, or a run of {end + 1} steps or more"
        yield Problem(f"{_UNTRAINED} {end} in a run of {last} steps", "the last step of a run trains", legal)


def profiled_steps_train(config: RunConfig, world_size: int) -> Iterator[Problem]:
    logging, spans = config.logging, derived.untrained_steps(config)
    ends = (("first", logging.profile_step_start + 1), ("last", logging.profile_step_end)) if logging.profile else ()
    for name, step in ends:
        for span in (span for span in spans if step in span):
            yield Problem(
                f"--profile and {_UNTRAINED} {span.start}-{span.stop - 1}",
                f"the {name} step that is profiled, here {step}, trains",
                f"--profile-step-start {span.stop - 1} --profile-step-end {span.stop + 1}",
            )


def _length_of_rows(config: RunConfig, length: int) -> str:
    """Return the first steps' length of rows, as a message shows it."""
    return f"--seq-length {length}" if length == config.model.seq_length else f"{length} tokens a row"


def _samples(tokens: int, seq_length: int) -> str:
    """Return tokens in samples, as a message shows them: "146,484,375 samples"."""
    whole, rest = divmod(tokens, seq_length)
    return f"{tokens / seq_length:,.2f} samples" if rest else f"{whole:,} samples"


# --- optimizer and learning rate -------------------------------------------------------------------------------------


def optimizer_takes_its_parameters(config: RunConfig, world_size: int) -> Iterable[Problem]:
    diagnostics = Diagnostics()
    choose_for_run(config.optimizer, diagnostics)
    return diagnostics.problems


def lr_is_above_its_start(config: RunConfig, world_size: int) -> Iterator[Problem]:
    lr, start = config.optimizer.lr, config.optimizer.lr_warmup_init
    if start > lr:
        given = f"--lr {lr:g} --lr-warmup-init {start:g}"
        yield Problem(given, "lr_warmup_init is at most lr", f"--lr-warmup-init {lr:g}, --lr {start:g}")


def lr_is_above_its_end(config: RunConfig, world_size: int) -> Iterator[Problem]:
    lr, low = config.optimizer.lr, config.optimizer.min_lr
    if low > lr:
        yield Problem(f"--lr {lr:g} --min-lr {low:g}", "min_lr is at most lr", f"--min-lr {lr:g}, --lr {low:g}")


def warmup_is_given_once(config: RunConfig, world_size: int) -> Iterator[Problem]:
    names = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens", "lr_warmup_fraction")
    return _given_once(config, names, "warm-up has one length")


def decay_is_given_once(config: RunConfig, world_size: int) -> Iterator[Problem]:
    return _given_once(config, ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"), "the decay has one length")


def _given_once(config: RunConfig, names: Iterable[str], rule: str) -> Iterator[Problem]:
    """Yield a problem if more than one of these settings of the optimizer's section is given."""
    values = {f"--{name.replace('_', '-')}": getattr(config.optimizer, name) for name in names}
    given = [f"{flag} {value:.12g}" for flag, value in values.items() if value]
    if len(given) > 1:
        yield Problem(" and ".join(given), rule, "one of the two" if len(given) == 2 else "one of them")


def warmup_ends_before_decay(config: RunConfig, world_size: int) -> Iterator[Problem]:
    training, optimizer = config.training, config.optimizer
    has_length = any(
        length is not None for length in (training.train_iters, training.train_samples, training.train_tokens)
    )
    if not has_length or world_size % derived.model_parallel_size(config):
        return
    lengths = derived.rate_lengths(optimizer, derived.run_length(config, world_size))
    if optimizer.lr_warmup_fraction is not None or not lengths.warmup or lengths.warmup < lengths.decay:
        return
    if lengths.unit == "steps":
        warmup, decay = optimizer.lr_warmup_iters, int(lengths.decay)
        if decay:
            yield Problem(
                f"--lr-warmup-iters {warmup}",
                f"warm-up ends before the decay does, at step {decay}",
                f"--lr-warmup-iters {decay - 1}, --lr-decay-iters {warmup + 1}",
            )
        return
    words = {
        f"--lr-{part}-{unit} {value}": tokens
        for part in ("warmup", "decay")
        for unit, tokens in (("iters", False), ("samples", False), ("tokens", True))
        if (value := getattr(optimizer, f"lr_{part}_{unit}"))
    }
    given = " ".join(words)
    unit = lengths.unit
    yield Problem(
        f"{given}: a warm-up of {lengths.warmup:,.12g} {unit} in a decay of {lengths.decay:,.12g}"
        + f", at --seq-length {config.model.seq_length}" * (unit == "samples" and any(words.values())),
        "warm-up ends before the decay does",
        f"--lr-warmup-{unit} {max(math.ceil(lengths.decay) - 1, 0)}, "
        f"--lr-decay-{unit} {math.floor(lengths.warmup) + 1}",
    )


def decoupled_lr_is_above_its_ends(config: RunConfig, world_size: int) -> Iterator[Problem]:
    optimizer = config.optimizer
    lr, low = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if lr is None:
        return
    flag, end = ("--min-lr", optimizer.min_lr) if low is None else ("--decoupled-min-lr", low)
    if end > lr:
        legal = f"--decoupled-min-lr {lr:g}, --decoupled-lr {end:g}"
        yield Problem(f"--decoupled-lr {lr:g} {flag} {end:g}", "a rate is not below the one that it falls to", legal)
    start = optimizer.lr_warmup_init
    if start > lr:
        legal = f"--lr-warmup-init {lr:g}, --decoupled-lr {start:g}"
        yield Problem(f"--decoupled-lr {lr:g} --lr-warmup-init {start:g}", "a warm-up does not fall", legal)


def wsd_has_a_fall(config: RunConfig, world_size: int) -> Iterator[Problem]:
    training, optimizer = config.training, config.optimizer
    if optimizer.lr_decay_style != "WSD":
        return
    given = [optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_samples]
    if all(given):
        yield Problem(
            f"--lr-wsd-decay-iters {given[0]} and --lr-wsd-decay-samples {given[1]}",
            "the fall at the end has one length",
            "one of the two",
        )
    if not any(given):
        yield Problem(
            "--lr-decay-style WSD without --lr-wsd-decay-iters and --lr-wsd-decay-samples",
            "the fall at the end has a length",
            "--lr-wsd-decay-iters N",
        )
    has_length = (training.train_iters, training.train_samples, training.train_tokens) != (None, None, None)
    if sum(map(bool, given)) != 1 or not has_length or world_size % derived.model_parallel_size(config):
        return
    lengths = derived.rate_lengths(optimizer, derived.run_length(config, world_size))
    room = lengths.decay - lengths.warmup
    if 0 < room < lengths.fall:
        flag = "--lr-wsd-decay-" + ("samples" if lengths.unit == "samples" else "iters")
        yield Problem(
            f"--lr-wsd-decay-{'iters' if given[0] else 'samples'} {given[0] or given[1]}",
            f"the fall begins after the warm-up: the {lengths.decay:,.12g} {lengths.unit} of the decay without the"
            f" {lengths.warmup:,.12g} of the warm-up",
            f"{flag} {max(math.floor(room), 1)}",
        )


def weight_decay_has_both_ends(config: RunConfig, world_size: int) -> Iterator[Problem]:
    style = config.optimizer.weight_decay_incr_style
    start, end = config.optimizer.start_weight_decay, config.optimizer.end_weight_decay
    if style == "constant":
        return
    for flag, value in (("--start-weight-decay", start), ("--end-weight-decay", end)):
        if value is None:
            yield Problem(
                f"--weight-decay-incr-style {style} without {flag}", "weight decay has both ends", f"{flag} X"
            )
    if start is not None and end is not None and start > end:
        given = f"--start-weight-decay {start:g} --end-weight-decay {end:g}"
        yield Problem(given, "weight decay increases", f"--start-weight-decay {end:g}, --end-weight-decay {start:g}")


def schedule_has_one_source(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.optimizer.override_opt_param_scheduler and config.optimizer.use_checkpoint_opt_param_scheduler:
        yield Problem(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler",
            "the schedule is taken from here or from the checkpoint",
            "one of the two",
        )


# --- ZeRO and precision ----------------------------------------------------------------------------------------------


def _with_flags(rule: StateRule) -> Rule:
    """Turn a rule between two sections into a rule of the run, whose messages spell settings as flags."""

    @functools.wraps(rule)
    def of_the_run(config: RunConfig, world_size: int) -> Iterable[Problem]:
        return rule(config.zero, config.precision, lambda name: "--" + name.replace("_", "-"))

    return of_the_run


def optimizer_fits_its_states(config: RunConfig, world_size: int) -> Iterable[Problem]:
    choice = choose_for_run(config.optimizer, Diagnostics())
    return optimizer_fits(
        choice.type,
        choice.params,
        f"--optimizer {config.optimizer.optimizer}",
        config.zero,
        config.precision,
        lambda setting: "--" + setting.replace("_", "-"),
    )


def shard_groups_divide_replicas(config: RunConfig, world_size: int) -> Iterable[Problem]:
    if world_size % derived.model_parallel_size(config):
        return ()  # the layout has a problem of its own
    size = derived.data_parallel_size(config, world_size)
    return shard_groups_are_equal(config.zero, size, lambda name: "--" + name.replace("_", "-"))


def profile_has_steps(config: RunConfig, world_size: int) -> Iterator[Problem]:
    logging = config.logging
    if not logging.profile:
        return
    start, end = logging.profile_step_start, logging.profile_step_end
    if start >= end:
        given = f"--profile-step-start {start} --profile-step-end {end}"
        rule = "the steps after the start are profiled, up to the end"
        yield Problem(given, rule, f"--profile-step-end {start + 1}")
    for word in logging.profile_ranks:
        if not word.isdecimal() or int(word) >= world_size:
            yield Problem(f"--profile-ranks {word}", f"the job has ranks 0 to {world_size - 1}", "--profile-ranks 0")
    if logging.use_pytorch_profiler and derived.profile_folder(config) is None:
        rule = "traces are written below --tensorboard-dir or --save, and neither is there"
        yield Problem("--use-pytorch-profiler", rule, "--tensorboard-dir DIR, --save DIR")


RULES: tuple[Rule, ...] = (
    profile_has_steps,
    heads_divide_hidden_size,
    groups_divide_heads,
    padding_holds_the_vocabulary,
    rotary_width_is_even,
    there_is_one_activation,
    tensor_parallel_divides_heads,
    tensor_parallel_divides_ffn,
    positions_cover_sequence,
    layout_divides_world,
    backend_fits_device,
    flash_takes_no_mask,
    deterministic_attention_is_not_cudnns,
    ledger_watches_uncompiled_blocks,
    recorded_passes_stay_in_place,
    timed_kernels_differ,
    timed_hops_differ,
    flash3_drops_nothing,
    batch_sizes_are_read,
    micro_batches_fill_global_batch,
    micro_batches_fill_every_batch,
    length_is_given_once,
    length_is_a_step,
    untrained_steps_ascend,
    last_step_trains,
    profiled_steps_train,
    optimizer_takes_its_parameters,
    lr_is_above_its_start,
    lr_is_above_its_end,
    warmup_is_given_once,
    decay_is_given_once,
    warmup_ends_before_decay,
    decoupled_lr_is_above_its_ends,
    wsd_has_a_fall,
    weight_decay_has_both_ends,
    schedule_has_one_source,
    *map(_with_flags, STATE_RULES),
    optimizer_fits_its_states,
    shard_groups_divide_replicas,
    *pipeline_rules.RULES,
    *activation_rules.RULES,
    *float8_rules.RULES,
    *ADAPTER_RULES,
    *CURRICULUM_RULES,
    *file_rules.CORPUS_RULES,
    file_rules.folders_are_folders,
    file_rules.no_kill_switch_is_there,
    file_rules.reports_can_be_written,
    file_rules.weights_are_loaded_from_a_folder,
    file_rules.kept_steps_are_saved,
)
