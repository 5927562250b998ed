"""Tests the windows of long requests, and where a text is cut into context and continuation."""

from array import array
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as some
from support.each import each
from support.hugging_face_files import write_hugging_face_files

from megazero.data.tokenizers import ByteTokenizer, JsonTokenizer
from megazero.evaluate.windows import Request, continuation, whole, windows

BYTES = ByteTokenizer()


def spans(length: int, start: int, *, model: int, stride: int) -> list[tuple[int, int, int]]:
    request = Request(array("q", range(length)), start)
    return [(each.begin, each.first, each.end) for each in windows(5, request, length=model, stride=stride)]


def test_the_drawing_of_the_module() -> None:
    assert spans(10, 1, model=4, stride=2) == [(0, 1, 5), (2, 5, 7), (4, 7, 9), (5, 9, 10)]
    # Disjoint windows; the last one has the context of a whole one.
    assert spans(10, 1, model=4, stride=4) == [(0, 1, 5), (4, 5, 9), (5, 9, 10)]
    # A continuation with more context than the model reads.
    assert spans(10, 8, model=4, stride=4) == [(5, 8, 10)]
    assert spans(1, 1, model=4, stride=4) == []


@given(some.data())
def test_every_id_is_predicted_once_behind_enough_context(data: some.DataObject) -> None:
    length = data.draw(some.integers(1, 60))
    start, model = data.draw(some.integers(1, length)), data.draw(some.integers(1, 12))
    stride = data.draw(some.integers(1, model))
    found = spans(length, start, model=model, stride=stride)
    assert [place for _, first, end in found for place in range(first, end)] == list(range(start, length))
    for number, (begin, first, end) in enumerate(found):
        assert 0 <= begin < first and end - 1 - begin <= model
        assert number == 0 or (end - first <= stride and end - 1 - begin == model)


def test_a_text_comes_behind_an_end_of_document() -> None:
    assert whole(BYTES, "ab") == (array("q", [256, 97, 98]), 1)
    assert whole(BYTES, "") == (array("q", [256]), 1)


@each(
    ("context", "text", "ids", "start"),
    [
        ("ab", " c", b"ab c", 2),
        ("ab \n", "c", b"ab \nc", 2),
        ("", "c", [256, *b"c"], 1),
        (" ", "c", [256, *b" c"], 1),
    ],
)
def test_blanks_at_the_end_of_a_context_belong_to_the_text(
    context: str, text: str, ids: bytes | list[int], start: int
) -> None:
    assert continuation(BYTES, context, text) == (array("q", list(ids)), start)


def test_a_text_that_joins_the_last_token_of_its_context_is_that_token(tmp_path: Path) -> None:
    write_hugging_face_files(tmp_path, "byte-level")
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    (joined,), pieces = tokenizer.encode("in"), tokenizer.encode("i")
    assert len(pieces) == 1 and pieces != [joined]
    assert continuation(tokenizer, "i", "n") == (array("q", [tokenizer.eod, joined]), 1)
    before, both = tokenizer.encode("the bag"), tokenizer.encode("the bag of")
    assert continuation(tokenizer, "the bag", " of") == (array("q", both), len(before))


def test_an_end_of_document_is_not_put_in_front_of_another(tmp_path: Path) -> None:
    write_hugging_face_files(tmp_path, "byte-level")
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("</s> words")
    assert ids[0] == tokenizer.eod
    assert continuation(tokenizer, "", "</s> words") == (array("q", ids), 1)
