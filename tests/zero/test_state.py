"""All ranks together save every element once, and each rank loads all that it keeps."""

import itertools

import pytest
import torch
from support.irregular_model import Options, make_engine
from support.processes import run_ranks


def state(rank: int, options: Options) -> tuple[list[tuple[str, str, int, int]], list[tuple[str, str, int, int]], bool]:
    _, engine, _ = make_engine(rank, options)
    owned = list(engine._shards.owned_state({"tp": 0}))
    wanted = list(engine._shards.wanted_state())
    writable = all(fragment.tensor.numel() == fragment.stop - fragment.start for fragment in (*owned, *wanted))
    for fragment in wanted:
        fragment.tensor.fill_(3.0)
    written = all(bool(torch.eq(fragment.tensor, 3.0).all()) for fragment in owned)
    engine.close()
    places = [[(f.spec.name, f.kind, f.start, f.stop) for f in found] for found in (owned, wanted)]
    return places[0], places[1], writable and written


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_together_own_every_element_once(stage: int) -> None:
    results = run_ranks(2, state, Options(stage=stage, dp=2))
    seen: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for owned, _, right in results:
        assert right
        for name, kind, start, stop in owned:
            seen.setdefault((name, kind), []).append((start, stop))
    assert {kind for _, kind in seen} == {"weight", "exp_avg", "exp_avg_sq"}
    for places in seen.values():
        places.sort()
        assert places[0][0] == 0
        assert all(before[1] == after[0] for before, after in itertools.pairwise(places))
    for owned, wanted, _ in results:
        names = {(name, kind) for name, kind, _, _ in owned}
        assert names <= {(name, kind) for name, kind, _, _ in wanted}
