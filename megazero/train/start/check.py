"""The checks of a run that need neither torch nor other ranks, so that mistakes are reported at once.

Loading torch is the slowest part of a start.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from megazero.checkpoint.folders import step_of
from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.errors import ConfigError, Problem, TopologyError, UserError, raise_problems
from megazero.parallel.data_axis import data_axis
from megazero.parallel.launch import Launch
from megazero.parallel.nodes import Nodes, problems_of_placement
from megazero.parallel.topology import Topology, parse_order
from megazero.report.metrics_file import problem_of_run
from megazero.rules import run as rules
from megazero.rules.trackers import missing_packages
from megazero.train.start.inputs import RunInputs, find_tokenizer, open_inputs
from megazero.train.start.resume_point import Start, find_start


def check(config: RunConfig, launch: Launch) -> RunInputs:
    """Check rules between settings, the layout on its nodes, corpora, and whose checkpoints and metrics are there.

    Raises all problems at once; returns the opened corpora.  `build.check_checkpoint` checks a checkpoint afterwards.
    """
    errors: list[UserError] = []
    inputs = None
    with _gathering(errors):
        raise_problems(ConfigError, rules.check(config, launch.world_size))
    with _gathering(errors):
        raise_problems(ConfigError, missing_packages(config.reports, _as_flag))
    if not errors:
        with _gathering(errors):
            raise_problems(TopologyError, _placement_problems(config, launch))
        with _gathering(errors):
            raise_problems(ConfigError, _figures_of_another_run(config, find_start(config.checkpoint)))
    if rules.corpus_is_named(config, launch.world_size):
        with _gathering(errors):
            inputs = _open_inputs(config)
    _raise_together(errors)
    assert inputs is not None, "inputs that could not be opened were an error"
    return inputs


def topology(config: RunConfig, world_size: int, nodes: Nodes | None = None) -> Topology:
    """Return the layout of the job; ranks that tensor and pipeline parallelism do not use are data parallel.

    nodes: those that the ranks are on; None: one.
    """
    whole = Topology(
        tp=config.parallel.tensor_model_parallel_size,
        dp=derived.data_parallel_size(config, world_size),
        pp=config.parallel.pipeline_model_parallel_size,
        order=parse_order(config.parallel.rank_order),
    )
    return data_axis(config.zero, whole, nodes)


def _placement_problems(config: RunConfig, launch: Launch) -> Iterable[Problem]:
    layout = topology(config, launch.world_size)
    return problems_of_placement(layout, launch.nodes, config.parallel.allow_tensor_parallel_across_nodes)


def _figures_of_another_run(config: RunConfig, start: Start) -> Iterator[Problem]:
    """Yield a problem if a run that goes on after some steps would go on with the metrics file of another one."""
    path, source = config.logging.metrics_file, start.source
    begins = source is None or config.checkpoint.finetune or step_of(source.name) == 0
    run = "" if start.run is None else start.run.id
    if path is not None and not begins and (problem := problem_of_run(path, run)):
        yield problem


def _as_flag(setting: str, value: object) -> str:
    return f"--{setting.replace('_', '-')} {value}"


@contextmanager
def _gathering(errors: list[UserError]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        errors.append(error)


def _raise_together(errors: Sequence[UserError]) -> None:
    """Raise one error with all problems, of their common class if they have one."""
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else UserError
    raise_problems(kind, (problem for error in errors for problem in error.problems))


def _open_inputs(config: RunConfig) -> RunInputs:
    evaluates = config.training.eval_iters > 0
    inputs = open_inputs(config.data, config.model, seed=config.training.seed, evaluates=evaluates)
    known = replace(config, model=replace(config.model, vocab_size=inputs.vocab_size))
    raise_problems(ConfigError, rules.padding_holds_the_vocabulary(known, 1))
    if config.logging.eval_sample_tokens and find_tokenizer(config.data) is None:
        given, legal = f"--eval-sample-tokens {config.logging.eval_sample_tokens}", "--tokenizer-type ... and its files"
        rule = "a tokenizer makes text of tokens, and the corpus's .json names none whose files are still there"
        raise ConfigError(Problem(given, rule, legal))
    if inputs.eod is None:
        raise_problems(ConfigError, _settings_needing_eod(config))
    raise_problems(ConfigError, _settings_needing_document_ends(config, inputs.unended))
    return inputs


def _settings_needing_eod(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for every setting that needs an end-of-document token, which is not known."""
    data = config.data
    requested = {
        "--eod-mask-loss": data.eod_mask_loss,
        "--reset-position-ids": data.reset_position_ids,
        "--reset-attention-mask": data.reset_attention_mask,
    }
    rule = "the end-of-document token is known from a tokenizer or the corpus's .json"
    for flag in (flag for flag, is_requested in requested.items() if is_requested):
        yield Problem(flag, rule, f"--tokenizer-type ..., or no {flag}")


def _settings_needing_document_ends(config: RunConfig, unended: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for every setting that has no effect on a corpus without ends of documents."""
    data = config.data
    requested = {"--reset-position-ids": data.reset_position_ids, "--reset-attention-mask": data.reset_attention_mask}
    for flag in (flag for flag, is_requested in requested.items() if is_requested):
        for prefix in unended:
            given = f"{flag} with {prefix}, made without --append-eod"
            yield Problem(given, "documents are separated by the token at their ends", "preprocess with --append-eod")
