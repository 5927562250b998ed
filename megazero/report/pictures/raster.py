"""Turns megazero's own SVG pictures into pixels, for TensorBoard, which shows no SVG; in light colours.

It reads what `svg.py` and its callers write and no more: rectangles, circles, text of one line, and paths of straight
lines, with attributes or the classes of `CLASSES` for colours.  Pillow, which TensorBoard itself needs, draws them, at
twice the size for sharp text.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from megazero.svg import LIGHT

_SCALE = 2
_FILLS: Mapping[str, str] = MappingProxyType(
    {"paper": LIGHT["paper"], "band": LIGHT["band"], "faint-band": LIGHT["faint"], "line-band": LIGHT["line"]}
)
_STROKES: Mapping[str, str] = MappingProxyType(
    {
        **{"ink": LIGHT["ink"], "line": LIGHT["line"], "edge": LIGHT["line"], "faint": LIGHT["faint"]},
        **{"message": LIGHT["soft"], "box": LIGHT["paper"]},
    }
)
_TEXTS: Mapping[str, str] = MappingProxyType(
    {**dict.fromkeys(("title", "strong", "row", "number"), LIGHT["ink"]), "light": "#ffffff", "on-colour": "#ffffff"}
)
_CENTRED = ("middle", "tick", "number")
_MOVES = re.compile(r"([MLHVZmlhv])([^MLHVZmlhv]*)")
_Points = list[tuple[float, float]]


def to_pixels(svg: str) -> NDArray[np.uint8]:
    """Return the picture, uint8 [height, width, 3]."""
    from PIL import Image, ImageDraw

    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    image = Image.new("RGB", (round(width * _SCALE), round(height * _SCALE)), "#ffffff")
    canvas = ImageDraw.Draw(image, "RGBA")
    for element in root.iter():
        kind = element.tag.rpartition("}")[2]
        if kind == "rect":
            _rectangle(canvas, element.attrib)
        elif kind == "path":
            _path(canvas, element.attrib)
        elif kind == "text":
            _text(canvas, element.attrib, element.text or "")
        elif kind == "circle":
            x, y, r = (_SCALE * float(element.attrib[name]) for name in ("cx", "cy", "r"))
            canvas.ellipse((x - r, y - r, x + r, y + r), fill=element.attrib["fill"])
    pixels: NDArray[np.uint8] = np.asarray(image)
    return pixels


def _rectangle(canvas: Any, given: Mapping[str, str]) -> None:
    x, y = (_SCALE * float(given.get(name, "0")) for name in ("x", "y"))
    width, height = (_SCALE * float(given[name]) for name in ("width", "height"))
    canvas.rectangle((x, y, max(x, x + width - 1), max(y, y + height - 1)), fill=_fill(given), outline=_stroke(given))


def _path(canvas: Any, given: Mapping[str, str]) -> None:
    fill, stroke = _fill(given), _stroke(given)
    for points, is_closed in _lines(given["d"]):
        scaled = [(_SCALE * x, _SCALE * y) for x, y in points]
        if fill is not None and len(scaled) > 2 and is_closed:
            canvas.polygon(scaled, fill=fill)
        elif stroke is not None and len(scaled) > 1:
            canvas.line(scaled, fill=stroke, width=max(round(_SCALE * float(given.get("stroke-width", "1"))), 1))


def _lines(path: str) -> Iterator[tuple[_Points, bool]]:
    """Yield the polylines of a path, and if each is closed."""
    points: _Points = []
    x = y = 0.0
    for command, text in _MOVES.findall(path):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", text)]
        if command in "Mm" and points:
            yield points, False
            points = []
        if command == "Z":
            yield points, True
            points = []
        elif command in "Hh":
            x = numbers[0] + x * (command == "h")
            points.append((x, y))
        elif command in "Vv":
            y = numbers[0] + y * (command == "v")
            points.append((x, y))
        else:
            is_relative = command.islower()
            for dx, dy in zip(numbers[::2], numbers[1::2], strict=True):
                x, y = dx + x * is_relative, dy + y * is_relative
                points.append((x, y))
    if points:
        yield points, False


def _text(canvas: Any, given: Mapping[str, str], content: str) -> None:
    from PIL import ImageFont

    classes = given.get("class", "").split()
    size = 15 if "title" in classes else 12
    anchor = "rs" if "end" in classes else "ms" if any(name in _CENTRED for name in classes) else "ls"
    colour = next((_TEXTS[name] for name in reversed(classes) if name in _TEXTS), LIGHT["soft"])
    place = (_SCALE * float(given["x"]), _SCALE * float(given["y"]))
    canvas.text(place, content, fill=colour, font=ImageFont.load_default(_SCALE * size), anchor=anchor)


def _fill(given: Mapping[str, str]) -> str | None:
    """Return the colour inside, with its opacity; None for none."""
    classes = given.get("class", "").split()
    colour = given.get("fill") or next((_FILLS[name] for name in classes if name in _FILLS), None)
    if colour in (None, "none", "transparent"):
        return None
    return f"{colour}{round(255 * float(given.get('fill-opacity', '1'))):02x}"


def _stroke(given: Mapping[str, str]) -> str | None:
    classes = given.get("class", "").split()
    return given.get("stroke") or next((_STROKES[name] for name in classes if name in _STROKES), None)
