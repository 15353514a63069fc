#!/usr/bin/env bash
# Installs what is needed and runs the checks and the whole test suite. Arguments go to pytest: tools/test.sh tests/unit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/install.sh
if [ "$#" -eq 0 ]; then
    ruff check .
    ruff format --check .
    mypy
fi
tools/slurm_test_cluster.sh install || echo "The tests in tests/slurm will be skipped, for the reason above."
# Where one thing is broken that many tests wait for, waiting it out in each takes hours and tells nothing more.
[ "$#" -gt 0 ] || set -- --numprocesses 2 --maxfail 8
exec python -m pytest "$@"
