"""Convert checkpoints to Hugging Face models, and back: GPT-2, Llama, Mistral, Qwen 2 and 3, BLOOM, Falcon.

megazero convert export --load runs/demo --output runs/demo_hf
megazero convert import --input gpt2/ --save runs/gpt2    (to train on: --load runs/gpt2 --finetune)

Checkpoints of Megatron-LM (torch_dist and legacy) and DeepSpeed's universal ones are imported too (docs/importing.md).
"""

import argparse
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megazero.checkpoint.folders import list_steps
from megazero.checkpoint.state import TrainState
from megazero.command_line.parse import from_yaml
from megazero.command_line.tools import Flags, Number
from megazero.config.derived import max_position_embeddings
from megazero.config.engine_sections import OptimizerConfig
from megazero.config.model import ModelConfig
from megazero.config.run import DataConfig, RunConfig, TrainingConfig
from megazero.config.yaml_file import to_yaml
from megazero.console import Console
from megazero.data.tokenizers import HUGGING_FACE, TokenizerSpec, load_tokenizer
from megazero.data.transformers_tokenizer import files_for_transformers
from megazero.errors import CheckpointError, Problem, UserError
from megazero.optim.loss_scaler import LossScale
from megazero.prepare.arguments import TOKENIZER_FLAGS, add_tokenizer_arguments, with_tokenizer_flags
from megazero.train.start.inputs import tokenizer_of_run
from megazero.units import format_count

if TYPE_CHECKING:
    from megazero.parallel.param_spec import StateFragment

# The folder, beside an imported model's checkpoint, for the files of its tokenizer.
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_HOLDS = (
    "has config.json (transformers), latest_checkpointed_iteration.txt, .metadata or mp_rank_* (Megatron-LM), or"
    " latest_universal or zero/ (DeepSpeed's universal checkpoint)"
)
_MADE_FROM_ZERO = "one of these; DeepSpeed's ds_to_universal.py makes the last of its *_optim_states.pt"
DTYPES = ("float64", "float32", "bfloat16", "float16")


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(
        prog="megazero convert",
        description="Convert checkpoints to and from Hugging Face models.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", allow_abbrev=False, help="write a model that transformers loads")
    export.add_argument("--load", type=Path, required=True, metavar="DIR", help="a run's checkpoints, or one of them")
    export.add_argument(
        "--step", action=Number, kind="int", metavar="N", help="step of the run; without it, the newest"
    )
    export.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to make")
    export.add_argument("--dtype", choices=DTYPES, help="number format; without it, the checkpoint's")
    tokenizer = export.add_argument_group("tokenizer", "where the run names none, or its files are gone")
    add_tokenizer_arguments(tokenizer, required=False)
    imports = commands.add_parser(
        "import", allow_abbrev=False, help="make a checkpoint of a model of transformers, Megatron-LM or DeepSpeed"
    )
    imports.add_argument("--input", type=Path, required=True, metavar="DIR", help="folder of the model")
    imports.add_argument("--save", type=Path, required=True, metavar="DIR", help="folder of the run's checkpoints")
    others = imports.add_argument_group("checkpoints of Megatron-LM and DeepSpeed")
    others.add_argument(
        "--vocab-size", action=Number, kind="int", metavar="N", help="ids of the tokenizer; without it, padding stays"
    )
    others.add_argument("--weights-only", action="store_true", help="leave the optimizer's states, begin at step 0")
    return parser.parse_args(words)


class Exported(NamedTuple):
    """The tokenizer's part in an exported model: the end-of-document id, files by name, a line about them."""

    eod: int | None
    files: dict[str, str]
    line: str


def export_tokenizer(config: RunConfig, options: argparse.Namespace, *, vocab_size: int) -> Exported:
    """Convert the run's tokenizer, or that of the flags, which has to be there; that of a run need not."""
    eod = None
    try:
        tokenizer = tokenizer_of_run(with_tokenizer_flags(config.data, options), vocab_size=vocab_size)
        eod = tokenizer.eod
        files = files_for_transformers(tokenizer, longest=max_position_embeddings(config.model))
    except UserError as error:
        if eod is None and any(getattr(options, name) is not None for name in TOKENIZER_FLAGS):
            raise
        return Exported(eod, {}, f"no tokenizer: {'; '.join(f'{each.given}: {each.rule}' for each in error.problems)}")
    return Exported(eod, files, f"{type(tokenizer).__name__}, for transformers' AutoTokenizer.from_pretrained")


def import_tokenizer(source: Path, folder: Path, *, vocab_size: int) -> tuple[DataConfig, str]:
    """Copy a Hugging Face model's tokenizer to a folder, and return the settings that name it, and a line about it.

    Without a tokenizer.json that megazero reads, of no more ids than the model's, nothing is copied.
    """
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    try:
        tokenizer = load_tokenizer(TokenizerSpec(HUGGING_FACE, tokenizer_model=str(source)))
    except UserError as error:
        return DataConfig(), f"no tokenizer: {'; '.join(f'{each.given}: {each.rule}' for each in error.problems)}"
    if tokenizer.vocab_size > vocab_size:
        return DataConfig(), f"no tokenizer: that of {source} has {tokenizer.vocab_size} ids"
    folder.mkdir(parents=True, exist_ok=True)
    for name in found:
        shutil.copyfile(source / name, folder / name)
    return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder.absolute()), f"tokenizer: {folder}"


def export_command(options: argparse.Namespace, console: Console) -> None:
    """Convert a checkpoint to a Hugging Face model."""
    import torch

    from megazero.checkpoint.hugging_face.conversion import export_model
    from megazero.checkpoint.reader import open_complete
    from megazero.generate.session import saved_vocab_size

    checkpoint = open_complete(options.load, step=options.step)
    config = from_yaml(checkpoint.config_yaml, origin=f"the configuration in {checkpoint.folder}")
    tokenizer = export_tokenizer(config, options, vocab_size=saved_vocab_size(checkpoint))
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    architecture = export_model(
        checkpoint, config.model, options.output, dtype=dtype, eod=tokenizer.eod, files=tokenizer.files
    )
    if config.model.lora_rank:
        console.line(f"adapters of rank {config.model.lora_rank} are merged into the weights beside them")
    console.line(f"{options.output}: step {checkpoint.step}, for transformers' {architecture}.from_pretrained")
    console.line(tokenizer.line)


def import_command(options: argparse.Namespace, console: Console) -> None:
    """Convert a model of another project to a checkpoint.

    It belongs to no run: it names none.  One of step 0 has weights, and placeholders of training settings; a run begins
    from it by --finetune.  With the optimizer's states it is of a later step, from which --load goes on.
    """
    from megazero.checkpoint.foreign.model import find_foreign
    from megazero.checkpoint.hugging_face.conversion import CONFIG_FILE

    if steps := list_steps(options.save):
        given = f"--save {options.save}, which has {steps[-1].path.name}"
        raise CheckpointError(Problem(given, "an imported model is step 0 of a new run", "another folder"))
    if (options.input / CONFIG_FILE).exists():
        if options.vocab_size is not None or options.weights_only:
            given = f"--vocab-size or --weights-only, with --input {options.input}"
            raise CheckpointError(Problem(given, "are for checkpoints of Megatron-LM and DeepSpeed, not transformers'"))
        _import_transformers(options, console)
    elif (found := find_foreign(options.input)) is not None:
        _import_foreign(options, found, console)
    else:
        raise CheckpointError(Problem(f"--input {options.input}", _HOLDS, _MADE_FROM_ZERO))


def _import_transformers(options: argparse.Namespace, console: Console) -> None:
    from megazero.checkpoint.hugging_face.conversion import read_model

    imported = read_model(options.input)
    data, line = import_tokenizer(options.input, options.save / TOKENIZER_FOLDER, vocab_size=imported.vocab_size)
    config = _run_of(imported.config, data)
    fragments = list(imported.weights.fragments())
    folder = _save(options.save, config, fragments, TrainState(LossScale(1.0)).to_json())
    _report(folder, fragments, imported.vocab_size, console)
    console.line(line)


def _import_foreign(options: argparse.Namespace, source: Path, console: Console) -> None:
    from megazero.checkpoint.foreign.model import read_foreign

    model = read_foreign(source, vocab_size=options.vocab_size, with_optimizer=not options.weights_only)
    config = _run_of(model.config, DataConfig(), seed=model.seed)
    fragments = list(model.fragments())
    beside = {"seed": config.training.seed, "seq_length": config.model.seq_length, "optimizer": "AdamW"}
    folder = _save(options.save, config, fragments, {**model.progress.to_json(), **beside})
    _report(folder, fragments, model.vocab_size, console)
    if len(model.states) > 1:
        done = model.progress
        console.line(
            f"with master weights and both moments of step {done.iteration}, after {done.consumed_samples} samples:"
            f" --load {options.save} goes on from there, --seed {config.training.seed}"
        )
    for note in model.notes:
        console.line(note)


def _run_of(model: ModelConfig, data: DataConfig, *, seed: int | None = None) -> RunConfig:
    """Return the configuration of a run of an imported model, with placeholders of what only trains."""
    training = TrainingConfig(micro_batch_size=1, train_iters=1)
    if seed is not None:
        training = replace(training, seed=seed)
    return RunConfig(model=model, data=data, training=training, optimizer=OptimizerConfig(lr=1e-5))


def _save(root: Path, config: RunConfig, fragments: "list[StateFragment]", progress: Mapping[str, Any]) -> Path:
    from megazero.checkpoint.writer import Draft, save
    from megazero.comm.local import LocalCommunicator

    draft = Draft(root, progress["iteration"], progress, to_yaml(config))
    return save(draft, fragments, control=LocalCommunicator())


def _report(folder: Path, fragments: "list[StateFragment]", vocab_size: int, console: Console) -> None:
    total = sum(math.prod(each.spec.full_shape) for each in fragments if each.kind == "weight")
    console.line(f"{folder}: {format_count(total)} parameters, vocabulary {vocab_size}")


def main(words: Sequence[str]) -> None:
    """Run one command."""
    options = parse_arguments(words)
    {"export": export_command, "import": import_command}[options.command](options, Console())
