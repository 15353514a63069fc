"""Tiny models that start from random weights, and their tokenizer of tags and letters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tango_hpc.config.schema import TinyModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAGS = (
    "<question>", "<solve>", "<solution>", "<verify>", "<think>", "</think>", "<step>", "</step>", "<answer>", "</answer>",
    "<step_verification>", "</step_verification>", "<final_verification>", "</final_verification>",
    "\\boxed{CORRECT}", "\\boxed{INCORRECT}", "\\boxed{", "}", "->", ":", ",", " ",
)  # fmt: skip
END, PAD, UNKNOWN = "<eos>", "<pad>", "<unk>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY_SIZE = 3 + len(TAGS) + len(LETTERS)


def build_tokenizer(out_dir: Path) -> PreTrainedTokenizerBase:
    """Write a tokenizer with one token per letter and per tag; text in other characters becomes `<unk>`.

    Load it with `protocol.tokenizer.load_tokenizer`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, END, UNKNOWN, *TAGS, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    longest_first = sorted(TAGS, key=len, reverse=True)
    escaped = ["".join(f"\\{c}" if not c.isalnum() else c for c in tag) for tag in longest_first]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{'|'.join(escaped)}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    wrapped.save_pretrained(out_dir)
    return wrapped


def build_tiny_model(out_dir: Path, sizes: TinyModelConfig, seed: int) -> None:
    """Write a Hugging Face folder with that tokenizer and float32 weights drawn from `seed`, whole or not at all."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    partial = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = build_tokenizer(partial)
    config = AutoConfig.for_model(
        sizes.family,
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.hidden_size // sizes.num_heads,
        max_position_embeddings=sizes.max_position,
        tie_word_embeddings=sizes.tie_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(partial)
    partial.rename(out_dir)
