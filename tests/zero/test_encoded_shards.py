"""Tests of encoded partitions: what is written to blocks is read, rounded once, and a load stores all of it."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.each import each
from torch import Tensor

from megazero.comm.wires.codec import BlockCodec
from megazero.memory.homes import DeviceHome
from megazero.parallel.param_spec import ParamSpec, Unit
from megazero.zero.encoded_shards import EncodedShard, EncodedSlice
from megazero.zero.layout import LayoutRules, Slot, build_layout

BLOCK = 16
CODEC, DEVICE = BlockCodec(8, BLOCK), DeviceHome(torch.device("cpu"))


def rounded(values: Tensor) -> Tensor:
    """Round whole blocks, and a last one that is short, by the format's definition."""
    out = []
    for block in values.split(BLOCK):
        scale = (block.abs().max() / 127).float()
        out.append((block / scale).round() * scale)
    return torch.cat(out)


def numbers(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_rows_are_apart_and_parts_of_them_are_blocks() -> None:
    shard = EncodedShard(CODEC, [64, 32], torch.float32, DEVICE)
    assert shard.nbytes == 64 + 32 + 4 * 6 and [len(shard.row(0)), len(shard.row(1))] == [64 + 16, 32 + 8]
    first, second, third = numbers(20, 1), numbers(16, 2), numbers(32, 3)
    shard.write(0, 0, first)  # the second of its blocks is short
    shard.write(0, 32, second)
    shard.write(1, 0, third)
    assert torch.equal(shard.read(0, 0, 20), rounded(first))
    assert shard.read(0, 16, 16).numel() == 0 and not shard.read(0, 48, 64).any()
    assert torch.equal(shard.read(0, 32, 48), rounded(second)) and torch.equal(shard.read(1, 0, 32), rounded(third))
    whole = torch.empty(64)
    CODEC.decode(shard.row(0), whole)
    assert torch.equal(whole[:20], rounded(first)) and torch.equal(whole[32:48], rounded(second))


@each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_has_been_read_is_written_as_it_was(dtype: torch.dtype) -> None:
    shard = EncodedShard(CODEC, [48], dtype, DEVICE)
    shard.write(0, 0, numbers(48).to(dtype))
    before = shard.stored.clone()
    found = shard.read(0, 0, 48)
    shard.write(0, 0, found)
    assert torch.equal(shard.read(0, 0, 48), found) and found.dtype == dtype
    assert dtype not in (torch.float64, torch.float32) or torch.equal(shard.stored, before)


def test_slices_are_stored_at_the_end_of_a_load() -> None:
    shard = EncodedShard(CODEC, [32], torch.float32, DEVICE)
    written = EncodedSlice(shard, 0, 16, 20, is_written=True)
    values = numbers(4)
    written.view()[:2] = values[:2]
    assert not shard.read(0, 16, 20).any()
    written.view()[2:] = values[2:]  # in two pieces, which are rounded together
    shard.close()
    assert torch.equal(shard.read(0, 16, 20), rounded(values)) and not shard.read(0, 0, 16).any()
    written.view().zero_()
    shard.close(discards=True)
    assert torch.equal(EncodedSlice(shard, 0, 16, 20, is_written=False).view(), rounded(values))
    EncodedSlice(shard, 0, 16, 20, is_written=False).view().zero_()
    shard.close()
    assert torch.equal(shard.read(0, 16, 20), rounded(values)), "a slice that is read is a copy"


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from([1, 2, 16, 64]),
    st.integers(1, 400),
)
def test_frozen_parameters_begin_at_blocks(sizes: list[int], partitions: int, block: int, bucket_numel: int) -> None:
    """Partitions are whole blocks, parameters share none, and sections of trained ones are as without blocks."""
    specs = [
        ParamSpec(f"p{index}", (size,), (size,), (0,), trainable=index % 2 == 0) for index, size in enumerate(sizes)
    ]
    slots = [Slot(spec, torch.float32, True, 0) for spec in specs]
    units = [Unit("unit", tuple(spec.name for spec in specs))]
    layout = build_layout(units, slots, LayoutRules(partitions, bucket_numel, frozen_block=block))
    plain = build_layout(units, slots, LayoutRules(partitions, bucket_numel))
    for section, same in zip(layout.sections, plain.sections, strict=True):
        assert section.used_numel == sum(slot.spec.numel for slot in section.slots) == same.used_numel
        if section.trainable:
            assert (section.slots, section.numel) == (same.slots, same.numel)
            continue
        assert all(slot.start % block == 0 for slot in section.slots)
        for bucket in section.buckets:
            for rank in range(partitions):
                part = bucket.partition(rank)
                assert part.start % block == part.numel % block == 0
        covered = [fragment.numel for bucket in section.buckets for fragment in bucket.fragments.values()]
        assert sum(covered) == section.used_numel
