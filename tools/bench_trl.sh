#!/usr/bin/env bash
# Makes .venv-trl, an environment with TRL for `python -m tools.bench grpo`, beside the .venv of tools/install.sh: torch,
# transformers and what else TRL shares with this package are read from there, so that both sides run on the same ones.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/install.sh

TRL=.venv-trl
wanted="trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 multiprocess dill xxhash pandas python-dateutil six"
if [ ! -e "$TRL/.made" ] || [ "$(cat "$TRL/.made")" != "$wanted" ]; then
    rm -rf "$TRL"
    .venv/bin/python -m venv --without-pip "$TRL"
    site="$("$TRL/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/shared.pth"
    # shellcheck disable=SC2086
    .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --target "$site" $wanted
    "$TRL/bin/python" -c 'from trl import GRPOTrainer'
    echo "$wanted" > "$TRL/.made"
fi
echo "TRL is in $TRL; python -m tools.bench grpo finds it there."
