"""Trains a small GPT on text with settings that are not exact, and beside them exactly, on the same samples.

    python benchmarks/quality.py --data-path PREFIX --variants exact late [--steps 1000] [--output FILE.md]
    python benchmarks/quality.py --data-path PREFIX --stage 3 --variants exact "weights 8" "gradients 4"

PREFIX is a corpus as `megazero preprocess` writes it, such as the quickstart's, `runs/quickstart/corpus_text_document`.
Every variant is a job of its own with the same model, seed and samples, one after the other; losses of validation are
means over the same samples too.  Beside FILE.md a picture of the losses is drawn, FILE.svg: of the first variants, as
many as there are colours.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np
from report import argument_parser, heading, paragraph, publish, table, tell

from megazero.report.history import History, read_history
from megazero.report.pictures.chart import CURVES_SIZE, PALETTE, PlottedCurve, curve_parts
from megazero.svg import picture

ROOT = Path(__file__).parents[1]
# By name: what is added to the command line of the exact run.
VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "exact": "",
        "late": "--offload-optimizer cpu --delayed-parameter-update",
        "late from the first step": (
            "--offload-optimizer cpu --delayed-parameter-update --delayed-parameter-update-start 0"
        ),
        "weights 8": "--zero-quantized-weights",
        "weights 4": "--zero-quantized-weights --zero-quantized-weights-bits 4",
        "gradients 8": "--zero-quantized-gradients --zero-quantized-gradients-bits 8",
        "gradients 4": "--zero-quantized-gradients",
        "gradients 4, stochastic": "--zero-quantized-gradients --zero-quantized-stochastic",
        "gradients 4, fed back": "--zero-quantized-gradients --zero-error-feedback",
        "both": "--zero-quantized-weights --zero-quantized-gradients",
        "both, fed back": "--zero-quantized-weights --zero-quantized-gradients --zero-error-feedback",
        "moments 8": "--optimizer adamw8bit",
    }
)
_SHAPE = (
    "--num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 256 --max-position-embeddings 256"
    " --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4 --global-batch-size 8"
)
_RECIPE = (
    "--lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95"
    " --clip-grad 1.0 --seed 1234 --split 950,50,0"
)
_SPLIT = "validation"
_WIDTH = 25  # steps of a mean in the picture


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--data-path", type=Path, required=True, help="prefix of the corpus")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="what is trained")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each")
    parser.add_argument("--eval-interval", type=int, default=250, help="steps between two validations")
    parser.add_argument("--processes", type=int, default=2, help="processes of each job")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak of the learning rate; a tenth of it is the end")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="number format")
    parser.add_argument("--folder", type=Path, help="folder of metrics; what is there already is not trained again")
    return parser.parse_args(words)


def train(name: str, arguments: argparse.Namespace, folder: Path) -> History:
    """Train one variant, unless its metrics are there, and return its history."""
    metrics = folder / f"{name.replace(' ', '-')}.jsonl"
    if not metrics.exists():
        given = (
            f"{_SHAPE} {_RECIPE} --lr {arguments.lr} --min-lr {arguments.lr / 10} --zero-stage {arguments.stage}"
            f" --precision {arguments.precision} {VARIANTS[name]} --train-iters {arguments.steps}"
            f" --eval-interval {arguments.eval_interval} --eval-iters 20 --log-interval 100"
            f" --device {arguments.device}"
        )
        started = metrics.with_suffix(".part")
        started.unlink(missing_ok=True)
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--processes", str(arguments.processes)]
        command += ["--data-path", str(arguments.data_path), "--metrics-file", str(started), *given.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        started.rename(metrics)
    return read_history(metrics)


def rows_of(histories: Mapping[str, History], interval: int) -> list[list[str]]:
    """Return a row for each history: its losses of validation, and the last one's difference from the first row's."""
    found = []
    exact = dict(next(iter(histories.values())).evaluations[_SPLIT])
    for name, history in histories.items():
        evaluations = dict(history.evaluations[_SPLIT])
        last = max(evaluations)
        difference = evaluations[last] - exact[last]
        loss = history.figures["loss"]
        found.append(
            [
                name,
                *(f"{value:.4f}" for step, value in sorted(evaluations.items()) if step % interval == 0),
                f"{np.mean(loss[-100:]):.4f}",
                f"{difference:+.4f}",
                f"{100 * (math.exp(difference) - 1):+.2f}",
            ]
        )
    return found


def loss_picture(histories: Mapping[str, History]) -> str:
    """Return an SVG page of training losses, means over some steps each."""
    lines = []
    for name, history in islice(histories.items(), len(PALETTE)):
        count = len(history.iterations) // _WIDTH
        steps, losses = history.iterations[: count * _WIDTH], history.figures["loss"][: count * _WIDTH]
        mean = losses.reshape(count, _WIDTH).mean(1)
        lines.append(PlottedCurve(name, steps.reshape(count, _WIDTH)[:, -1].astype(np.float64), mean))
    return picture(*CURVES_SIZE, curve_parts("training loss", lines), label="training losses side by side")


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        histories = {}
        for name in arguments.variants:
            tell(f"{name} ...")
            histories[name] = train(name, arguments, folder)
    interval = arguments.eval_interval
    steps = [step for step, _ in next(iter(histories.values())).evaluations[_SPLIT] if step % interval == 0]
    header = ["variant", *(f"validation, step {step}" for step in sorted(set(steps)))]
    header += ["training, last 100 steps", "difference of the last validation", "of its perplexity, %"]
    words_of_page = (
        f"A GPT of 4 x 192 on {arguments.processes} processes, ZeRO stage {arguments.stage}, {arguments.steps} steps of"
        f" 8 x 256 tokens, learning rate {arguments.lr:g}. Each variant sees the same samples; differences are to"
        f" {arguments.variants[0]}."
    )
    title = heading("Training that is not exact, beside exact training", arguments.device, arguments.precision)
    publish([title, paragraph(words_of_page), table(header, rows_of(histories, interval))], arguments.output)
    if arguments.output is not None:
        arguments.output.with_suffix(".svg").write_text(loss_picture(histories))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
