#!/usr/bin/env bash
# Rubbish through everything that reads what a model, a user or a disk gives: by hypothesis, then by atheris, which looks
# for inputs that reach new code and is installed aside (FUZZER, default .fuzzer). Arguments go to `python -m tests.fuzz`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
aside="${FUZZER:-.fuzzer}"
[ -d "$aside/atheris" ] || python -m pip install --quiet --target "$aside" --no-deps atheris==3.0.0
export PYTHONPATH="$PWD:$aside"
python -P -m tests.fuzz "$@"
exec python -P -m tests.fuzz --guided "$@"
