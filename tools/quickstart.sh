#!/usr/bin/env bash
# From a fresh clone to a trained generator and verifier on a laptop's CPU: fine-tunes two tiny models, then trains
# them against each other. Arguments are settings of configs/quickstart.yaml, and --resume:
#
#   bash tools/quickstart.sh
#   bash tools/quickstart.sh seed=1 run.dir=runs/second
#   bash tools/quickstart.sh --resume
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/install.sh
tango sft configs/quickstart.yaml "$@"
tango train configs/quickstart.yaml "$@"
