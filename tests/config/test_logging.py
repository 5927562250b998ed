"""Tests of the logging settings."""

import pytest
from pydantic import ValidationError

from megazero.config.run import LoggingConfig


def test_defaults_are_megatrons() -> None:
    logging = LoggingConfig()
    assert (logging.log_interval, logging.tensorboard_queue_size, logging.tensorboard_log_interval) == (100, 1000, 1)
    assert logging.tensorboard_dir is None and logging.metrics_file is None


@pytest.mark.parametrize("name", ["log_interval", "tensorboard_queue_size", "tensorboard_log_interval"])
def test_an_interval_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        LoggingConfig(**{name: 0})


@pytest.mark.parametrize("limit", [0, -1.5])
def test_a_limit_is_more_than_nothing(limit: float) -> None:
    with pytest.raises(ValidationError, match="ledger_limit"):
        LoggingConfig(ledger_limit=limit)
    assert LoggingConfig(ledger_limit=0.5).ledger_limit == 0.5 and LoggingConfig().ledger_limit is None
