"""Tests that a problem names the file, the preset or the spelling that its settings come from."""

from support.each import each

from megazero.command_line.sources import with_sources
from megazero.errors import Problem

SOURCES = {
    "hidden_size": "--preset gpt2-124m: hidden_size 768",
    "num_attention_heads": "--num_attention_heads=7",
    "min_lr": "ds.json: scheduler.params.cos_min_ratio: 2 x --lr 1e-3",
    "tensor_model_parallel_size": "--model-parallel-size 3",
    "train_iters": "--train-iters 5",
    "finetune": "--finetune",
}


@each(
    ("given", "expected"),
    [
        ("--train-iters 5 and --finetune", ""),
        (
            "--hidden-size 768 --num-attention-heads 7",
            "; --hidden-size comes from --preset gpt2-124m: hidden_size 768",
        ),
        (
            "--tensor-model-parallel-size 3",
            "; --tensor-model-parallel-size comes from --model-parallel-size 3",
        ),
        ("--log-interval 100", "; --log-interval has its default"),
        ("--log-interval 1000", ""),
        ("neither --train-samples nor --data-path", ""),
        ("--zero-stage 1 --swiglu", "; --zero-stage has its default"),
        (f"{SOURCES['min_lr']} is no --min-lr", ""),
        ("ds.json: fp16.enabled: true", ""),
    ],
)
def test_what_was_given_names_its_source(given: str, expected: str) -> None:
    (problem,) = with_sources([Problem(given, "rule", "legal")], SOURCES)
    assert problem == Problem(given + expected, "rule", "legal")
