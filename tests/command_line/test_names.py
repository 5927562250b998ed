"""Tests of the names of flags, and of what is suggested in place of an unknown one."""

from support.each import each

from megazero.command_line.names import ALL_NAMES, suggest


@each(
    ("name", "expected"),
    [
        ("swiglo", "--swiglu"),
        ("lr", "--lr"),
        ("hiden_size", "--hidden-size"),
        ("num-layer", "--num-layers"),
        ("zero-stge", "--zero-stage"),
        ("beta1", "--adam-beta1"),
        ("learning-rate", "--lr"),
        ("max-steps", "--train-iters"),
        ("no-bias-gelu-fuson", "--no-bias-gelu-fusion"),
        ("LR", "--lr"),
    ],
)
def test_the_nearest_name_comes_first(name: str, expected: str) -> None:
    assert suggest(name).split(", ")[0] == expected


def test_the_beginning_of_a_name_is_enough() -> None:
    assert suggest("tensor").split(", ")[0] == "--tensor-model-parallel-size"
    assert suggest("recompute-g") == "--recompute-granularity"


@each("name", ["persist-layer-parameters", "frobnicate", "x", "", "-"])
def test_names_that_only_look_alike_are_not_suggested(name: str) -> None:
    assert suggest(name) == ""


def test_every_name_is_there_once() -> None:
    assert len(ALL_NAMES) == len({*ALL_NAMES}) > 300
