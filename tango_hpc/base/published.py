"""Sizes of the models that the shipped configurations name, and of one of each family, for planning before their
weights are there.

Copied from the `config.json` of each release; what the paper's recipes fine-tune has the sizes of what it was. A folder
that exists is always read instead.
"""

from __future__ import annotations

from typing import Any

_QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
_QWEN_32B = _QWEN_7B | {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
_QWEN_14B = _QWEN_32B | {"intermediate_size": 13824, "num_hidden_layers": 48}
_QWEN_SMALL = {"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
_QWEN_05B = _QWEN_SMALL | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
_QWEN_15B = _QWEN_SMALL | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
_QWEN_3B = _QWEN_SMALL | {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
}


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    """Return the config of a Qwen3 model: sizes of its hidden state and feed-forward part, layers, query heads."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
    }


_QWEN3_4B = _qwen3(2560, 9728, 36, 32, tied=True)
_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
_LLAMA_8B = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_LLAMA_70B = _LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}

_OLMO_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
}
_OTHERS: dict[str, dict[str, Any]] = {
    "Mistral-7B-Instruct-v0.3": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 32768,
        "sliding_window": None, "tie_word_embeddings": False,
    },
    "OLMo-2-1124-7B-Instruct": _OLMO_7B | {
        "model_type": "olmo2", "vocab_size": 100352, "max_position_embeddings": 4096,
    },
    "Olmo-3-7B-Instruct": _OLMO_7B | {
        "model_type": "olmo3", "vocab_size": 100278, "max_position_embeddings": 65536, "sliding_window": 4096,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256, "max_position_embeddings": 65536,
    },
    "gemma-3-1b-it": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "max_position_embeddings": 32768, "sliding_window": 512,
    },
    "Phi-4-mini-instruct": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "granite-3.1-2b-instruct": {
        "model_type": "granite", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49155, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-Math-7B": _QWEN_7B | {"max_position_embeddings": 4096},
    "Qwen2.5-7B": _QWEN_7B | {"max_position_embeddings": 131072},
    "Qwen2.5-7B-Instruct": _QWEN_7B | {"max_position_embeddings": 32768},
    "Qwen2.5-32B-Instruct": _QWEN_32B | {"max_position_embeddings": 32768},
    "Qwen2.5-14B-Instruct": _QWEN_14B | {"max_position_embeddings": 32768},
    "Qwen2.5-3B-Instruct": _QWEN_3B | {"max_position_embeddings": 32768},
    "Qwen2.5-0.5B": _QWEN_05B | {"max_position_embeddings": 32768},
    "Qwen2.5-0.5B-Instruct": _QWEN_05B | {"max_position_embeddings": 32768},
    "Qwen2.5-1.5B": _QWEN_15B | {"max_position_embeddings": 131072},
    "Qwen2.5-1.5B-Instruct": _QWEN_15B | {"max_position_embeddings": 32768},
    "Qwen2.5-Math-1.5B": _QWEN_15B | {"max_position_embeddings": 4096},
    "DeepSeek-R1-Distill-Qwen-7B": _QWEN_7B | {"max_position_embeddings": 131072},
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _QWEN3_4B,
    "Qwen3-4B-Instruct-2507": _QWEN3_4B | {"max_position_embeddings": 262144},
    "Qwen3-4B-Thinking-2507": _QWEN3_4B | {"max_position_embeddings": 262144},
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
    "Llama-3.1-8B-Instruct": _LLAMA_8B | {"max_position_embeddings": 131072},
    "Llama-3.1-70B-Instruct": _LLAMA_70B | {"max_position_embeddings": 131072},
    **_OTHERS,
}
PUBLISHED["qwen2.5-math-7b-sft"] = PUBLISHED["Qwen2.5-Math-7B"]
PUBLISHED["llama-3.1-8b-sft"] = PUBLISHED["Llama-3.1-8B-Instruct"]


def published_dimensions(folder_name: str) -> dict[str, Any] | None:
    """Return the published Hugging Face config of a model whose folder has this name, where it is known."""
    return PUBLISHED.get(folder_name)
