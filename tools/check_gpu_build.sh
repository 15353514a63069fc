#!/usr/bin/env bash
# Does the GPU path fit a release of vLLM? Installs its GPU build with torch and Megatron-core into an environment of its
# own and checks every name, signature and assumption that is taken from them, on a machine without a GPU. For the
# releases of docs/on_your_cluster.md's table, or those that you name. Run it before you upgrade vLLM.
#
#   bash tools/check_gpu_build.sh [--folder FOLDER] [VERSION...]      such as: 0.32.0 0.33.0
#   bash tools/check_gpu_build.sh --platform aarch64 [VERSION...]     has every package a wheel for that machine?
#
#   --folder FOLDER     where the environment goes; default: .gpu_build in the clone. Takes 9 GB, and pip's cache 5 more;
#                       14 must be free. A second run takes what is installed there.
#   --platform MACHINE  aarch64 (Grace-Hopper) or x86_64, which need not be this machine. Resolves the packages for
#                       Linux on it with Python 3.11, 3.12 and 3.13, wheels alone, and installs only uv (60 MB) for that
#   GLIBC=2.31          the C library of that platform (ldd --version); by default 2.34, as on RHEL and Rocky Linux 9
#   PYTHON=python3.12   the interpreter to use (3.11, 3.12 or 3.13)
#
# Exit codes: 0 all as our code takes it; 1 something moved or has no wheel, which is named; 2 it could not be checked.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
supported=(0.33.0 0.32.0 0.31.0 0.30.0 0.29.0 0.28.0 0.27.1 0.26.0) # newest first
glibc="${GLIBC:-2.34}"
folder="$root/.gpu_build" platform="" versions=()

fail() { printf '\nCannot check: %s\n' "$*" >&2; exit 2; }

while [ "$#" -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --folder) [ "$#" -ge 2 ] || fail "--folder needs a folder"; folder="$2"; shift ;;
        --platform) [[ "${2:-}" =~ ^(aarch64|x86_64)$ ]] || fail "--platform needs aarch64 or x86_64"; platform="$2"; shift ;;
        -*) fail "there is no option $1; see --help" ;;
        *) [[ "$1" =~ ^[0-9]+\.[0-9]+\.[0-9]+(\.?(rc|post)[0-9]+)?$ ]] || fail "$1 is no version of vLLM, such as ${supported[0]}"; versions+=("$1") ;;
    esac
    shift
done
[[ "$glibc" =~ ^2\.(17|28|3[1-9]|40)$ ]] || fail "GLIBC=$glibc is none of 2.17, 2.28, 2.31 to 2.40"
[ "${#versions[@]}" -gt 0 ] || versions=("${supported[@]}")
mkdir -p "$folder" 2>/dev/null && [ -w "$folder" ] || fail "nothing can be written to $folder; name another with --folder"
folder="$(cd "$folder" && pwd)"
python="$folder/env/bin/python"

make_environment() { # a folder
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3} ""; do
        [ -n "$candidate" ] || fail "Python 3.11, 3.12 or 3.13 is needed and none was found; name one with PYTHON=/path/to/python3.11"
        "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && break
    done
    "$candidate" -m venv "$1" || fail "$candidate could not make an environment in $folder (above)"
}

run_pip() { # what for, and pip's arguments
    local what="$1"; shift
    nice -n 10 "$python" -m pip --disable-pip-version-check --no-input install --quiet "$@" >"$folder/pip.log" 2>&1 \
        || { tail -n 15 "$folder/pip.log" >&2; fail "pip could not install $what (above). Is the package index reachable, and does it have that release?"; }
}

need_mb() { # megabytes, and what for
    local free_mb; free_mb="$(df -Pm "$folder" | awk 'NR==2 {print $4}')"
    [ "$free_mb" -ge "$1" ] || fail "$2 takes $1 MB and $folder has $free_mb MB free; name a larger disk with --folder"
}

installed() { "$python" -c 'from importlib.metadata import version; print(version("vllm"))' 2>/dev/null || true; }

install_vllm() { # a version
    local stamp
    stamp="$folder/.package-$(cksum <"$root/pyproject.toml" | cut -d' ' -f1)"
    if [ ! -e "$stamp" ]; then
        need_mb "$([ -x "$python" ] && echo 3000 || echo 14000)" "the GPU build"
        [ -x "$python" ] || make_environment "$folder/env"
        echo "Installing the package and the GPU builds of vLLM ${supported[0]} and torch into $folder (10 GB, some minutes) ..."
        run_pip "the package" --editable "$root[gpu]" "vllm==${supported[0]}"
        touch "$stamp"
    fi
    if [ "$(installed)" != "$1" ]; then
        need_mb 3000 "another vLLM"
        echo "Installing vLLM $1 ..."
        run_pip "vLLM $1" "vllm==$1"
    fi
    "$python" -c 'import torch, sys; sys.exit(torch.version.cuda is None)' \
        || fail "pip took a CPU build of torch. Another index or folder of pip's offers it (see: pip config list); without your settings: env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null bash tools/check_gpu_build.sh, after removing $folder"
}

# vLLM's libraries are linked against the driver's, and ranks ask the driver for their GPU. Where there is none, one that
# answers "no device" to every call; prints what goes in front of the library path.
stand_in_driver() {
    ! "$python" -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null || return 0
    command -v cc >/dev/null && command -v nm >/dev/null || fail "this machine has no NVIDIA driver, and a stand-in for its library needs cc and nm (on Debian: apt-get install gcc)"
    mkdir -p "$folder/driver"
    { find "$folder"/env/lib/python3*/site-packages/vllm -name '*.so' -exec nm -D --undefined-only {} +; cat "$root/tango_hpc/runner/affinity.py"; } \
        | grep -oE '\bcu[A-Z]\w*' | sort -u | sed 's/.*/int &(void) { return 100; }/' >"$folder/driver/libcuda.c"
    cc -shared -fPIC -w "$folder/driver/libcuda.c" -o "$folder/driver/libcuda.so.1" -Wl,-soname,libcuda.so.1 || fail "cc could not make $folder/driver/libcuda.so.1 (above)"
    echo "$folder/driver:"
}

install_uv() { # which takes the platform's markers where pip keeps this machine's
    local index
    python="$folder/uv/bin/python"
    [ -x "$python" ] || make_environment "$folder/uv"
    [ -x "$folder/uv/bin/uv" ] || run_pip uv uv
    index="${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}"
    [ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
    export XDG_CACHE_HOME="$folder/cache" UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"
}

check_wheels() { # a version and a Python; 1 where a package has no wheel
    local target="$platform with glibc $glibc and Python $2" packages="$folder/$1-$platform-$2.txt" code=0
    "$folder/uv/bin/uv" pip compile "$root/pyproject.toml" --extra gpu --override <(echo "vllm==$1") --quiet --no-header --no-annotate \
        --only-binary :all: --python-platform "$platform-manylinux_${glibc//./_}" --python-version "$2" --no-python-downloads \
        --output-file "$packages" >"$folder/uv.log" 2>&1 || code="$?"
    if [ "$code" -eq 1 ] && ! grep -q "there is no version of vllm" "$folder/uv.log"; then
        cat "$folder/uv.log" >&2
        echo "vLLM $1 cannot be installed on $target: uv names the package without a wheel above" >&2
        return 1
    fi
    [ "$code" -eq 0 ] || { tail -n 15 "$folder/uv.log" >&2; fail "uv could not resolve vLLM $1 for $target (above). Is the package index reachable, and does it have that release?"; }
    if ! grep -q '^nvidia-nccl' "$packages"; then
        echo "vLLM $1: the torch for $target is a build without CUDA ($(grep '^torch==' "$packages"))" >&2
        return 1
    fi
    echo "vLLM $1: $(grep -c == "$packages") packages have wheels for $target, with $(grep '^torch==' "$packages")"
}

moved=0 results=()
if [ -n "$platform" ]; then
    install_uv
    for version in "${versions[@]}"; do
        for minor in 3.11 3.12 3.13; do check_wheels "$version" "$minor" || moved=1; done
    done
    exit "$moved"
fi
for version in "${versions[@]}"; do
    install_vllm "$version"
    driver="$(stand_in_driver)"
    echo "Checking vLLM $version ..."
    result="$folder/$version.json" log="$folder/$version.log"
    rm -f "$result"
    LD_LIBRARY_PATH="$driver${LD_LIBRARY_PATH:-}" PYTHONPATH="$root" XDG_CACHE_HOME="$folder/cache" nice -n 10 "$python" "$root/tools/gpu_build" "$result" >"$log" 2>&1 || true
    if [ -e "$result" ]; then
        results+=("$result")
    else
        tail -n 15 "$log" >&2
        echo "vLLM $version: the checks themselves ended early (above; the whole log is $log)" >&2
        moved=1
    fi
done
[ "${#results[@]}" -eq 0 ] || "$python" "$root/tools/gpu_build" --table "${results[@]}" || moved=1
exit "$moved"
