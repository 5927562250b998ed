"""Pictures as pixels: what the SVG has lies where the SVG has it, in its colour."""

import numpy as np
import pytest
from numpy.typing import NDArray

from megazero.report.pictures.raster import to_pixels
from megazero.svg import legend, picture, text


def colour(pixels: NDArray[np.uint8], x: float, y: float) -> str:
    """Return the colour at a place of the SVG; a picture has twice its pixels."""
    return "#" + "".join(f"{part:02x}" for part in pixels[round(2 * y), round(2 * x)])


def test_shapes_lie_where_the_svg_has_them() -> None:
    parts = [
        '<rect x="10" y="10" width="20" height="10" fill="#ff0000"/>',
        '<rect class="band" x="40" y="10" width="20" height="10"/>',
        '<path fill="#0000ff" d="M10 40V50H30V40Z"><title>not drawn</title></path>',
        '<path class="ink" d="M40 45h20"/>',
        '<path class="ink" d="M70 40l10 10"/>',
        '<rect x="70" y="10" width="10" height="10" fill="#000000" fill-opacity="0.50"/>',
        '<circle cx="90" cy="15" r="4" fill="#00ff00"/>',
    ]
    pixels = to_pixels(picture(100, 60, parts, label="x"))
    assert pixels.shape == (120, 200, 3)
    expected = {
        (20, 15): "#ff0000",
        (50, 15): "#f3f5f8",
        (20, 45): "#0000ff",
        (50, 45): "#1c2530",
        (75, 45): "#1c2530",
        (90, 15): "#00ff00",
        (5, 5): "#ffffff",
        (35, 45): "#ffffff",
    }
    assert {place: colour(pixels, *place) for place in expected} == expected
    assert int(colour(pixels, 75, 15)[1:3], 16) == pytest.approx(127, abs=2)


@pytest.mark.parametrize(("kind", "columns"), [("", (100, 160)), ("end", (40, 100)), ("middle", (60, 140))])
def test_text_is_anchored(kind: str, columns: tuple[int, int]) -> None:
    """A text stands behind its place, before it, or around it."""
    pixels = to_pixels(picture(200, 40, [text(100, 25, "text", kind)], label="x"))
    inked = np.flatnonzero((pixels < 128).any(axis=(0, 2))) / 2
    assert len(inked) and columns[0] <= inked.min() and inked.max() <= columns[1]


def test_a_legend_has_its_colours() -> None:
    pixels = to_pixels(picture(200, 40, legend(10, 20, [("one", "#123456")]), label="x"))
    assert colour(pixels, 16, 16) == "#123456"
