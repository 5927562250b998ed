"""Bytes, counts and durations as people read them."""

import pytest

from megazero.units import format_bytes, format_count, format_duration


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-2048, "-2.0 KiB"),
        (3 * 2**60, "3072.0 PiB"),
    ],
)
def test_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(("count", "text"), [(7, "7"), (999, "999"), (124_439_808, "124.4M"), (1.5e9, "1.5B")])
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0s"), (59.94, "59.9s"), (60, "1m00s"), (3599, "59m59s"), (3725, "1h02m05s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
