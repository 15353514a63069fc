"""What `python -m tools.bench start` measures against: vLLM alone, from nothing to its first token. An argument names
the model.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """One prompt, one token."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=208, enforce_eager=True)
    parameters = SamplingParams(max_tokens=1, detokenize=False)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], parameters, use_tqdm=False)
    print("first token", flush=True)


if __name__ == "__main__":
    main()
