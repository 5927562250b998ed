"""Tests of merging: indices cover shares of the tensors' order, whoever merges them; faults of one rank are seen."""

import random
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.checkpoint_versions import read_index
from support.sharded_state import Layout, finish, make_state
from support.thread_world import run_threads

import megazero.checkpoint.merging as merging
from megazero.checkpoint.folders import part_name
from megazero.checkpoint.manifest import MAX_INDICES, BoxEntry, FileEntry, TensorEntry
from megazero.checkpoint.merging import Written, order_of, part_path, plan_indices, write_part
from megazero.checkpoint.reader import open_checkpoint
from megazero.checkpoint.writer import Draft, Saving, merge_own, prepare, save, write_data
from megazero.errors import CheckpointError

HASH = "0" * 64


def written(rank: int, names: list[str], rows: tuple[int, int] = (0, 1), shape: tuple[int, ...] = (4,)) -> Written:
    """Return what a rank has written: one box of every named tensor, without the data."""
    first, last = rows
    size = 4 * (last - first)
    boxes = tuple(
        BoxEntry(name, "weight", (first,), (last - first,), 80 + size * index, 80 + size * (index + 1), HASH)
        for index, name in enumerate(names)
    )
    file = FileEntry(part_name(rank), 80 + size * len(boxes), 80, HASH)
    return Written(file, boxes, tuple(TensorEntry(name, "weight", shape, "F32") for name in names))


def test_numbers_in_names_are_numbers_and_weights_come_first() -> None:
    keys = [("layers.10.w", "weight"), ("layers.9.w", "weight"), ("a", "exp_avg"), ("layers.09.w", "weight")]
    expected = [("layers.09.w", "weight"), ("layers.9.w", "weight"), ("layers.10.w", "weight"), ("a", "exp_avg")]
    assert sorted(keys, key=lambda key: order_of(*key)) == expected


@pytest.mark.parametrize(("ranks", "own"), [(1, False), (16, False), (16, True), (300, False)])
def test_indices_have_about_as_many_boxes_each(ranks: int, own: bool) -> None:
    """Ranks with the same tensors (data parallelism) or with tensors of their own (a pipeline's stages)."""
    each = [[f"layers.{rank if own else 0}.w{number}" for number in range(240)] for rank in range(ranks)]
    for names in each:
        random.Random(7).shuffle(names)
    reports = [written(rank, names).report(rank, ranks) for rank, names in enumerate(each)]
    plan = plan_indices(reports, boxes_per_index=ranks * 240 // 12)
    assert 10 <= plan.num_indices <= 12
    counts = [0] * plan.num_indices
    for names in each:
        for name in names:
            counts[plan.index_of(order_of(name, "weight"))] += 1
    assert sum(counts) == 240 * ranks and min(counts) > 0
    assert max(counts) < 2 * 240 * ranks / 12
    assert [file.name for file in plan.files] == [part_name(rank) for rank in range(ranks)]


def test_few_boxes_have_one_index_and_very_many_a_bounded_number() -> None:
    names = [f"w{number}" for number in range(1000)]
    reports = [written(0, names).report(0, 1)]
    assert plan_indices(reports).num_indices == 1
    assert plan_indices(reports, boxes_per_index=1).num_indices == MAX_INDICES
    assert plan_indices([written(0, []).report(0, 1)]).num_indices == 1
    assert plan_indices([written(0, ["w"]).report(0, 1)] * 5, boxes_per_index=1).num_indices == 1


def test_a_rank_reads_only_its_sections_and_several_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks at once, through `save` itself, with indices of a few boxes; the result is that of one rank."""
    state = make_state()
    monkeypatch.setattr(merging.plan_indices, "__kwdefaults__", {"boxes_per_index": 10})
    draft = Draft(tmp_path / "four", 20, {}, "")
    folders = run_threads(4, lambda w: save(draft, Layout(2, 2, seed=1).fragments(w.rank, state), control=w))
    assert folders == [tmp_path / "four" / "step_0000020"] * 4
    checkpoint = open_checkpoint(folders[0])
    manifest = checkpoint.manifest
    assert len(manifest.indices) > 4
    places = [order_of(entry.parameter, entry.kind) for entry in manifest.tensors]
    assert places == sorted(places)
    for number, entry in enumerate(manifest.indices):
        _, tables = read_index(checkpoint.folder / entry.name)
        boxes = [box for table in tables for file in table["files"] for box in file["boxes"]]
        found = {(box["parameter"], box["kind"]) for box in boxes}
        assert found <= {(each.parameter, each.kind) for each in manifest.tensors_of(number)}
    for (name, kind), full in state.items():
        assert (checkpoint.read_full(name, kind) == full).all()
    assert not list((tmp_path / "four").rglob("*.merged")) and not list((tmp_path / "four").rglob("rank_*.json"))


def test_a_fault_in_the_share_of_one_merging_rank_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    monkeypatch.setattr(merging.plan_indices, "__kwdefaults__", {"boxes_per_index": 10})
    save_all = lambda step, drop: run_threads(  # noqa: E731 (a call in two forms)
        3,
        lambda w: save(
            Draft(tmp_path, step, {}, ""),
            [
                fragment
                for fragment in Layout(dp=3, seed=1).fragments(w.rank, state)
                if w.rank != 1 or (fragment.spec.name, fragment.kind) not in drop
            ],
            control=w,
        ),
    )
    save_all(10, ())
    before = sorted(path.name for path in tmp_path.rglob("*"))
    results = save_all(20, (("wte.weight", "exp_avg_sq"),))
    assert [type(result) for result in results] == [CheckpointError] * 3
    assert len({str(result) for result in results}) == 1
    assert "exp_avg_sq of wte.weight" in str(results[0]) and "stored nowhere" in str(results[0])
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def a_merge(folder: Path, *parts: Written) -> None:
    plan = plan_indices([part.report(rank, len(parts)) for rank, part in enumerate(parts)])
    for part in parts:
        (folder / part.file.name).touch()
        with open(folder / part.file.name, "r+b") as file:
            file.truncate(part.file.num_bytes)
        write_part(folder, "save", part, plan)
    merge_own(Saving(str(folder), "save", len(parts)), plan, 0)


def test_ranks_that_disagree_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1: weight of w, F32 \[5\]\n.*other ranks have .*F32 \[4\]"):
        a_merge(tmp_path, written(0, ["w"], (0, 1)), written(1, ["w"], (1, 4), (5,)))


def test_holes_and_overlaps_are_told_by_region(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        a_merge(tmp_path, written(0, ["w"], (0, 2)), written(1, ["w"], (1, 3)))
    first, second = map(str, caught.value.problems)
    assert "region [1:2]" in first and "more than once" in first
    assert "region [3:4]" in second and "nowhere" in second


def test_a_part_that_describes_another_file_is_refused(tmp_path: Path) -> None:
    with ExitStack() as held:
        saving = prepare(Draft(tmp_path, 1, {}, ""), held, 2)
        folder, layout = Path(saving.folder), Layout(dp=2)
        both = [write_data(saving, rank, layout.fragments(rank, make_state())) for rank in range(2)]
        plan = plan_indices([each.report(rank, 2) for rank, each in enumerate(both)])
        for each in both:
            write_part(folder, saving.save_id, each, plan)
        first, second = (part_path(folder / each.file.name) for each in both)
        first.write_bytes(second.read_bytes())
        with pytest.raises(CheckpointError, match=r"describes rank_00001.safetensors\n.*another file"):
            merge_own(saving, plan, 0)
        finish(saving, Draft(tmp_path, 1, {}, ""), both)
    assert open_checkpoint(tmp_path).step == 1
