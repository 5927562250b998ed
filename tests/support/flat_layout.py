"""Figures of a flat layout that tests compare with."""

from megazero.zero.layout import FlatLayout


def padded_numel(layout: FlatLayout, *, trainable: bool) -> int:
    """Elements of all sections of that trainability, padding included."""
    return sum(section.numel for section in layout.sections if section.trainable == trainable)
