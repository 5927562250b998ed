"""Dropout masks agree where tensors are replicated, differ where sharded, and depend only on seed and sample."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.planner.dry.hollow import Hollow
from megazero.tensor_parallel.random import RandomRegions, region_seed

CPU = torch.device("cpu")


def mask(device: torch.device = CPU) -> Tensor:
    return F.dropout(torch.ones(512, device=device), 0.5)


def masks(
    tp_rank: int, first_sample: int, *, seed: int = 7, device: torch.device = CPU, part: int = 0
) -> dict[str, Tensor]:
    """Draw the masks of a block: replicated, sharded, replicated, sharded."""
    random = RandomRegions(seed, tp_rank, device)
    random.begin_micro_batch(first_sample, part)
    found = {"replicated": mask(device)}
    with random.sharded():
        found["sharded"] = mask(device)
    found["replicated again"] = mask(device)
    with random.sharded():
        found["sharded again"] = mask(device)
    return found


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
def test_replicated_masks_agree_and_sharded_ones_differ_between_ranks(device: str) -> None:
    first, second = (masks(tp_rank, 3, device=torch.device(device)) for tp_rank in (0, 1))
    for name in first:
        assert torch.equal(first[name], second[name]) is name.startswith("replicated"), name


def test_no_two_masks_of_a_micro_batch_are_alike() -> None:
    found = list(masks(0, 3).values())
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_parts_of_the_model_draw_on_their_own() -> None:
    whole, first, second = masks(0, 3), masks(0, 3, part=1), masks(0, 3, part=2)
    found = [*whole.values(), *first.values(), *second.values()]
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    again = masks(0, 3, part=2)
    assert all(torch.equal(again[name], second[name]) for name in again)


@pytest.mark.parametrize("device", DEVICES)
def test_masks_depend_on_seed_and_sample_alone(device: str) -> None:
    where = torch.device(device)
    once = masks(0, 11, device=where)
    torch.rand(100, device=where)  # numbers drawn before must not matter
    again = masks(0, 11, device=where)
    assert all(torch.equal(once[name], again[name]) for name in once)
    for other in (masks(0, 12, device=where), masks(0, 11, seed=8, device=where)):
        assert not any(torch.equal(once[name], other[name]) for name in once)


def test_the_sharded_region_does_not_disturb_the_replicated_one() -> None:
    random = RandomRegions(7, 0, CPU)
    random.begin_micro_batch(3)
    plain = [mask(), mask()]
    found = masks(1, 3)
    assert torch.equal(plain[0], found["replicated"]) and torch.equal(plain[1], found["replicated again"])


def test_an_error_inside_the_region_puts_the_states_back() -> None:
    random = RandomRegions(7, 0, CPU)
    random.begin_micro_batch(3)
    try:
        with random.sharded():
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(mask(), masks(0, 3)["replicated"])


def draw(random: RandomRegions) -> list[Tensor]:
    """Draw a replicated mask, a sharded one and a replicated one."""
    found = [mask()]
    with random.sharded():
        found.append(mask())
    return [*found, mask()]


def test_what_was_drawn_after_get_state_is_drawn_again() -> None:
    """Restoring a state repeats the masks of both regions; drawing does not change a state that was taken."""
    random = RandomRegions(7, 1, CPU)
    random.begin_micro_batch(3)
    draw(random)
    state = random.get_state()
    first, after = draw(random), random.get_state()
    random.begin_micro_batch(4)
    draw(random)
    for _ in range(2):
        random.set_state(state)
        assert all(torch.equal(a, b) for a, b in zip(draw(random), first, strict=True))
    found = random.get_state()
    assert torch.equal(found[0], after[0])
    assert found[1] is not None and after[1] is not None and torch.equal(found[1], after[1])


def test_a_state_taken_inside_the_sharded_region() -> None:
    random = RandomRegions(7, 0, CPU)
    random.begin_micro_batch(3)
    with random.sharded():
        state, first = random.get_state(), mask()
        random.set_state(state)
        assert torch.equal(mask(), first)
    assert torch.equal(mask(), masks(0, 3)["replicated"])


def test_a_state_from_before_the_first_micro_batch() -> None:
    """Outside the sharded region masks can be drawn before the first micro-batch."""
    random = RandomRegions(7, 0, CPU)
    state, first = random.get_state(), mask()
    random.begin_micro_batch(3)
    random.set_state(state)
    assert torch.equal(mask(), first)
    with pytest.raises(AssertionError, match="begin_micro_batch"), random.sharded():
        pass


def test_hollow_tensors_pass() -> None:
    with Hollow():
        assert masks(0, 3)["sharded again"].shape == (512,)


def test_region_seeds_are_spread() -> None:
    seeds = {region_seed(s, k, region) for s in range(5) for k in range(50) for region in ("replicated", "sharded 0")}
    assert len(seeds) == 500 and all(0 <= seed < 1 << 63 for seed in seeds)
