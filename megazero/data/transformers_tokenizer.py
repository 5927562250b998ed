"""Makes the two files by which transformers loads a tokenizer: tokenizer.json and tokenizer_config.json.

    GPT2BPETokenizer         the same model of the `tokenizers` library, as TikTokenizer's is
    ByteTokenizer            a byte-level BPE without merges
    SentencePieceTokenizer   the library's BPE or unigram model of the same pieces, with the bytes of characters that
                             no piece has, the model's normalization, and its prefix of a space, if it has one
    HuggingFaceTokenizer     its own description, without padding and truncation

They encode as the tokenizer itself, or there are none: both are compared on texts of the tokenizer's own pieces.  One
thing differs: in a text, transformers takes the spelling of a sign (`</s>`) for the sign.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from megazero.data.rank_files import byte_characters
from megazero.data.tokenizers import (
    END_OF_TEXT,
    Gpt2BpeTokenizer,
    JsonTokenizer,
    RankTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from megazero.errors import DataError, Problem

_SPACE = "\u2581"  # SentencePiece's sign for a space
_NUM_TEXTS, _PIECES = 400, 24
_TEXTS = (
    *("", " ", "  two  spaces ", "\ttab\nline\r\n\n", "don't we'll I'M", "0123456789 3.14e-5", "a" * 70),
    *("if (x != y) { return; }", "naïve café Ελληνικά русский 中文 日本語 한국어", "e\u0301 \u00a0 \u200b"),
    *("\U0001f642\U0001f643 \U0001f469\u200d\U0001f469\u200d\U0001f467", "\x00\x01\x7f\ufeff\ufffd"),
)


def files_for_transformers(tokenizer: Tokenizer, *, longest: int) -> dict[str, str]:
    """Return the text of each file by its name; longest: the ids that the model takes at most.

    Raises DataError if the `tokenizers` library has no such tokenizer.
    """
    made = _converted(tokenizer)
    _check_same(tokenizer, made)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": made.id_to_token(tokenizer.eod),
        "bos_token": made.id_to_token(tokenizer.eod),
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": made.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def _converted(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    if isinstance(tokenizer, Gpt2BpeTokenizer | RankTokenizer):
        return HuggingFaceTokenizer.from_str(tokenizer.description())
    if isinstance(tokenizer, JsonTokenizer):
        made = HuggingFaceTokenizer.from_str(tokenizer.content)
        made.no_padding()
        made.no_truncation()
        return made
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _of_sentence_piece(tokenizer)
    # Every byte has a character, and the 256 characters are the pieces, in the order of bytes.
    alphabet = {piece: number for number, piece in enumerate(byte_characters())}
    made = HuggingFaceTokenizer(models.BPE(alphabet, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return made


def _of_sentence_piece(tokenizer: SentencePieceTokenizer) -> HuggingFaceTokenizer:
    from sentencepiece import sentencepiece_model_pb2

    # protobuf makes the class when the module is imported.
    proto: Any = vars(sentencepiece_model_pb2)["ModelProto"].FromString(tokenizer.content)
    kind = type(proto.pieces[0])
    scores = {piece.piece: piece.score for piece in proto.pieces}
    has_bytes = any(piece.type == kind.BYTE for piece in proto.pieces)
    unknown = next(number for number, piece in enumerate(proto.pieces) if piece.type == kind.UNKNOWN)
    if proto.trainer_spec.model_type == type(proto.trainer_spec).UNIGRAM:
        rows = [(piece.piece, piece.score) for piece in proto.pieces]
        made = HuggingFaceTokenizer(models.Unigram(rows, unk_id=unknown, byte_fallback=has_bytes))
    else:
        ids = {piece.piece: number for number, piece in enumerate(proto.pieces)}
        text = {piece.piece for piece in proto.pieces if piece.type in (kind.NORMAL, kind.USER_DEFINED)}
        model = models.BPE(
            ids,
            sorted(_merges(text), key=lambda pair: -scores["".join(pair)]),
            unk_token=proto.pieces[unknown].piece,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
        made = HuggingFaceTokenizer(model)
    rules = proto.normalizer_spec
    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []),
        ]
    )
    own = [piece.piece for piece in proto.pieces if piece.type == kind.USER_DEFINED]
    made.add_tokens([AddedToken(piece, normalized=True) for piece in own])
    signs = [piece.piece for piece in proto.pieces if piece.type in (kind.CONTROL, kind.UNKNOWN)]
    if tokenizer.eod == len(proto.pieces):
        signs.append(END_OF_TEXT)
    made.add_special_tokens([AddedToken(sign, normalized=False) for sign in signs])
    return made


def _merges(pieces: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of pieces that together are a piece."""
    for piece in pieces:
        for cut in range(1, len(piece)):
            if piece[:cut] in pieces and piece[cut:] in pieces:
                yield piece[:cut], piece[cut:]


def _check_same(tokenizer: Tokenizer, made: HuggingFaceTokenizer) -> None:
    """Raise DataError for the first text that the two encode or decode differently."""
    drawn = random.Random(0)
    ids = [number for number, size in enumerate(tokenizer.token_bytes()) if size]
    texts = [tokenizer.decode(drawn.choices(ids, k=_PIECES)) for _ in range(_NUM_TEXTS)]
    signs = {number: token for number, token in made.get_added_tokens_decoder().items() if token.special}
    for text in (*_TEXTS, *texts):
        if any(sign.content in text for sign in signs.values()):
            continue
        ours, theirs = tokenizer.encode(text), made.encode(text, add_special_tokens=False).ids
        same = ours == theirs
        if same and not signs.keys() & set(ours):  # the sign of what is unknown is another text in either
            same = tokenizer.decode(ours) == made.decode(theirs, skip_special_tokens=False)
        if not same:
            rule = "a tokenizer for transformers has the same ids; the library that it uses gives others for this model"
            raise DataError(Problem(f"the tokenizer's {text[:60]!r}: {ours[:8]} here, {theirs[:8]} there", rule))
