"""Tests of the recorded order of uses, on literal sequences and by brute force on arbitrary ones."""

from hypothesis import given
from hypothesis import strategies as st

from megazero.zero.parameters.use_order import UseOrder

NUMEL = {"embed": 7, "b0": 20, "b1": 30, "head": 5}
PASS = ["embed", "b0", "b1", "head", "head", "b1", "b0"]


def recorded(*passes: list[str]) -> UseOrder:
    """Return an order that has recorded whole passes."""
    order = UseOrder(NUMEL)
    for uses in passes:
        for unit in uses:
            order.use(unit)
        order.end_pass()
    return order


def test_the_first_pass_knows_nothing() -> None:
    order = UseOrder(NUMEL)
    order.use("embed")
    assert list(order.upcoming()) == []
    assert order.distance("embed") is None


def test_the_drawing() -> None:
    order = recorded(PASS)
    for unit in PASS[:3]:
        order.use(unit)
    assert list(order.upcoming()) == ["head", "head", "b1", "b0"]
    assert {unit: order.distance(unit) for unit in NUMEL} == {"embed": None, "b0": 40, "b1": 10, "head": 0}


def test_what_has_room_until_its_next_use() -> None:
    """Until b1 is used again head is, twice, and until b0 is used again so are head and b1."""
    order = recorded(PASS)
    for unit in PASS[:3]:
        order.use(unit)
    for unit, needed in (("head", 5 + 30), ("b1", 5 + 30), ("b0", 5 + 30 + 20)):
        assert order.fits(unit, needed) and not order.fits(unit, needed - 1), unit
    assert not order.fits("embed", 10**9), "it is not used again"


def test_before_the_first_use_the_whole_pass_is_upcoming() -> None:
    order = recorded(PASS)
    assert list(order.upcoming()) == PASS
    assert order.distance("b1") == 27


def test_a_skipped_unit_ends_what_is_known() -> None:
    order = recorded(PASS)
    order.use("embed")
    order.use("b1")
    assert list(order.upcoming()) == []
    assert [order.distance(unit) for unit in NUMEL] == [None] * 4
    order.use("b1")  # the record has this unit here, but the pass has already deviated from it


def test_the_pass_that_left_is_the_next_record() -> None:
    order = recorded(PASS, ["embed", "b1", "b1"])
    assert list(order.upcoming()) == ["embed", "b1", "b1"]


def test_a_longer_pass_leaves_the_record_where_it_ends() -> None:
    order = recorded(["embed", "b0"])
    order.use("embed")
    order.use("b0")
    assert list(order.upcoming()) == [] and order.distance("b0") is None and not order.fits("b0", 10**9)
    order.use("b1")
    order.end_pass()
    assert list(order.upcoming()) == ["embed", "b0", "b1"]


def test_a_shorter_pass_is_the_next_record_too() -> None:
    assert list(recorded(PASS, PASS[:2]).upcoming()) == PASS[:2]


def test_an_empty_pass_changes_nothing() -> None:
    assert list(recorded(PASS, []).upcoming()) == PASS


def test_an_abandoned_pass_changes_nothing() -> None:
    order = recorded(PASS)
    order.use("embed")
    order.use("head")
    order.reset_pass()
    assert list(order.upcoming()) == PASS


def test_forwards_without_a_backward_are_not_remembered_for_ever() -> None:
    order = recorded(PASS)
    for _ in range(60_000):
        for unit in ("embed", "b0"):
            order.use(unit)
    assert len(order._now) <= 100_000 and list(order.upcoming()) == []
    order.end_pass()
    for _ in range(2):
        for unit in PASS:
            order.use(unit)
        order.end_pass()
    assert list(order.upcoming()) == PASS


numels = st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 1000), min_size=1)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[dict[str, int], list[list[str]]]:
    numel = draw(numels)
    uses = st.lists(st.sampled_from(sorted(numel)), max_size=25)
    return numel, draw(st.lists(uses, min_size=1, max_size=4))


@given(sequences())
def test_following_a_recorded_pass_never_breaks(made: tuple[dict[str, int], list[list[str]]]) -> None:
    numel, passes = made
    order = UseOrder(numel)
    for uses in passes:
        for unit in uses:
            order.use(unit)
        order.end_pass()
    record = next((uses for uses in reversed(passes) if uses), [])
    for _ in range(2):
        for place, unit in enumerate(record):
            assert list(order.upcoming()) == record[place:]
            assert {unit: order.distance(unit) for unit in numel} == brute_force(numel, record[place:])
            for used in record[place:]:
                until = record[place : record.index(used, place) + 1]
                needed = sum(numel[name] for name in {*record[:place][-1:], *until})
                assert order.fits(used, needed) and not order.fits(used, needed - 1)
            order.use(unit)
        assert list(order.upcoming()) == []
        order.end_pass()


def brute_force(numel: dict[str, int], rest: list[str]) -> dict[str, int | None]:
    """Return the number of elements used before each unit's next use (None: no next use), counted one by one."""
    distances: dict[str, int | None] = {}
    for unit in numel:
        before = 0
        distances[unit] = None
        for used in rest:
            if used == unit:
                distances[unit] = before
                break
            before += numel[used]
    return distances


@given(sequences())
def test_after_any_passes_the_last_one_that_was_not_empty_is_known(
    made: tuple[dict[str, int], list[list[str]]],
) -> None:
    """The last pass that was not empty becomes the record, no matter if it followed the record before it."""
    numel, passes = made
    order = UseOrder(numel)
    known: list[str] = []
    for uses in passes:
        for place, unit in enumerate(uses):
            follows = known[:place] == uses[:place]
            assert list(order.upcoming()) == (known[place:] if follows else [])
            order.use(unit)
        order.end_pass()
        known = uses or known
        assert list(order.upcoming()) == known
