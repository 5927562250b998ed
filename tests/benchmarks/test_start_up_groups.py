"""A test of the counts of process groups at start-up, at a small size."""

from start_up_groups import count


def test_the_counts_of_a_small_job() -> None:
    found = count(4, 2, 2)
    assert (found.ranks, found.groups, found.splits, found.own) == (16, 52, 10, 10)
    assert 0 < found.list_seconds < 5 and found.list_bytes > 0 and found.all_seconds > 0
    imports, with_list, with_all = found.resident
    assert 0 < imports <= with_list <= with_all + 2**20 and found.list_bytes < with_all
