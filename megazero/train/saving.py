"""Checkpoints of a run: the progress saved beside the engine's state, and the checks of a run that resumes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.background import BackgroundSave, host_copies
from megazero.checkpoint.engine_state import numbers_entry, numbers_of_all, saved_fragments
from megazero.checkpoint.fallback import Taken, first_complete, refusal
from megazero.checkpoint.folder_lock import FolderLock
from megazero.checkpoint.manifest import WIRES
from megazero.checkpoint.reader import Checkpoint
from megazero.checkpoint.retention import ALL_STAY, Retention
from megazero.checkpoint.runs import PROGRESS_KEY, RunIdentity, new_run, write_run
from megazero.checkpoint.space import check_space, saved_bytes
from megazero.checkpoint.state import TrainState
from megazero.checkpoint.wires import largest_wire_bytes
from megazero.checkpoint.writer import Draft, save
from megazero.comm.mesh import Mesh
from megazero.command_line.parse import from_yaml
from megazero.config import derived
from megazero.config.derived import ffn_hidden_size, max_position_embeddings
from megazero.config.model import LORA_TARGETS, ModelConfig
from megazero.config.run import FIELDS, CheckpointConfig, RunConfig
from megazero.errors import CheckpointError, ConfigError, Problem, raise_problems
from megazero.files import written_aside
from megazero.parallel.param_spec import StateFragment, StateKind, named_specs
from megazero.tensor_parallel.float8_scales import PROGRESS_KEY as SCALES_KEY
from megazero.tensor_parallel.float8_scales import DelayedScales
from megazero.train.start.resume_point import find_start
from megazero.zero.engine import Engine

# The entry of a checkpoint's progress with the run's place in its corpora (data/position.py).
PLACE_KEY = "corpora"


@dataclass(frozen=True)
class Saver:
    """A writer of one run's checkpoints under `root`.

    extra: entries of a checkpoint's progress beside the counters, unchanged through the run.
    saved_iteration: the iteration that the run was resumed from, if that checkpoint lies under `root`.
    lock: the lock of `root`, on rank 0.  scales: those of delayed scaling, None without it.
    background: what saves beside training; None: training waits.
    """

    root: Path
    run: RunIdentity
    engine: Engine
    mesh: Mesh
    config_yaml: str
    extra: Mapping[str, Any]
    with_optimizer: bool
    saved_iteration: int | None = None
    lock: FolderLock | None = None
    retention: Retention = ALL_STAY
    scales: DelayedScales | None = None
    background: BackgroundSave | None = None

    def check_space(self, steps: Sequence[int], kinds: Sequence[StateKind]) -> str:
        """Compare the free space under `root` with the checkpoints of these steps, on all ranks; return a notice.

        kinds: the optimizer's kinds of state.  Raises CheckpointError if the run cannot save.
        """
        fragments = saved_fragments(self.engine, with_optimizer=self.with_optimizer)
        of_parameters = (fragment for fragment in fragments if fragment.kind != WIRES)
        own_bytes = saved_bytes(of_parameters, kinds if self.with_optimizer else ())
        own_bytes += largest_wire_bytes(self.engine) if self.with_optimizer else 0
        return check_space(
            self.root,
            own_bytes,
            steps,
            retention=self.retention,
            run=self.run,
            control=self.mesh.control,
        )

    def begin(self) -> None:
        """Write the run and its configuration to `root`, for a run that ends before its first checkpoint.

        A collective call.
        """

        def write() -> None:
            with written_aside(self.root / "config.yaml") as stream:
                stream.write(self.config_yaml.encode())
            write_run(self.root, self.run)

        leads = self.mesh.rank == 0
        doing = f"writing to {self.root}"
        all_or_none(self.mesh.control, lambda: write() if leads else None, doing=doing)

    def close(self) -> None:
        """Let other jobs write to `root`, once nothing is written any more; a second call does nothing."""
        held = ExitStack()
        if self.lock is not None:
            held.callback(self.lock.release)
        if self.background is None:
            held.close()
        else:
            self.background.release_behind(held)

    def save(self, state: TrainState) -> Path | None:
        """Write one checkpoint, on all ranks together; return its folder, None if it is saved beside training.

        `background.finish` comes before this call then.
        """
        self.engine.publish_late()  # a run that goes on from here begins with what is saved
        self.engine.ensure_parameters()
        progress = {**state.to_json(), **self.extra, PROGRESS_KEY: self.run.to_json()}
        progress |= numbers_entry(numbers_of_all(self.engine, control=self.mesh.control))
        if self.scales is not None:
            progress[SCALES_KEY] = self.scales.to_json()
        draft = Draft(self.root, state.iteration, progress, self.config_yaml, self.lock, self.retention)
        fragments = saved_fragments(self.engine, with_optimizer=self.with_optimizer)
        if self.background is None:
            return save(draft, fragments, control=self.mesh.control)
        self.background.begin(draft, host_copies(fragments, self.engine.settings.ledger), ExitStack())
        return None


def choose_run(config: CheckpointConfig, mesh: Mesh) -> RunIdentity:
    """Return the run that this start goes on with or begins; a collective call, for a run with --save.

    Rank 0 checks again whose checkpoints are there, since another job may have saved after the first check.
    """

    def choose() -> dict[str, str]:
        return (find_start(config).run or new_run()).to_json()

    doing = f"reading {config.save}"
    reports = all_or_none(mesh.control, lambda: choose() if mesh.rank == 0 else None, doing=doing)
    return RunIdentity(**reports[0])


def run_going_on(config: CheckpointConfig, source: Checkpoint | None) -> RunIdentity:
    """Return the run of a start without --save: that of the checkpoint it goes on from, or a new one."""
    saved = None if source is None or config.finetune else source.progress.get(PROGRESS_KEY)
    return RunIdentity.from_json(saved) or new_run()


def is_from_root(checkpoint: Checkpoint | None, root: Path) -> bool:
    """Return True if the checkpoint is one of the step folders under `root`."""
    return checkpoint is not None and checkpoint.folder.resolve() in root.resolve().glob("step_*")


def changed_settings(checkpoint: Checkpoint, config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield each setting whose value differs from the one that the checkpoint was saved with, for the journal."""
    try:
        saved = from_yaml(checkpoint.config_yaml, origin=str(checkpoint.folder))
    except ConfigError:  # a checkpoint of another version, whose settings this one cannot read
        return
    for info in FIELDS:
        before, now = (getattr(getattr(each, info.section), info.name) for each in (saved, config))
        if before != now:
            yield {"setting": info.name, "from": before, "to": now}


def find_checkpoint(config: CheckpointConfig) -> Taken | None:
    """Open the checkpoint of --load; None if there is none, as at the first start of a run that resumes itself.

    Those that are damaged are passed over, which a start reports once it has read the data; with --strict-load they are
    an error.
    """
    if config.load is None:
        return None
    found = first_complete(config.load, lambda each: check_progress(each, config))
    if found is not None and config.strict_load and not found.is_newest:
        raise refusal(found, config.load, is_read=False)
    return found


def check_progress(checkpoint: Checkpoint, config: CheckpointConfig) -> None:
    """Raise DamageError if the counters of the checkpoint, if they are taken, cannot be those of a run."""
    if not config.finetune:
        TrainState.from_json(checkpoint.progress, step=checkpoint.step)


def check_compatible(checkpoint: Checkpoint, *, seed: int, seq_length: int) -> None:
    """Raise CheckpointError if the seed has changed, since a resumed run takes the samples that follow.

    The sequence length may change too where the checkpoint has a place in corpora.
    """
    found = {"seed": checkpoint.progress.get("seed"), "seq_length": checkpoint.progress.get("seq_length")}
    given = {"seed": seed, "seq_length": seq_length}
    if PLACE_KEY in checkpoint.progress:
        del given["seq_length"]
    raise_problems(
        CheckpointError,
        (
            Problem(
                f"--{name.replace('_', '-')} {given[name]}; {checkpoint.folder} was saved with {found[name]}",
                "a resumed run goes on with the samples it began with",
                f"--{name.replace('_', '-')} {found[name]}, or --finetune to start a new run from its weights",
            )
            for name in given
            if found[name] != given[name]
        ),
    )


def check_model(checkpoint: Checkpoint, model: ModelConfig, *, goes_on: bool) -> None:
    """Raise CheckpointError with the settings that give the model another shape than the saved one has.

    goes_on: whether the saved run goes on; another one may begin from its parameters with other rotary positions, and
    adapters where it had none.
    `check_shapes` finds the same mismatch tensor by tensor, without the settings that cause it.
    """
    try:
        saved = from_yaml(checkpoint.config_yaml, origin=str(checkpoint.folder)).model
    except ConfigError:  # a checkpoint of another version, whose settings this one cannot read
        return
    before = dict(_shaping_settings(saved, goes_on=goes_on))
    if saved.lora_rank == 0 and model.lora_rank and not goes_on:
        before = {flag: value for flag, value in before.items() if not flag.startswith("--lora-")}
    differ = {
        flag: (value, before[flag])
        for flag, value in _shaping_settings(model, goes_on=goes_on)
        if flag in before and value != before[flag]
    }
    if "--hidden-size" in differ and model.ffn_hidden_size is None:
        differ.pop("--ffn-hidden-size", None)  # derived from the hidden size
    raise_problems(
        CheckpointError,
        (
            Problem(
                f"{flag} {value}; {checkpoint.folder} was saved with {found}",
                "a checkpoint's parameters fit a model of the same shape",
                f"{flag} {found}, or another --load",
            )
            for flag, (value, found) in differ.items()
        ),
    )


class _Setting(NamedTuple):
    flag: str
    value: int | float | bool | str | None


_ROTARY = (
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
)
_KINDS = (
    "normalization",
    "swiglu",
    "squared_relu",
    "disable_bias_linear",
    "qk_layernorm",
    "embed_layernorm",
)


def _shaping_settings(model: ModelConfig, *, goes_on: bool) -> Iterator[_Setting]:
    """Yield the settings that determine the model, with derived values for those that were left out.

    Most determine parameters' shapes; by the others the same parameters would compute something else.
    """
    yield _Setting("--num-layers", model.num_layers)
    yield _Setting("--hidden-size", model.hidden_size)
    yield _Setting("--num-attention-heads", model.num_attention_heads)
    yield _Setting("--ffn-hidden-size", ffn_hidden_size(model))
    yield _Setting("--kv-channels", derived.head_width(model))
    yield _Setting("--num-query-groups", derived.num_key_value_heads(model))
    yield _Setting("--position-embedding-type", model.position_embedding_type)
    if model.position_embedding_type == "learned_absolute":
        positions = "--seq-length" if model.max_position_embeddings is None else "--max-position-embeddings"
        yield _Setting(positions, max_position_embeddings(model))
    if model.position_embedding_type == "rope" and goes_on:
        for name in _ROTARY:
            yield _Setting(f"--{name.replace('_', '-')}", getattr(model, name))
    for name in _KINDS:
        yield _Setting(f"--{name.replace('_', '-')}", getattr(model, name))
    yield _Setting("--add-qkv-bias", derived.has_qkv_bias(model))
    yield _Setting("--lora-rank", model.lora_rank)
    if model.lora_rank:
        yield _Setting("--lora-alpha", float(model.lora_rank if model.lora_alpha is None else model.lora_alpha))
        yield _Setting("--lora-targets", " ".join(target for target in LORA_TARGETS if target in model.lora_targets))
    yield _Setting("--vocab-size", model.vocab_size)
    yield _Setting("--untie-embeddings-and-output-weights", model.untie_embeddings_and_output_weights)


def check_shapes(
    checkpoint: Checkpoint, model: nn.Module, *, kinds: Sequence[StateKind], without: Collection[str] = ()
) -> None:
    """Raise CheckpointError unless checkpoint and model have the same parameters; no tensor is read.

    kinds: the kinds of state that the run restores, "weight" among them; a frozen parameter has no other.
    without: names of parameters that the checkpoint need not have.
    """
    parameters = [(spec, parameter) for spec, parameter in named_specs(model) if spec.name not in without]
    names = {spec.name for spec, _ in parameters}
    unknown = (name for name in checkpoint.parameters if name not in names)
    raise_problems(
        CheckpointError,
        (Problem(f"{name} in {checkpoint.folder}", "the model has no such parameter") for name in unknown),
    )
    checkpoint.check(
        StateFragment(spec, kind, 0, spec.numel, parameter.detach().view(-1))
        for spec, parameter in parameters
        for kind in (kinds if spec.trainable else ("weight",))
    )
