"""Checks, in the environment that runs this, what the GPU path takes from vLLM, torch and Megatron-core.

    python tools/gpu_build RESULT.json           # run the checks
    python tools/gpu_build --table RESULT.json ...   # what several environments answered

Both exit 1 where something moved. tools/check_gpu_build.sh makes the environments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

# Nothing here may see a card, and Triton takes no visible card for "later", as our ranks' launcher may have it.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
ONLY_A_GPU = (
    "that kernels compute the right thing, fast: varlen_attn, products in float32, fused AdamW, vLLM's own (parts 1, 5, 6)",
    "how many bytes leave the card on offload and sleep, and that copies are done in time (part 2)",
    "that NCCL connects, and weights arrive bit for bit over it (part 3)",
    "cudaHostRegister, CUDA graphs, custom all-reduce, and that engine and trainer agree on log-probabilities (parts 2 to 4)",
)


def main() -> int:
    """Exit code: 0 all as our code takes it, 1 something moved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        warnings.filterwarnings("ignore")
        write(arguments.results[0])
    return print_table(arguments.results)


def write(path: Path) -> None:
    """Run all checks; versions and results as JSON."""
    import trainer_checks

    results = trainer_checks.run()
    import engine_checks  # from here on this process takes itself for one with a GPU

    results |= engine_checks.run()
    names = {"torch": "torch", "megatron": "megatron-core", "transformers": "transformers"}
    versions = {key: version(name) for key, name in names.items()}
    import vllm

    path.write_text(json.dumps({"vllm": vllm.__version__, **versions, "results": results}, indent=1))


def print_table(paths: list[Path]) -> int:
    """Checks by versions, then what moved, then what cannot be known here."""
    runs = [json.loads(path.read_text()) for path in paths]
    rows = list(dict.fromkeys(name for run in runs for name in run["results"]))
    width = max(len(row) for row in rows) + 2
    print("".ljust(width) + "".join(f"vLLM {run['vllm']}".ljust(14) for run in runs))
    for key in ("torch", "megatron", "transformers"):
        print(key.ljust(width) + "".join(run[key].ljust(14) for run in runs))
    moved = []
    for row in rows:
        cells = [run["results"].get(row, "-") for run in runs]
        print(row.ljust(width) + "".join((cell if cell in ("ok", "-") else "MOVED").ljust(14) for cell in cells).rstrip())
        moved += [(run["vllm"], row, cell) for run, cell in zip(runs, cells, strict=True) if cell not in ("ok", "-")]
    for name, row, cell in moved:
        print(f"\nMoved, vLLM {name}, {row}:\n  {cell}")
    print("\nOnly a GPU can tell (tools/gpu_check.sh):")
    for item in ONLY_A_GPU:
        print(f"- {item}")
    return int(bool(moved))


if __name__ == "__main__":
    sys.exit(main())
