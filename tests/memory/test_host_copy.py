"""Tests of copies to the host."""

import torch

from megazero.memory.host_copy import HostCopy


def test_figures_are_those_of_the_moment() -> None:
    one, two = torch.tensor(1.5), torch.tensor(-2.0)
    copy = HostCopy([one, two])
    one.zero_()
    assert copy.read() == [1.5, -2.0]
