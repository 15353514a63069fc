"""The smallest tokenizer that a model can be asked with."""

from __future__ import annotations

import json
from pathlib import Path


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json of one word and one special token, with id 0."""
    end = {"id": 0, "content": "<eos>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = {"type": "WordLevel", "vocab": {"<eos>": 0, "a": 1}, "unk_token": "a"}
    whole = {"version": "1.0", **parts, "added_tokens": [end | flags], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
