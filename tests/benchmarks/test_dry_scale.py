"""Tests of the dry runs at scale, at a small size: a step's Python does not grow with the number of ranks."""

from typing import Any

import pytest
from dry_scale import VOCABULARY, Case, measure

# A process group of torch's, though a fake one.
pytestmark = pytest.mark.gloo

SMALL = {
    "num_layers": 2,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "seq_length": 64,
    "make_vocab_size_divisible_by": 1,
}
SIZES = (2, 16, 2048)


def figures(dp: int, **settings: Any) -> dict[str, Any]:
    return measure(Case(8, 1, dp, 1, {**SMALL, **settings}))


# The limit is a multiple of all numbers of ranks, so that none rounds it.
@pytest.mark.parametrize(("stage", "limit"), [(1, None), (2, 1 << 21), (3, None), (3, 1 << 21)])
def test_calls_and_messages_of_a_step_do_not_grow_with_the_ranks(stage: int, limit: int | None) -> None:
    """With more ranks a rank has parts of fewer parameters in each bucket.

    In stage 3 buckets are as many at every size, and many ranks gather some of them together; below, many ranks lay
    small units out together, and have fewer.
    """
    found = {dp: figures(dp, zero_stage=stage, reduce_bucket_size=limit) for dp in SIZES}
    buckets, calls = ([one[key] for one in found.values()] for key in ("buckets", "calls"))
    messages = [messages_of(one) for one in found.values()]
    assert buckets[0] == buckets[1] and messages[0] == messages[1] and calls[0] == max(calls) and min(calls) > 0
    assert (buckets[2] == buckets[0]) if stage == 3 else (buckets[2] < buckets[0])
    assert all(
        (number == messages[0][key]) if stage == 3 and key[1] != "all_gather" else (number <= messages[0][key])
        for key, number in messages[2].items()
    )


def messages_of(one: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(axis, name): number for axis, row in one["sent"].items() for name, (number, _) in row.items()}


def test_buckets_grow_with_the_ranks_unless_a_limit_is_given() -> None:
    few, many = figures(2, hidden_size=8192), figures(64, hidden_size=8192)
    section = 12 * 8192 * 8192 // 8
    assert few["bucket_numel"] == pytest.approx(section / 7, rel=1e-3), "a block is 6 times 2^24 elements, and biases"
    assert 2**24 < many["bucket_numel"] <= 2**25 < section
    assert many["buckets"] < few["buckets"] and many["buffer_bytes"] > 1.5 * few["buffer_bytes"]
    limited = figures(64, hidden_size=8192, reduce_bucket_size=2**24)
    assert limited["buckets"] == few["buckets"]
    assert limited["bucket_numel"] == pytest.approx(few["bucket_numel"], rel=1e-3)  # rounded by the ranks


LEAST = 1 << 17  # elements of a rank's slice


def test_slices_of_gathers_have_a_least_size_however_many_ranks_share_a_unit() -> None:
    """Blocks of 13 million elements, slices of 6,144 on 2,048 ranks, are gathered together ahead of their use.

    A slice of a message has 2^17 elements, less than a block's share short of it; the first of a pass is gathered for
    itself, and the last is the rest.
    """
    settings = {"num_layers": 60, "zero_stage": 3}
    found = measure(Case(1, 1, 2048, 1, {**SMALL, **settings}))
    block, words = 12 * 1024 * 1024, VOCABULARY * 1024
    window = 2 * 2048 * LEAST
    assert window <= found["gathered_numel"] <= window + words + 2 * block, "the window, and the unit in use"
    slices = [nbytes // 2 for nbytes in found["slices"]]
    assert found["sent"]["dp"]["all_gather"][0] == len(slices)
    small = [numel for numel in slices if numel < LEAST - 1.01 * block / 2048]
    assert len(small) <= 3, slices
