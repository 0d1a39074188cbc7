#!/bin/sh
# An environment of its own for llama.cpp, so that `ktc bench decode --peer llama.cpp` can measure it.
#
#   benchmarks/llama_environment.sh [FOLDER]        (default: build/llama)
#
# llama-cpp-python is built from its source for this processor: a wheel would lack its instructions. Without BLAS,
# since llama.cpp's own kernels are the peer. Made once: a second call changes nothing until this file changes.
# PYTHON: the interpreter, 3.10 or newer. JOBS: compilations at once, 2 by default. ISA=avx2: for a processor with AVX2
# and nothing newer, beside `ktc bench decode --isa avx2`. ISA=avx512: with AVX-512 too, without its VBMI, VNNI and BF16.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build/llama}
cmp -s benchmarks/llama_environment.sh "$folder/made-with" && exit 0
echo "making $folder: llama.cpp is built from its source, which takes some minutes"
"${PYTHON:-python3}" -m venv --clear "$folder"
pip="$folder/bin/python -m pip install --quiet --no-compile --disable-pip-version-check"
# The build takes cmake and ninja from PyPI too. No cache: a wheel in it may be for other instructions. pip's own build environment does not see the system's.
$pip cmake ninja scikit-build-core numpy typing-extensions jinja2 diskcache
avx2="-DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
case ${ISA:-native} in
native) instructions="-DGGML_NATIVE=ON" ;;
avx2) instructions="-DGGML_NATIVE=OFF $avx2" ;;
avx512) instructions="-DGGML_NATIVE=OFF $avx2 -DGGML_AVX512=ON" ;;
*) echo "ISA is native, avx2 or avx512, found '$ISA'" >&2; exit 2 ;;
esac
options="$instructions -DGGML_BLAS=OFF -DGGML_CUDA=OFF -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF -DGGML_OPENMP=ON"
PATH="$PWD/$folder/bin:$PATH" CMAKE_ARGS="$options" CMAKE_GENERATOR=Ninja CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-2} \
    $pip --no-cache-dir --no-deps --no-build-isolation --no-binary llama-cpp-python llama-cpp-python==0.3.36
"$folder/bin/python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)
print(llama_cpp.llama_print_system_info().decode())'
cp benchmarks/llama_environment.sh "$folder/made-with"
