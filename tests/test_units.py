"""Tests of how bytes, counts and durations are written for people."""

from support.each import each

from megazero.units import counted, format_bytes, format_count, format_duration


@each(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**20 + 2**19, "5.5 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**40, "1.0 TiB"),
        (7 * 2**50, "7.0 PiB"),
        (2**60, "1024.0 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@each(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0K"),
        (999_949, "999.9K"),
        (999_999, "1.0M"),
        (124_439_808, "124.4M"),
        (1_557_611_200, "1.6B"),
        (1.0087e12, "1.0T"),
        (5e15, "5000.0T"),
    ],
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@each(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (0.25, "0.2s"),
        (59.9, "59.9s"),
        (59.96, "1m00s"),
        (60, "1m00s"),
        (61.7, "1m01s"),
        (3599, "59m59s"),
        (3600, "1h00m00s"),
        (3725, "1h02m05s"),
        (100 * 3600, "100h00m00s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_counts_in_words() -> None:
    words = (counted(1, "process"), counted(2, "process"), counted(1, "micro-batch"), counted(0, "micro-batch"))
    assert words == ("1 process", "2 processes", "1 micro-batch", "0 micro-batches")
    assert (counted(1, "chunk"), counted(3, "layer")) == ("1 chunk", "3 layers")
