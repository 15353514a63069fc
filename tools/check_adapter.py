#!/usr/bin/env python3
"""What does an exported adapter lose, in bfloat16, where it is kept apart from the weights? On the CPU, in a minute.

    python tools/check_adapter.py models/Qwen2.5-0.5B-Instruct adapters/mine --text "Two plus two is four."

Training multiplied with round(W0 + s B A), the weights that `tango export` writes. PEFT and vLLM's `--enable-lora` add
the adapter's own product to that of W0. Compares the log-probability of every token of the texts in bfloat16, in both
ways, and each with float32. Needs peft.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

TEXTS = [
    "Natalia sold 48 clips in April and half as many in May. 48 / 2 = 24 clips in May. Altogether 48 + 24 = 72 clips.",
    r"Let $x^2 - 5x + 6 = 0$. Then $(x - 2)(x - 3) = 0$, so that $x = 2$ or $x = 3$. The answer is \boxed{2, 3}.",
]


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--text", action="append", help="Text to compare on (repeatable).")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tango_hpc.stages.convert import import_model

    texts = AutoTokenizer.from_pretrained(options.model)(options.text or TEXTS)["input_ids"]

    def logprobs(model: Any) -> torch.Tensor:
        """Return the log-probability of each token after the first of each text."""
        found = []
        with torch.no_grad():
            for ids in texts:
                logits = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
                found.append(logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])
        return torch.cat(found)

    def load(folder: Path, dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    with tempfile.TemporaryDirectory() as scratch:
        merged = Path(scratch) / "merged"
        import_model(str(options.model), merged, "bfloat16", options.adapter)
        weights = logprobs(load(merged, torch.bfloat16))
    apart = logprobs(PeftModel.from_pretrained(load(options.model, torch.bfloat16), options.adapter).to(torch.bfloat16))
    exact = logprobs(PeftModel.from_pretrained(load(options.model, torch.float32), options.adapter))
    print(f"Log-probabilities of {len(exact):,} tokens, absolute differences in nats:")
    for name, one, other in (
        ("adapter apart - in the weights, bfloat16", apart, weights),
        ("in the weights, bfloat16 - float32", weights, exact),
        ("adapter apart, bfloat16 - float32", apart, exact),
    ):
        gap = (one - other).abs()
        print(f"{name:42} mean {gap.mean():.5f}  largest {gap.max():.5f}")


if __name__ == "__main__":
    main()
