"""What `tango export --adapter` writes, in vLLM's own LoRA (`--enable-lora`), against the merged weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tango_hpc.base.config.roles import AdapterConfig
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.small_tokenizer import write_tokenizer
from tests.helpers.tiny import make_tiny_hf

PROMPT = [5, 17, 3, 99, 42, 7, 80, 64]
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
folder, prompt = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(f"{folder}/model", enable_lora=True, max_lora_rank=8, dtype="float32", max_model_len=64, max_num_seqs=4,
          enforce_eager=True, kv_cache_memory_bytes=20 * 2**20)
found = {}
for name, lora in (("adapter", LoRARequest("adapter", 1, f"{folder}/adapter")), ("base", None)):
    (output,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, prompt_logprobs=0),
                             lora_request=lora)
    found[name] = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:])]
print("FOUND", json.dumps(found))
"""


def export(folder: Path) -> None:
    policy = policy_of(folder / "model", adapter=AdapterConfig(rank=8, alpha=16), seed="0 generator")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for value in policy.adapters.parameters().values():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    policy.export_adapter(folder / "adapter")
    policy.export_hf(folder / "merged")


def test_vllm_serves_an_exported_adapter(tmp_path: Path) -> None:
    make_tiny_hf(tmp_path / "model", "llama", num_attention_heads=2, num_key_value_heads=2, vocab_size=128)
    write_tokenizer(tmp_path / "model")
    run_ranks(export, 1, tmp_path)
    words = [sys.executable, "-c", SERVE, str(tmp_path), json.dumps(PROMPT)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    served = json.loads(line.removeprefix("FOUND "))
    for name, folder in (("adapter", "merged"), ("base", "model")):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        expected = [logprobs[i, token].item() for i, token in enumerate(PROMPT[1:])]
        np.testing.assert_allclose(served[name], expected, atol=2e-5)
    assert not np.allclose(served["adapter"], served["base"], atol=1e-2)
