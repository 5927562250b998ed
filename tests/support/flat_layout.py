"""A figure of a flat layout that tests compare with."""

from megazero.zero.layout import FlatLayout


def padded_numel(layout: FlatLayout, *, trainable: bool) -> int:
    """Return the number of elements, with padding, of all sections that are trainable (or of all that are not)."""
    return sum(section.numel for section in layout.sections if section.trainable == trainable)
