"""Tests of the arithmetic of the flat layout, on which all other parts rely."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.each import each
from support.flat_layout import padded_numel
from support.irregular_model import alone, engine_around
from torch import nn

import megazero.zero.layout
from megazero.optim.inner import StepInputs
from megazero.parallel.param_spec import ParamSpec, Unit
from megazero.zero.layout import (
    FlatLayout,
    Fragment,
    LayoutRules,
    Range,
    Section,
    Slot,
    build_layout,
    choose_persistent,
    gather_limit,
    join_small_units,
    joined_gathers,
    neighbours,
    prefetch_limit,
    reduction_limit,
)

layout_file = megazero.zero.layout.__file__
Shapes = dict[str, tuple[tuple[int, ...], bool, bool]]  # name -> shape, decay, trainable


def spec(name: str, shape: tuple[int, ...], *, decay: bool = True, trainable: bool = True) -> ParamSpec:
    return ParamSpec(name, shape, shape, (0,) * len(shape), decay=decay, trainable=trainable)


def layout_of(units: dict[str, list[ParamSpec]], rules: LayoutRules) -> FlatLayout:
    plain = [Unit(name, tuple(spec.name for spec in specs)) for name, specs in units.items()]
    parameters = [Slot(spec, torch.float32, False, int(spec.decay)) for specs in units.values() for spec in specs]
    return build_layout(plain, parameters, rules)


def fragments_in(section: Section, within: Range) -> list[Fragment]:
    return [fragment for bucket in section.buckets for fragment in bucket.fragments_in(within)]


def test_a_unit_as_a_drawing() -> None:
    specs = [spec("w", (3, 4)), spec("b", (5,), decay=False), spec("v", (4,)), spec("one", (1,), decay=False)]
    layout = layout_of({"unit": specs}, LayoutRules(partitions=2, bucket_numel=12, alignment=2))
    section = layout.sections[0]
    # Parameters without decay come first, then those with it, each in order; 22 is padded to 24, a multiple of 2 x 2.
    assert [(slot.spec.name, slot.start, slot.stop) for slot in section.slots] == [
        ("b", 0, 5),
        ("one", 5, 6),
        ("w", 6, 18),
        ("v", 18, 22),
    ]
    assert (section.used_numel, section.numel) == (22, 24)
    assert [(bucket.start, bucket.stop) for bucket in section.buckets] == [(0, 12), (12, 24)]
    assert [section.buckets[0].partition(rank) for rank in (0, 1)] == [(0, 6), (6, 12)]
    assert [(f.spec.name, f.start, f.stop, f.within) for f in fragments_in(section, Range(4, 20))] == [
        ("b", 4, 5, (4, 5)),
        ("one", 0, 1, (5, 6)),
        ("w", 0, 6, (6, 12)),
        ("w", 6, 12, (12, 18)),
        ("v", 0, 2, (18, 20)),
    ]
    assert [list(bucket.fragments) for bucket in section.buckets] == [["b", "one", "w"], ["w", "v"]]
    assert section.buckets[1].fragment_of("w", Range(14, 24)) == (specs[0], 8, 12, (14, 18))
    assert section.buckets[1].fragment_of("w", Range(18, 24)) is None
    assert section.buckets[1].fragment_of("b", Range(12, 24)) is None
    assert {name: [reduction.index for reduction in found] for name, found in layout.reductions_of.items()} == {
        "b": [0],
        "one": [0],
        "w": [0, 1],
        "v": [1],
    }
    assert list(section.group_runs(Range(0, 12))) == [(0, (0, 6)), (1, (6, 12))]
    assert list(section.group_runs(Range(20, 24))) == [(1, (20, 24))]


def test_trained_parameters_begin_at_blocks() -> None:
    specs = [spec("w", (3, 3)), spec("v", (8,)), spec("one", (1,)), spec("frozen", (3,), trainable=False)]
    rules = LayoutRules(partitions=2, bucket_numel=20, alignment=2, trained_block=4)
    section, frozen = layout_of({"unit": [*specs, spec("last", (1,))]}, rules).sections
    assert [slot.start for slot in section.slots] == [0, 12, 20, 24] and section.numel == 32
    assert [bucket.partition(rank) for bucket in section.buckets for rank in (0, 1)] == [
        (0, 8),
        (8, 16),
        (16, 24),
        (24, 32),
    ]
    assert [bucket.padding for bucket in section.buckets] == [((9, 12),), ((21, 24), (25, 32))]
    assert frozen.numel == 4, "frozen parameters have no moments"


def test_padding_alone_belongs_to_no_parameter() -> None:
    layout = layout_of({"unit": [spec("one", (1,))]}, LayoutRules(partitions=4, bucket_numel=100, alignment=16))
    section = layout.sections[0]
    assert section.numel == 64
    assert [fragments_in(section, section.buckets[0].partition(rank)) for rank in (1, 2, 3)] == [[], [], []]


def test_frozen_parameters_have_a_section_but_no_reduced_bucket() -> None:
    specs = [spec("w", (8,)), spec("frozen", (8,), trainable=False)]
    layout = layout_of({"unit": specs}, LayoutRules(partitions=1, bucket_numel=8, alignment=1))
    assert [(section.trainable, section.numel) for section in layout.sections] == [(True, 8), (False, 8)]
    assert [bucket.section for bucket in layout.trainable_buckets] == [0] and list(layout.reductions_of) == ["w"]
    assert (padded_numel(layout, trainable=True), layout.used_numel(trainable=False)) == (8, 8)


def test_dtypes_do_not_share_a_section() -> None:
    parameters = [Slot(spec("a", (3,)), torch.float32, False, 0), Slot(spec("b", (3,)), torch.bfloat16, False, 0)]
    layout = build_layout([Unit("unit", ("a", "b"))], parameters, LayoutRules(1, 100))
    assert [section.dtype for section in layout.sections] == [torch.float32, torch.bfloat16]


def test_persistent_parameters_have_a_section_of_their_own() -> None:
    placed = [Slot(spec(name, (3,)), torch.float32, name != "b", 0) for name in "abc"]
    layout = build_layout([Unit("unit", ("a", "b", "c"))], placed, LayoutRules(1, 100))
    members = [(section.partitioned, [slot.spec.name for slot in section.slots]) for section in layout.sections]
    assert members == [(True, ["a", "c"]), (False, ["b"])]


def test_small_parameters_persist_as_long_as_they_fit() -> None:
    specs = [spec(name, (numel,)) for name, numel in zip("abcd", (5, 10, 4, 9), strict=True)]
    assert choose_persistent(specs, smaller_than=10, total=100) == {"a", "c", "d"}
    assert choose_persistent(specs, smaller_than=11, total=17) == {"a", "b"}, "two elements are left, none fits"
    assert choose_persistent(specs, smaller_than=11, total=9) == {"a", "c"}
    assert choose_persistent(specs, smaller_than=0, total=100) == set()


def test_small_neighbours_are_joined() -> None:
    """Units of one part are joined while they stay small; order, parameters and consumers are kept."""
    shared, other = nn.ReLU(), nn.ReLU()
    numel = {"a": 3, "b": 4, "c": 3, "big": 20, "d": 5, "e": 5, "f": 1}
    consumers = {"a": (shared,), "b": (shared, other), "c": (other,)}
    units = [Unit(name, (name,), consumers.get(name, ()), part=int(name == "f")) for name in numel]
    joined = join_small_units(units, numel, 10)
    assert [unit.parameters for unit in joined] == [("a", "b", "c"), ("big",), ("d", "e"), ("f",)]
    assert [unit.name for unit in joined] == ["a", "big", "d", "f"] and joined[0].consumers == (shared, other)
    assert join_small_units(units, numel, 0) == units


def test_groups_of_an_optimizer_lie_side_by_side() -> None:
    placed = [
        Slot(spec(name, (2,)), torch.float32, False, group) for name, group in zip("abcd", (2, 0, 2, 1), strict=True)
    ]
    (section,) = build_layout([Unit("unit", tuple("abcd"))], placed, LayoutRules(1, 100, 3)).sections
    assert [slot.spec.name for slot in section.slots] == ["b", "d", "a", "c"]
    assert list(section.group_runs(Range(1, 9))) == [(0, (1, 2)), (1, (2, 4)), (2, (4, 9))]


parameter_lists = st.lists(st.tuples(st.integers(0, 400), st.booleans(), st.booleans()), min_size=1, max_size=12).map(
    lambda rows: [
        spec(f"p{index}", (numel or 1,), decay=decay, trainable=trainable)
        for index, (numel, decay, trainable) in enumerate(rows)
    ]
)


@settings(max_examples=200, deadline=None)
@given(parameter_lists, st.integers(1, 5), st.integers(1, 300), st.sampled_from([1, 2, 16]), st.integers(1, 4))
def test_every_element_has_one_place_and_one_owner(
    specs: list[ParamSpec], partitions: int, bucket_numel: int, alignment: int, num_units: int
) -> None:
    units = {f"unit{u}": specs[u::num_units] for u in range(num_units) if specs[u::num_units]}
    rules = LayoutRules(partitions, bucket_numel, alignment)
    layout = layout_of(units, rules)
    owned: dict[str, list[int]] = {spec.name: [0] * spec.numel for spec in specs}
    for section in layout.sections:
        assert section.numel - section.used_numel < rules.quantum
        assert [bucket.start for bucket in section.buckets] == [0, *(b.stop for b in section.buckets[:-1])]
        assert section.buckets[-1].stop == section.numel
        for bucket in section.buckets:
            assert bucket.numel % rules.quantum == 0
            assert bucket.numel <= max(bucket_numel, rules.quantum)
            assert abs(bucket.numel - section.buckets[0].numel) <= rules.quantum, "they are of equal size"
            for rank in range(partitions):
                for fragment in bucket.fragments_in(bucket.partition(rank)):
                    for element in range(fragment.start, fragment.stop):
                        owned[fragment.spec.name][element] += 1
    assert all(count == 1 for counts in owned.values() for count in counts)


@pytest.mark.parametrize(
    ("partitions", "limit", "expected"),
    [
        (1, None, 2**24),
        (8, None, 2**24),
        (32, None, 2**24),
        (33, None, 33 * 2**19),
        (512, None, 2**28),
        (2048, None, 2**28),
        (16384, None, 2**31),
        (8, 2**28, 2**28),
        (2048, 500, 500),
        (1024, 0, 0),
    ],
)
def test_by_default_reductions_grow_with_the_ranks_and_a_given_limit_holds(
    partitions: int, limit: int | None, expected: int
) -> None:
    assert reduction_limit(partitions, limit) == expected


@each(
    ("partitions", "reduced", "gathered", "expected"),
    [
        (8, None, None, 2**24),
        (2048, None, None, 2**30),
        (2048, 500, None, 500),
        (2048, None, 700, 700),
        (8, 500, 700, 700),
        (8, 700, 0, 0),
    ],
)
def test_a_gather_has_a_limit_of_its_own(
    partitions: int, reduced: int | None, gathered: int | None, expected: int
) -> None:
    assert gather_limit(partitions, reduced, gathered) == expected


@pytest.mark.parametrize(
    ("partitions", "largest", "given", "window", "together"),
    [
        (2, 100, None, 100, 0),
        (32, 100, None, 100, 0),
        (33, 100, None, 33 << 18, 33 << 17),
        (2048, 26_000_000, None, 2048 << 18, 2048 << 17),
        (2048, 10**9, None, 10**9, 2048 << 17),
        (2048, 26_000_000, 50_000_000, 50_000_000, 25_000_000),
        (2, 100, 40, 40, 20),
        (2, 100, 10**9, 10**9, 1 << 18),
        (2048, 100, 0, 0, 0),
    ],
)
def test_what_is_gathered_ahead_grows_with_the_ranks(
    partitions: int, largest: int, given: int | None, window: int, together: int
) -> None:
    """Beyond 32 ranks two messages of 2^17 elements a rank are ahead, or half of a window that is given each."""
    assert prefetch_limit(partitions, largest, given) == window
    assert joined_gathers(partitions, window, given) == together


def test_neighbours_of_a_section_are_grouped() -> None:
    layout = layout_of({"a": [spec("a", (50,))], "b": [spec("b", (20,))]}, LayoutRules(2, 16, 4))
    buckets = [*layout.sections[0].buckets, *layout.sections[1].buckets]
    assert [bucket.numel for bucket in buckets] == [8, 16, 16, 16, 8, 16]

    def grouped(most: int, *left_out: int) -> list[list[int]]:
        given = [bucket for bucket in buckets if bucket.index not in left_out]
        return [[bucket.index for bucket in group] for group in neighbours(given, most)]

    assert grouped(0) == grouped(23) == [[0], [1], [2], [3], [4], [5]]
    assert grouped(24) == [[0, 1], [2], [3], [4, 5]]
    assert grouped(1000) == [[0, 1, 2, 3], [4, 5]], "no message has buckets of two sections"
    assert grouped(1000, 1) == [[0], [2, 3], [4, 5]], "nor some with a gap between them"


def test_neighbours_are_reduced_together() -> None:
    units = {"a": [spec("a", (30,)), spec("b", (18,))], "c": [spec("c", (20,)), spec("d", (9,), trainable=False)]}
    layout = layout_of(units, LayoutRules(2, 16, 4, reduced_numel=40))
    assert [bucket.numel for bucket in layout.trainable_buckets] == [16, 16, 16, 8, 16]
    first, second, third = layout.reductions
    assert [[bucket.index for bucket in reduction.buckets] for reduction in layout.reductions] == [[0, 1], [2], [3, 4]]
    assert (first.range, second.range, third.range) == ((0, 32), (32, 48), (0, 24))
    assert [(f.spec.name, f.start, f.stop, f.within) for f in first.fragments.values()] == [
        ("a", 0, 30, (0, 30)),
        ("b", 0, 2, (30, 32)),
    ]
    assert third.padding == ((20, 24),) and second.fragments["b"].within == (32, 48)
    assert {name: [reduction.index for reduction in found] for name, found in layout.reductions_of.items()} == {
        "a": [0],
        "b": [0, 1],
        "c": [2],
    }
    assert layout.max_reduced_numel == 32


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10**10), min_size=1, max_size=3), st.integers(1, 20_000))
def test_by_default_a_rank_gets_enough_of_every_full_bucket(numels: list[int], partitions: int) -> None:
    """A rank's slices are as large as its share of the section, or half of those of a full bucket; all nearly equal."""
    specs = [spec(f"p{index}", (numel,)) for index, numel in enumerate(numels)]
    rules = LayoutRules(partitions, reduction_limit(partitions, None))
    (section,) = layout_of({"unit": specs}, rules).sections
    slices = [bucket.partition(partitions - 1).numel for bucket in section.buckets]
    assert section.buckets[-1].stop == section.numel and sum(slices) * partitions == section.numel
    assert max(slices) - min(slices) <= rules.alignment
    assert min(slices) >= min(section.numel // partitions, 2**16 - rules.alignment)
    assert partitions > 2048 or section.buckets[0].numel <= 2**28, "four in bf16 are in 2 GiB"
    assert len(slices) <= -(-section.numel // (2**24 - rules.quantum if partitions < 32 else partitions * 2**17))


@settings(max_examples=100, deadline=None)
@given(parameter_lists, st.integers(1, 300), st.data())
def test_group_runs_tile_a_range_and_agree_with_the_parameters(
    specs: list[ParamSpec], bucket_numel: int, data: st.DataObject
) -> None:
    layout = layout_of({"unit": specs}, LayoutRules(2, bucket_numel, 4))
    for section in layout.sections:
        start = data.draw(st.integers(0, section.numel))
        within = Range(start, data.draw(st.integers(start, section.numel)))
        runs = list(section.group_runs(within))
        assert len(runs) <= 2
        assert sum(run.numel for _, run in runs) == within.numel
        for decay, run in runs:
            assert all(fragment.spec.decay == decay for fragment in fragments_in(section, run))


def test_buckets_are_numbered_through_the_model() -> None:
    units = {f"unit{u}": [spec(f"w{u}", (50,))] for u in range(3)}
    layout = layout_of(units, LayoutRules(2, 16, 8))
    assert [bucket.index for bucket in layout.trainable_buckets] == list(range(12))
    assert layout.max_reduced_numel == 16


@each("stage", [0, 1, 2, 3])
def test_a_step_computes_nothing_of_the_layout_anew(stage: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(5, 5, dtype=torch.float64) for _ in range(4)))
    engine = engine_around(model, alone(), zero_stage=stage, reduce_bucket_size=16)
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == layout_file:
            calls.append(frame.f_code.co_qualname)

    for profile in (None, note):  # the first step may compute values that are then cached
        sys.setprofile(profile)
        try:
            engine.begin_step()
            for is_last in (False, True):
                engine.backward(model(torch.ones(2, 5, dtype=torch.float64)).sum(), is_last=is_last)
            engine.finish_reductions()
            assert engine.local_norms().square > 0
            engine.update(StepInputs(0.1, torch.ones(()), None))
        finally:
            sys.setprofile(None)
    assert len(engine.layout.trainable_buckets) == 8 and calls == []
    engine.close()
