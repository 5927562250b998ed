"""Switches that are set to "auto" are resolved from the shapes of the run, alike on every rank."""

from typing import Any

import pytest
from support.configs import make_run
from support.ledgered_step import SETTINGS
from support.processes import mesh_in_worker, run_ranks

from megazero.activations import resolve_auto as resolve_switches
from megazero.config.derived import vocab_rows
from megazero.memory.fused_buffers import FusedBuffers
from megazero.train.build import build_components
from megazero.train.resolve_activations import resolve_activations
from megazero.zero.plan import data_parallel_bytes, resolve

FULL = {**SETTINGS, "recompute_granularity": "full"}


def resolved(rank: int, tp: int, dp: int, changes: dict[str, Any]) -> tuple[bool, bool, tuple[str, ...]]:
    mesh = mesh_in_worker(rank, tp=tp, dp=dp)
    config = make_run(**{**FULL, "tensor_model_parallel_size": tp, **changes})
    section, reasons = resolve_activations(config, mesh, vocab_size=257, padded_vocab_size=vocab_rows(config, 257))
    assert section.partition_activations in (True, False) and section.checkpoint_in_cpu in (True, False)
    return bool(section.partition_activations), bool(section.checkpoint_in_cpu), reasons


@pytest.mark.gloo
def test_every_rank_decides_the_same_and_says_why() -> None:
    auto = {"partition_activations": "auto", "checkpoint_in_cpu": "auto"}
    found = run_ranks(4, resolved, 2, 2, auto)
    assert len(set(found)) == 1
    _, _, reasons = found[0]
    assert [reason.split(":")[0] for reason in reasons] == ["partition_activations auto", "checkpoint_in_cpu auto"]


@pytest.mark.gloo
def test_what_is_said_stays() -> None:
    assert run_ranks(2, resolved, 2, 1, {"partition_activations": True})[0] == (True, False, ())
    partition, in_cpu, reasons = run_ranks(2, resolved, 2, 1, {"checkpoint_in_cpu": "auto"})[0]
    assert (partition, in_cpu, len(reasons)) == (False, False, 1), "one data-parallel rank has no traffic to save"


def volumes(rank: int, stage: int, method: dict[str, Any]) -> tuple[Any, ...]:
    """Return the volumes that the decision is given, and the engine's own count of parameters."""
    mesh = mesh_in_worker(rank, tp=2, dp=2)
    config = make_run(
        **{**FULL, "tensor_model_parallel_size": 2, "zero_stage": stage, "checkpoint_in_cpu": "auto", **method},
        global_batch_size=12,
    )
    asked: dict[str, Any] = {}

    def noting(mesh: Any, sizes: Any, **rest: Any) -> Any:
        asked.update(sizes=sizes, **rest)
        return resolve_switches.resolve_switches(mesh, sizes, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megazero.train.resolve_activations.resolve_switches", noting)
        resolve_activations(config, mesh, vocab_size=257, padded_vocab_size=vocab_rows(config, 257))
    plain = make_run(**{**FULL, "tensor_model_parallel_size": 2})
    core = build_components(plain, mesh, FusedBuffers(0, mesh.device), vocab_size=257)
    numel = core.engine.layout.used_numel(trainable=True)
    core.engine.close()
    expected = data_parallel_bytes(resolve(config.zero, config.precision), numel, 2, 3)
    sizes = asked["sizes"]
    return sizes.bytes_of_one, sizes.number, asked["num_micro_batches"], asked["data_parallel_bytes"], expected


@pytest.mark.gloo
def test_volumes_are_those_of_the_run() -> None:
    cases = ((1, {}, 3), (3, {"recompute_num_layers": 2}, 2), (2, {"recompute_method": "block"}, 1))
    for stage, method, number in cases:
        one, found, micro_batches, sent, expected = run_ranks(4, volumes, stage, method)[0]
        assert (one, found, micro_batches) == (4 * 2 * 24 * 48, number, 3)
        assert sent == expected > 0
