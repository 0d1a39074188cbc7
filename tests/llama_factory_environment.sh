#!/bin/sh
# An environment of its own for LLaMA-Factory with this checkout of ktc in it: `make lf-environment`.
#
#   tests/llama_factory_environment.sh [FOLDER]        (default: build/llama-factory)
#
# constraints-lf.txt is the tested set; without it pip would take the newest torch and gigabytes of CUDA with it.
# Made once: a second call changes nothing until the constraints change. PYTHON: the interpreter, 3.11 or newer.
# TORCH_INDEX: where pip finds CPU builds of torch.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build/llama-factory}
cmp -s constraints-lf.txt "$folder/made-with" && exit 0
echo "making $folder with the tested versions (constraints-lf.txt)"
"${PYTHON:-python3}" -m venv --clear "$folder"
python="$folder/bin/python"
pip="$python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints-lf.txt"
$pip ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
$pip ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} llamafactory jieba nltk rouge-chinese tensorboard
$pip -e .
# The index's torchvision and torchaudio may be built for another torch than the one that is installed. LLaMA-Factory
# asks for both and text models need neither: transformers does without torchvision where there is none, and torchaudio,
# which LLaMA-Factory imports in any case, is importable without its compiled half.
if ! "$python" -c 'import torchvision' 2> "$folder/torchvision.log"; then
    "$python" -m pip uninstall --quiet --yes torchvision
fi
if ! "$python" -c 'import torchaudio' 2> "$folder/torchaudio.log"; then
    rm "$folder"/lib/python*/site-packages/torchaudio/lib/*.so
    "$python" -c 'import torchaudio'
fi
"$python" -c 'from importlib.metadata import version as v
print(*(f"{n} {v(n)}" for n in ("llamafactory", "torch", "transformers", "peft", "trl", "ktc")), sep=", ")'
cp constraints-lf.txt "$folder/made-with"
