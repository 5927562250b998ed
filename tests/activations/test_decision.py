"""Tests of the decision whether partitioning checkpoints (Pa) and host memory (Pa+cpu) pay (ZeRO, section 8).

Its terms are compared with the paper's counts, and its outcome with cases computed by hand.
"""

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.each import each

from megazero.activations.decision import CheckpointSizes, Speeds, Switch, Volumes, decide, volumes

GB = 1e9


def test_volumes_of_the_papers_example() -> None:
    """The 100B model (125 layers, hidden 8192, batch 32, sequence 1024, 16 ranks) has 67.1 GB in fp16, 4.19 with Pa."""
    found = volumes(
        CheckpointSizes(125, 32, 1024, 8192, 2), num_micro_batches=1, tensor_parallel_size=16, data_parallel_bytes=5
    )
    assert found.checkpoints == 125 * 32 * 1024 * 8192 * 2
    assert found.checkpoints / GB == pytest.approx(67.1, abs=0.05)
    assert found.moved(partitioned=True) / 2 / GB == pytest.approx(4.19, abs=0.01)
    assert found.moved(partitioned=False) == 2 * found.checkpoints
    assert found.gathered == found.checkpoints * 15 // 16
    assert found.data_parallel == 5


def test_a_gather_is_a_twelfth_of_a_blocks_traffic() -> None:
    """A recomputed block has six all-reduces of [b, s, h], each sending 2 (n - 1) / n of it."""
    one = CheckpointSizes(1, 2, 16, 32, 4)
    message = 2 * 16 * 32 * 4
    for ranks in (2, 4, 8):
        found = volumes(one, num_micro_batches=1, tensor_parallel_size=ranks, data_parallel_bytes=0)
        assert 12 * found.gathered == 6 * 2 * message * (ranks - 1) // ranks


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_micro_batches_and_layers_multiply(layers: int, micro_batches: int, batch: int) -> None:
    found = volumes(
        CheckpointSizes(layers, batch, 8, 16, 2),
        num_micro_batches=micro_batches,
        tensor_parallel_size=2,
        data_parallel_bytes=0,
    )
    assert found.checkpoints == layers * micro_batches * batch * 8 * 16 * 2
    assert found.moved(partitioned=False) == 2 * found.moved(partitioned=True) == 4 * found.gathered


class Case(NamedTuple):
    """A case of the decision.

    checkpoints, dp: GB a step; speeds: GB/s of the tensor-parallel axis, the data-parallel axis and the host; asked and
    found: the switches and the decisions for Pa and Pa+cpu.
    """

    tp: int
    checkpoints: float
    dp: float
    speeds: tuple[float, float, float]
    asked: tuple[Switch, Switch]
    found: tuple[bool, bool]


AUTO: tuple[Switch, Switch] = ("auto", "auto")

CASES = {
    # 8 GB of checkpoints over 4 ranks: gathers 6 GB; 4 GB to the host and back with Pa, 16 GB without.
    "no data-parallel traffic": Case(4, 8, 0, (100, math.inf, 10), AUTO, (False, False)),
    "a slow data-parallel link": Case(4, 8, 10, (100, 1, 10), AUTO, (True, True)),  # 0.06 < 7.5 s; 0.4 < 2.5 s
    "a fast one": Case(4, 8, 10, (100, 1000, 10), AUTO, (False, False)),  # 0.06 > 0.0075 s; 1.6 > 0.01 s
    "Pa pays, the host is too slow": Case(4, 8, 10, (100, 10, 1), AUTO, (True, False)),  # 0.06 < 0.75 s; 4 > 0.25 s
    "the host pays where Pa does not": Case(4, 8, 10, (1, 2, 10), AUTO, (False, True)),  # 6 > 3.75 s; 1.6 < 5 s
    "no tensor parallelism": Case(1, 8, 10, (math.inf, 1, 100), AUTO, (False, True)),  # 0.16 < 10 s
    "no tensor parallelism, no data parallelism": Case(1, 8, 0, (math.inf, math.inf, 10), AUTO, (False, False)),
    # Fixed switches stay.  Pa leaves a quarter of the data-parallel time and a quarter of the copies.
    "all said": Case(4, 8, 10, (100, 1, 10), (False, True), (False, True)),
    "nothing wanted": Case(4, 8, 10, (100, 1, 10), (False, False), (False, False)),
    "Pa wanted against its price": Case(4, 8, 10, (1, 10, 100), (True, "auto"), (True, True)),  # 0.04 < 0.25 s
    "Pa wanted, the host too slow": Case(4, 8, 10, (1, 10, 10), (True, "auto"), (True, False)),  # 0.4 > 0.25 s
    "no Pa wanted, the same host": Case(4, 8, 10, (1, 5, 10), (False, "auto"), (False, True)),  # 1.6 < 2 s
    "no Pa wanted, the host too slow": Case(4, 8, 10, (1, 10, 10), (False, "auto"), (False, False)),  # 1.6 > 1 s
    "the host not wanted": Case(4, 8, 10, (100, 1, 10), ("auto", False), (True, False)),
    # Switched to the host: Pa saves 12 GB of copies, 1.2 s, whatever the data-parallel axis does.
    "the host wanted, quick gathers": Case(4, 8, 0, (10, math.inf, 10), ("auto", True), (True, True)),  # 0.6 < 1.2 s
    "the host wanted, slow gathers": Case(4, 8, 10, (1, 0.1, 10), ("auto", True), (False, True)),  # 6 > 1.2 s
    "the host wanted, no tensor parallelism": Case(1, 8, 10, (math.inf, 1, 10), ("auto", True), (False, True)),
}


@each("name", CASES)
def test_cases(name: str) -> None:
    case = CASES[name]
    sizes = Volumes(int(case.checkpoints * GB), int(case.dp * GB), case.tp)
    speeds = Speeds(*(speed * GB for speed in case.speeds))
    decision = decide(sizes, speeds, partition=case.asked[0], in_cpu=case.asked[1])
    assert (decision.partition, decision.in_cpu) == case.found
    assert len(decision.reasons) == case.asked.count("auto")


@given(
    st.integers(1, 16),
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    st.tuples(*[st.floats(1e6, 1e12)] * 3),
    st.sampled_from(["auto", True, False]),
    st.sampled_from(["auto", True, False]),
)
def test_what_was_said_stays_and_the_rest_is_settled(
    tp: int,
    checkpoints: int,
    data_parallel: int,
    speeds: tuple[float, float, float],
    partition: Switch,
    in_cpu: Switch,
) -> None:
    decision = decide(Volumes(checkpoints, data_parallel, tp), Speeds(*speeds), partition=partition, in_cpu=in_cpu)
    assert partition in ("auto", decision.partition) and in_cpu in ("auto", decision.in_cpu)
    assert isinstance(decision.partition, bool) and isinstance(decision.in_cpu, bool)
    if partition == "auto" and tp == 1:
        assert not decision.partition
    if data_parallel == 0:
        assert in_cpu is True or not (decision.in_cpu or (partition == "auto" and decision.partition))


def test_reasons_have_volumes_bandwidths_times_and_verdicts() -> None:
    mib = 1 << 20
    decision = decide(Volumes(64 * mib, 100 * mib, 2), Speeds(640 * mib, 500 * mib, 1024 * mib))
    assert decision.reasons == (
        "partition_activations auto: on, gathering 32.0 MiB at 640.0 MiB/s takes 50 ms a step,"
        " and saves up to 100 ms of 200 ms on the data-parallel axis",
        "checkpoint_in_cpu auto: on, copying 64.0 MiB at 1.0 GiB/s takes 62.5 ms a step,"
        " against 100 ms on the data-parallel axis that Pa may leave",
    )
    decision = decide(Volumes(64 * mib, 0, 1), Speeds(math.inf, math.inf, 1024 * mib))
    assert decision.reasons == (
        "partition_activations auto: off, tensor parallel 1 leaves nothing to partition",
        "checkpoint_in_cpu auto: off, copying 128.0 MiB at 1.0 GiB/s takes 125 ms a step,"
        " against 0 ms on the data-parallel axis",
    )
    (reason,) = decide(Volumes(64 * mib, 0, 2), Speeds(640 * mib, math.inf, 1024 * mib), in_cpu=True).reasons
    assert reason.endswith("takes 50 ms a step, and saves up to 62.5 ms of 125 ms of host copies")
