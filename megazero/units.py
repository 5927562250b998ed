"""Formats bytes, counts and durations as text."""

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "K", "M", "B", "T")


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes, 1536 as `1.5 KiB`."""
    return _scaled(nbytes, 1024.0, _BINARY, " ")


def format_count(count: float) -> str:
    """Format a count, 124439808 as `124.4M` (B is 1e9)."""
    return _scaled(count, 1000.0, _DECIMAL, "")


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, 3725 as `1h02m05s`; below a minute it has one decimal."""
    seconds = round(seconds, 1)  # first, or 59.96 would read 60.0s
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m{rest:02d}s" if hours else f"{minutes}m{rest:02d}s"


def counted(number: int, thing: str) -> str:
    """Return the number with its noun: "1 process", "2 processes", "3 chunks"."""
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing}{'es' if thing.endswith(('s', 'ch')) else 's'}"


def _scaled(value: float, base: float, names: tuple[str, ...], gap: str) -> str:
    index = 0
    while round(abs(value), 1) >= base and index < len(names) - 1:  # as it will be printed
        value /= base
        index += 1
    text = f"{value:.1f}" if index else f"{value:.0f}"
    return f"{text}{gap}{names[index]}"
