"""Settings of the whole test suite: no test depends on timing, and tests for a GPU are skipped where there is none."""

import signal

import pytest
from hypothesis import settings

# A busy machine must not fail a property: hypothesis gives up after 200 ms an example otherwise.
settings.register_profile("megazero", deadline=None)
settings.load_profile("megazero")

# Started in the background, a shell's children ignore Ctrl-C, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `cuda` on machines without a GPU, saying so."""
    needy = [item for item in items if item.get_closest_marker("cuda")]
    if needy and not _has_gpu():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


def _has_gpu() -> bool:
    import torch  # Slow to import, and most selections of tests don't need it.

    return torch.cuda.is_available()
