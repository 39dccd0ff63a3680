#!/usr/bin/env bash
# Create .venv and install selectron in it, editable, with the versions of constraints.txt, under Python 3.12 and later
# with those of constraints-py312.txt. `tools/install.sh dev` adds the extra `dev` of pyproject.toml: the packages for
# tests, lint and types. `make` calls this script when pyproject.toml, a constraints file or the script itself has
# changed. PYTHON names an interpreter other than python3.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=.venv
extra=${1:-}

fail() {
    echo "install: error: $*" >&2
    exit 2
}

version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') ||
    fail "$python does not run; install Python 3.11 or later, or name one: make install PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is Python $version, and selectron needs 3.11 or later; name one: make install PYTHON=python3.12"

pins="constraints-py312.txt"
if "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
    pins="constraints.txt"
fi

# A machine with CUDA has a torch that fits its driver. The environment uses that torch, and no pin may replace it.
has_cuda_torch() {
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

if has_cuda_torch; then
    borrow=--system-site-packages
else
    borrow=
fi
if ! "$venv/bin/python" -c '' 2>/dev/null; then
    echo "install: Python $version, new environment in $venv"
    "$python" -m venv --clear $borrow "$venv" ||
        fail "$python cannot make a virtual environment; install its venv module (on Debian: python3-venv)"
fi

# Check this first: two packages named `kernels` in one environment would silently overwrite each other.
"$venv/bin/python" -m kernels.name_conflict

constraints=$venv/constraints.txt
pip=("$venv/bin/python" -m pip install --quiet --quiet) # errors only
if [ -n "$borrow" ]; then
    echo "install: keeps this machine's torch, which has CUDA, and its Triton"
    grep -vE '^(torch|triton)==' "$pins" >"$constraints"
else
    cp "$pins" "$constraints"
    # Install torch alone, so that the resolver takes the build that this machine offers and not gigabytes of CUDA.
    torch=$(grep '^torch==' "$pins")
    echo "install: $torch"
    "${pip[@]}" -c "$constraints" "$torch"
fi
# DeepSpeed is a source distribution. Building it in an isolated environment would download another torch. DeepSpeed
# compiles its kernels at first use, and Selectron uses none that needs compiling.
deepspeed=$(grep '^deepspeed==' "$pins")
echo "install: $deepspeed"
"${pip[@]}" -c "$constraints" setuptools
DS_BUILD_OPS=0 "${pip[@]}" -c "$constraints" --no-build-isolation "$deepspeed"
echo "install: selectron${extra:+ and its extra $extra}"
"${pip[@]}" -c "$constraints" -e ".${extra:+[$extra]}"
touch "$venv/.installed${extra:+-$extra}"
echo "install: done; . $venv/bin/activate gives the command selectron"
