#!/usr/bin/env bash
# Checks what only a GPU can tell and leaves one page with every figure: FOLDER/gpu_check.md (default: gpu_check/).
# Uses all GPUs that it sees; with one, what needs several is left out. Without vLLM the trainer's parts run alone.
# Without a GPU it rehearses: what a CPU can stand in for runs there, and the page says so.
#
#   bash tools/gpu_check.sh [FOLDER] [--minutes 9] [--wheels FOLDER] [--again PART] [-k EXPRESSION]
#
# A call ends after nine minutes at most; what is left runs in the next call with the same FOLDER, whose page grows.
# --again runs a part anew (1 to 7), or what has failed. --wheels unpacks a folder of wheels first, for a machine
# without a network: whole wheels or their pieces NAME.whl.partNN. It takes nothing that the environment has.
#
# Run it in an environment that has the package with its `gpu` extra and pytest (pip install -e '.[gpu,dev]'), inside an
# allocation. A page with failures is worth sending: each comes with its reason.
set -uo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
count="$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU')"
if [ "$count" -gt 0 ]; then
    # The test suite hides GPUs from its tests; these shall see them.
    export PYTEST_GPUS="${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((count - 1)))}"
elif [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURMD_NODENAME:-}" ]; then
    echo "This is not a node of job $SLURM_JOB_ID: salloc has left you on $(hostname). Go there with srun --pty bash." >&2
    exit 2
else
    export PYTEST_GPU_REHEARSAL=1
    echo "There is no GPU here: this is a rehearsal on the CPU."
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec python -P -m tests.gpu "$@"
