"""Tests of a report's text and of the axis that a pattern of differences points to, on made-up comparisons."""

import math
from dataclasses import replace

from support.each import each

from megazero.parallel.topology import Topology
from megazero.verify.verdict import (
    BOUNDS,
    CopyDifference,
    Figure,
    Parameter,
    Report,
    StepComparison,
    TensorDifference,
    copy_differences,
)

# The parameters of a model of two layers on two pipeline stages: name, stages, True if tensor parallelism cuts it.
MODEL = (
    ("embedding", (0, 1), True),
    ("0.norm", (0,), False),
    ("0.up", (0,), True),
    ("1.norm", (1,), False),
    ("1.up", (1,), True),
    ("final", (1,), False),
)
PARAMETERS = tuple(Parameter(name, (4,), stages, cut) for name, stages, cut in MODEL)
NAMES = [parameter.name for parameter in PARAMETERS]
SAME, OTHER = Figure(2.0, 2.0), Figure(2.5, 2.0)
COPY = CopyDifference("tp", "gradient", "1.norm", (0, 1))


def tensors(*wrong: str, factor: float | None = None) -> tuple[TensorDifference, ...]:
    return tuple(
        TensorDifference(name, 0.25, 0.5, 3, 4, factor)
        if name in wrong
        else TensorDifference(name, 1e-12, 1.0, 0, 4, 1.0)
        for name in NAMES
    )


def step(*wrong: str, number: int = 1, factor: float | None = None) -> StepComparison:
    return StepComparison(number, SAME, SAME, tensors(*wrong, factor=factor), ())


def report(*steps: StepComparison, weights: tuple[str, ...] = (), copies: tuple[CopyDifference, ...] = ()) -> Report:
    topology = Topology(tp=2, dp=2, pp=2)
    return Report(topology, "ZeRO stage 2", PARAMETERS, steps, tensors(*weights), copies, 14)


def hint(found: Report) -> str:
    (only,) = found.hints()
    return only


def test_agreement() -> None:
    found = report(step(), step(number=2))
    lines = list(found.lines())
    assert found.agrees
    assert lines[0] == "layout: pipeline 2 x data 2 x tensor 2 = 8 ranks, ZeRO stage 2"
    assert lines[2].split() == ["1", "2", "2", "0.0e+00", "2", "2", "0.0e+00"]
    assert "gradients: 6 parameters in 2 steps, largest difference 1.0e-12 (embedding, step 1)" in lines
    assert "copies on several ranks: 14 compared, none not the same" in lines
    assert lines[-2:] == [BOUNDS, "the layout computes what one process computes"]
    assert len({len(line) for line in lines[1:4]}) == 1


def test_the_first_difference_is_the_first_step_s_first_parameter() -> None:
    found = report(step(), step("0.up", "final", number=2), step(*NAMES, number=3))
    lines = list(found.lines())
    assert not found.agrees
    assert lines[-2] == (
        "FIRST DIFFERENCE: step 2, gradient of 0.up: differs by 0.25 at most, 5.0e-01 of 0.5, in 3 of 4 elements;"
        " 1 more parameter differs"
    )
    assert lines[-1] == "    step 1 agrees: the update of weights at its end, or their exchange between ranks"


@each(
    ("wrong", "expected"),
    [
        (("embedding",), "parameters shared by the first and the last pipeline stage differ"),
        (("1.norm", "final"), "their sum over the tensor axis"),
        (("embedding", "0.norm", "0.up"), "the gradients that pipeline stage 1 sends to 0"),
        (
            ("embedding", "0.norm"),
            "everything up to 0.norm differs and nothing behind it: the gradients that backward passes on",
        ),
        (("0.up",), "the reduction of the buckets that hold them"),
        (("0.up", "1.norm"), "the reduction of the buckets that hold them"),
    ],
)
def test_patterns_of_gradients(wrong: tuple[str, ...], expected: str) -> None:
    assert expected in hint(report(step(*wrong)))


def test_a_common_factor_is_one_of_all() -> None:
    assert "all gradients are 0.5 times as large: the data-parallel" in hint(report(step(*NAMES, factor=0.5)))
    assert "times as large" not in hint(report(step(*NAMES[1:], factor=0.5)))
    mixed = step(*NAMES, factor=0.5)
    gradients = (replace(mixed.gradients[0], factor=0.6), *mixed.gradients[1:])
    assert "times as large" not in hint(report(replace(mixed, gradients=gradients)))
    # A gradient that holds only rounding errors has no factor, and agrees.
    silent = TensorDifference("embedding", 1e-18, 1e-3, 0, 4, None)
    assert "0.5 times as large" in hint(report(replace(mixed, gradients=(silent, *mixed.gradients[1:]))))


def test_a_loss_that_differs_is_of_the_forward_pass() -> None:
    forward = replace(step(*NAMES), loss=OTHER)
    expected = "the sums over the tensor axis, the activations that one pipeline stage sends to the next, the samples"
    assert expected in hint(report(forward))
    assert hint(replace(report(forward), topology=Topology())).endswith("it is the forward pass: recomputation")
    assert report(replace(step(), loss=OTHER)).first_difference() == "step 1, loss: 2.5, 2.0 on one process"


def test_a_norm_that_differs_alone_is_of_its_sum() -> None:
    found = report(replace(step(), norm=OTHER))
    assert found.first_difference() == "step 1, gradient norm: 2.5, 2.0 on one process"
    assert "the sum of their squares" in hint(found)


def test_copies_that_differ() -> None:
    found = report(replace(step(), copies=(COPY,)))
    text = "step 1, gradient of 1.norm: the tensor-parallel copies on ranks 0 and 1 are not the same"
    assert found.first_difference() == text
    assert "the copy that is compared agrees" in hint(found)
    assert "copies on several ranks: 14 compared, 1 not the same" in list(found.lines())
    both = report(replace(step("0.up"), copies=(COPY,)))
    assert both.first_difference().startswith("step 1, gradient of 0.up: differs")
    assert both.first_difference().endswith("; 1 more parameter differs")


def test_weights_are_looked_at_last() -> None:
    found = report(step(), weights=("0.up", "1.up", "final"))
    assert found.first_difference().startswith("after step 1, weight of 0.up: differs by 0.25")
    assert found.first_difference().endswith("; 2 more parameters differ")
    assert "all gradients agree" in hint(found)
    copies = report(step(), copies=(replace(COPY, axis="dp", kind="weight"),))
    assert not copies.agrees and "the data-parallel copies" in copies.first_difference()


@each(
    ("here", "one", "agrees"),
    [
        (1.0, 1.0 + 1e-10, True),
        (1.0, 1.0 + 1e-8, False),
        (0.0, 0.0, True),
        (1e-30, 0.0, False),
        (math.nan, math.nan, False),
        (math.inf, 1.0, False),
        (1.0, math.inf, False),
    ],
)
def test_figures(here: float, one: float, agrees: bool) -> None:
    assert Figure(here, one).agrees is agrees


@each(
    ("largest", "scale", "agrees"),
    [(0.0, 0.0, True), (1e-10, 1.0, True), (1e-8, 1.0, False), (1e-30, 0.0, False), (math.inf, 1.0, False)],
)
def test_tensors(largest: float, scale: float, agrees: bool) -> None:
    assert TensorDifference("up", largest, scale, 0, 4).agrees is agrees


def test_copies_are_compared_along_their_axis() -> None:
    """Copies are compared along their axis: ranks 0 1 | 2 3 are tensor-parallel pairs, 0 2 | 1 3 data-parallel ones."""
    told = [
        {"tp": {"weight": {"norm": "a"}}, "dp": {"weight": {"norm": "a", "up": f"{rank % 2}"}}} for rank in range(4)
    ]
    topology = Topology(tp=2, dp=2)
    assert copy_differences(topology, told) == ()
    told[3]["tp"]["weight"]["norm"] = told[3]["dp"]["weight"]["up"] = "x"
    assert copy_differences(topology, told) == (
        CopyDifference("tp", "weight", "norm", (2, 3)),
        CopyDifference("dp", "weight", "up", (1, 3)),
    )


def test_ends_are_compared_in_pairs() -> None:
    told = [{"ends": {"gradient": {"embedding": word}}} for word in ("a", "-", "a")]
    assert copy_differences(Topology(pp=3), told) == ()
    told[2]["ends"]["gradient"]["embedding"] = "b"
    assert copy_differences(Topology(pp=3), told) == (CopyDifference("ends", "gradient", "embedding", (0, 2)),)
