"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast


def load_tokenizer(path: Path, chat_template: str = "auto") -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder as its `tokenizer.json` has it; never from a hub.

    Its chat template is the folder's own ("auto"), none at all ("none"), or that of a Jinja file.

    `AutoTokenizer` would go by the model type, and put Qwen2's own splitting and decoding into any tokenizer that
    lies beside a Qwen2 model: a tiny model's would lose its spaces. It is asked only where there is no such file.
    """
    loader = PreTrainedTokenizerFast if (path / "tokenizer.json").is_file() else AutoTokenizer
    tokenizer = loader.from_pretrained(path, local_files_only=True)
    if chat_template != "auto":
        tokenizer.chat_template = None if chat_template == "none" else Path(chat_template).read_text(encoding="utf-8")
    return tokenizer
