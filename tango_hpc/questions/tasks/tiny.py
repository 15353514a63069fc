"""Tiny models that start from random weights, and their tokenizer of tags and letters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tango_hpc.base.config.models import SEED_FILE, built_dimensions
from tango_hpc.base.config.roles import TinyModelConfig
from tango_hpc.base.files import open_to_readers
from tango_hpc.base.tiny_language import END, LETTERS, PAD, TAGS, UNKNOWN, vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_tokenizer(out_dir: Path, characters: str = LETTERS) -> PreTrainedTokenizerBase:
    """Write a tokenizer with one token per character and per tag; text in other characters becomes `<unk>`.

    Load it with `protocol.tokenizer.load_tokenizer`.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(vocabulary(characters))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    longest_first = sorted(TAGS, key=len, reverse=True)
    escaped = ["".join(f"\\{c}" if not c.isalnum() else c for c in tag) for tag in longest_first]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{'|'.join(escaped)}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # Other programs go by the model type and put Qwen2's own splitting around the vocabulary; added tokens come first
    # there.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (*TAGS, *characters)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    wrapped.save_pretrained(out_dir)
    return wrapped


def build_tiny_model(out_dir: Path, sizes: TinyModelConfig, seed: int) -> None:
    """Write a Hugging Face folder with that tokenizer and float32 weights drawn from `seed`, whole or not at all.

    `SEED_FILE` in it remembers seed and characters; config.json has the sizes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    partial = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = build_tokenizer(partial, sizes.characters)
    dimensions = built_dimensions(sizes)
    config = AutoConfig.for_model(
        dimensions.pop("model_type"),
        **dimensions,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(partial)
    for file in partial.iterdir():
        open_to_readers(file)
    (partial / SEED_FILE).write_text(json.dumps({"seed": seed, "characters": sizes.characters}))
    partial.rename(out_dir)
