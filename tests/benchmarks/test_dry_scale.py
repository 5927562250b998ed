"""Tests of the dry runs at scale, at a small size: a step's Python does not grow with the number of ranks."""

from typing import Any

import pytest
from dry_scale import Case, measure

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
    """Buckets are as many at every size; with more ranks a rank has parts of fewer parameters in each."""
    found = {dp: figures(dp, zero_stage=stage, reduce_bucket_size=limit) for dp in SIZES}
    buckets, calls = ([one[key] for one in found.values()] for key in ("buckets", "calls"))
    messages = [messages_of(one) for one in found.values()]
    assert len(set(buckets)) == 1 and all(one == messages[0] for one in messages)
    assert calls[0] == max(calls) and min(calls) > 0


def messages_of(one: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(axis, name): number for axis, row in one["sent"].items() for name, (number, _) in row.items()}


def test_buckets_grow_with_the_ranks_unless_a_limit_is_given() -> None:
    few, many = figures(2, hidden_size=8192), figures(64, hidden_size=8192)
    section = 12 * 8192 * 8192 // 8
    assert few["bucket_numel"] == 2**24 < 2**25 == many["bucket_numel"] < section
    assert many["buckets"] < few["buckets"] and many["buffer_bytes"] == 2 * few["buffer_bytes"]
    limited = figures(64, hidden_size=8192, reduce_bucket_size=2**24)
    assert [limited[key] for key in ("buckets", "bucket_numel")] == [few[key] for key in ("buckets", "bucket_numel")]
