#!/bin/sh
# An environment of its own for llama.cpp, so that `ktc bench decode --peer llama.cpp` can measure it.
#
#   benchmarks/llama_environment.sh [FOLDER]        (default: build/llama)
#   CUDA=90a benchmarks/llama_environment.sh        (default: build/llama-cuda)
#
# llama-cpp-python is built from its source for this processor: a wheel would lack its instructions. Without BLAS,
# since llama.cpp's own kernels are the peer. Made once: a second call changes nothing until this file changes.
# PYTHON: the interpreter, 3.10 or newer. JOBS: compilations at once, 2 by default. ISA=avx2: for a processor with AVX2
# and nothing newer, beside `ktc bench decode --isa avx2`. ISA=avx512: with AVX-512 too, without its VBMI, VNNI and BF16.
# ISA=amx: for a server with AMX, also built elsewhere.
# CUDA: the GPU's architecture (90a for an H100 or H200). Then FOLDER/bin/llama-bench alone is built from the same source,
# for `benchmarks/gpu_beside_llama.py`. It needs nvcc and no GPU, and takes an hour on two cores.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build/llama${CUDA:+-cuda}}
made_with() { cat benchmarks/llama_environment.sh; echo "ISA=${ISA:-native} CUDA=${CUDA:-}"; }
made_with | cmp -s - "$folder/made-with" && exit 0
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
amx) instructions="-DGGML_NATIVE=OFF $avx2 -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON"
    instructions="$instructions -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON" ;;
*) echo "ISA is native, avx2, avx512 or amx, found '$ISA'" >&2; exit 2 ;;
esac
if [ -n "${CUDA:-}" ]; then
    PATH="$PWD/$folder/bin:$PATH" "$folder/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
        --no-build-isolation --no-binary llama-cpp-python --dest "$folder" llama-cpp-python==0.3.36
    tar xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder"
    options="$instructions -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_BLAS=OFF -DGGML_CUDA=ON"
    options="$options -DCMAKE_CUDA_ARCHITECTURES=$CUDA-real -DGGML_CUDA_NO_VMM=ON -DGGML_CUDA_NCCL=OFF"
    options="$options -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF"
    PATH="$PWD/$folder/bin:$PATH" cmake -G Ninja -S "$folder"/llama_cpp_python-0.3.36/vendor/llama.cpp \
        -B "$folder/made" $options
    PATH="$PWD/$folder/bin:$PATH" ninja -C "$folder/made" -j "${JOBS:-2}" llama-bench
    cp "$folder/made/bin/llama-bench" "$folder/bin/"
    "$folder/bin/llama-bench" --list-devices
    made_with > "$folder/made-with"
    exit 0
fi
options="$instructions -DGGML_BLAS=OFF -DGGML_CUDA=OFF -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF -DGGML_OPENMP=ON"
PATH="$PWD/$folder/bin:$PATH" CMAKE_ARGS="$options" CMAKE_GENERATOR=Ninja CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-2} \
    $pip --no-cache-dir --no-deps --no-build-isolation --no-binary llama-cpp-python llama-cpp-python==0.3.36
"$folder/bin/python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)
print(llama_cpp.llama_print_system_info().decode())'
made_with > "$folder/made-with"
