"""What others leave in a working directory, all of it wrong: a test that reads any of it fails."""

from __future__ import annotations

import json
from pathlib import Path

_ODD_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 10, "intermediate_size": 7,
    "num_hidden_layers": 1, "num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": 11,
    "max_position_embeddings": 8, "tie_word_embeddings": False,
}  # fmt: skip
_NO_YAML = "[somebody else's"
_NO_TABLE = b"somebody else's"
_NO_PROGRAM = "raise RuntimeError('this package lay in the working directory by chance')\n"


def lay_out_decoys(folder: Path) -> None:
    """Fills `folder` with what a finished quick start leaves, and a clone has, with contents that nobody can use."""
    run = folder / "runs" / "quickstart"
    for name in ("untrained", "generator_sft", "verifier_sft"):
        _write(run / "models" / name / "config.json", json.dumps(_ODD_MODEL))
        _write(run / "models" / name / "model.safetensors", _NO_TABLE)
    for name in ("train", "eval", "sft_generator", "sft_verifier"):
        _write(run / "data" / f"{name}.parquet", _NO_TABLE)
    for name in ("config.yaml", "metrics.jsonl", "evaluations.jsonl", "summary.json", "provenance.json"):
        _write(run / name, _NO_YAML)
    _write(run / "control" / "lock", json.dumps({"host": "elsewhere", "pid": 1, "job": "1"}))
    _write(run / "checkpoints" / "train" / "step_000009" / "rank_00000", _NO_TABLE)
    for name in ("configs/quickstart.yaml", "tools/bench/reshard.yaml", "slurm/profiles/generic.yaml", "sweep.yaml"):
        _write(folder / name, _NO_YAML)
    _write(folder / "tango_hpc" / "__init__.py", _NO_PROGRAM)
    _write(folder / "tests" / "__init__.py", _NO_PROGRAM)


def _write(file: Path, content: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
