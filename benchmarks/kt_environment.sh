#!/bin/sh
# An environment of its own for kt-kernel, so that `ktc bench moe --kt-python FOLDER/bin/python` can measure it.
#
#   benchmarks/kt_environment.sh [FOLDER]        (default: build/kt-kernel)
#
# kt-kernel pins a release of torch whose PyPI wheel brings gigabytes of CUDA; its extension does not link torch, and the
# tested CPU build does. So it is installed without its dependencies, and then what importing it asks for.
# PYTHON: the interpreter, 3.10 or newer. TORCH_INDEX: where pip finds CPU builds of torch.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build/kt-kernel}
"${PYTHON:-python3}" -m venv "$folder"
torch=$(sed -n 's/^torch==\([0-9.]*\).*/torch==\1+cpu/p' constraints.txt)
grep -v '^torch==' constraints.txt > "$folder/constraints.txt"
pip="$folder/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c $folder/constraints.txt"
$pip --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$torch" numpy safetensors gguf
$pip --no-deps kt-kernel==0.7.2
"$folder/bin/python" -c 'import kt_kernel; print("kt-kernel", kt_kernel.__version__, kt_kernel.__cpu_variant__)'
