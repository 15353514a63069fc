"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder as its `tokenizer.json` has it; never from a hub.

    `AutoTokenizer` would go by the model type, and put Qwen2's own splitting and decoding into any tokenizer that
    lies beside a Qwen2 model: a tiny model's would lose its spaces. It is asked only where there is no such file.
    """
    if (path / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    return AutoTokenizer.from_pretrained(path, local_files_only=True)
