"""Writes tokenizers of the kinds on Hugging Face's hub, in their own format, by the `tokenizers` library alone."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [f"the thing number {i} is in the bag of words, naïve café\n" for i in range(60)]
SIGNS = ["<unk>", "<s>", "</s>"]


def _byte_level() -> tuple[Tokenizer, Any]:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made, trainers.BpeTrainer(
        vocab_size=400, special_tokens=SIGNS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )


def _spaces_as_pieces() -> tuple[Tokenizer, Any]:
    """Return a tokenizer as Llama 2 has: pieces with U+2581 for a space, and single bytes where none fits."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_of_all = [f"<0x{byte:02X}>" for byte in range(256)]
    return made, trainers.BpeTrainer(vocab_size=450, special_tokens=[*SIGNS, *bytes_of_all])


def _word_pieces() -> tuple[Tokenizer, Any]:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    return made, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SIGNS)


KINDS = {"byte-level": _byte_level, "pieces": _spaces_as_pieces, "words": _word_pieces}


def write_hugging_face_files(folder: Path, kind: str, *, configured: object = {"content": "</s>"}) -> Tokenizer:
    """Write tokenizer.json, and `configured` as the end of a text beside it (None: no configuration); return it.

    The file puts <s> in front of a text by its template, pads to 64 ids and cuts after 32, as many on the hub do.
    """
    made, trainer = KINDS[kind]()
    made.train_from_iterator(LINES, trainer)
    made.add_tokens(["<extra>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.enable_padding(length=64)
    made.enable_truncation(32)
    content = json.loads(made.to_str())
    # Single bytes are pieces of the model, not signs, as which the trainer adds them.
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    if configured is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": configured}), encoding="utf-8")
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain.no_padding()
    plain.no_truncation()
    return plain
