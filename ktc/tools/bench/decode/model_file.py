"""A checkpoint folder of a real model's sizes with random weights: config.json and one GGUF file.

In: sizes, a number of layers and a format. Out: the folder, written tensor by tensor. Matrices have the format,
routers, norms and biases fp32. With `q4_k` the head is `q6_k`, as in llama.cpp's Q4_K_S; with `mxfp4` everything but
the experts is `q8_0`, as in published files of gpt-oss. All experts of a matrix have the same rows in another order: no
two are equal, and a file takes the time of writing it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from ktc.adapters.base_model import read_base
from ktc.foundation.formats import BLOCKS, STORED
from ktc.inference.quantize.gguf_settings import add_settings
from ktc.model.checkpoint.gguf_types import block_of
from ktc.model.experts.references.block_reference import random_blocks
from ktc.stages.capture.gguf_names import GgufPlace, gguf_places
from ktc.stages.capture.model import build_on_meta
from ktc.tools.bench.requests import Case
from ktc.tools.bench.sizes import SIZES, Sizes

FILE: Final = "model.gguf"
_SIZE: Final = 0.02  # of a weight
_CACHED_BYTES: Final = 2  # of a key or a value: bf16 here, fp16 in llama.cpp
_HEADS: Final = {"q4_k": "q6_k"}  # the format of the head, where it is another one
_OTHERS: Final = {"mxfp4": "q8_0"}  # the format of all matrices but those of experts, where it is another one


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of the file. `shape` is that of its weights, `format` one of `ktc.foundation.formats`."""

    name: str
    shape: tuple[int, ...]
    format: str

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        block = block_of("f32" if self.format == "fp32" else self.format)
        return math.prod(self.shape) // block.weights * block.bytes


def config_of(sizes: Sizes, layers: int | None) -> PreTrainedConfig:
    """Return the config of the first `layers` layers, in bf16."""
    depth = int(sizes.config["num_hidden_layers"])
    values = {**sizes.config, "num_hidden_layers": min(layers or depth, depth)}
    config = AutoConfig.for_model(sizes.model_type, **values, eos_token_id=None, pad_token_id=None)
    config.tie_word_embeddings = False
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None  # the file has no tokenizer
    config.dtype = torch.bfloat16
    config.architectures = [type(build_on_meta(config)).__name__]
    return config


def tensors_of(config: PreTrainedConfig, architecture: str, file_format: str) -> tuple[FileTensor, ...]:
    """Return every tensor of the model's file, in the order of the model."""
    model = build_on_meta(config)
    targets = cast("dict[str, Tensor]", model.state_dict())
    return tuple(
        FileTensor(place.name, _shape(place, targets[target]), _format(place.name, targets[target], file_format))
        for target, choices in gguf_places(model, architecture).items()
        for place in choices[0]
    )


def write_model(name: str, layers: int | None, file_format: str, folder: Path) -> Path:
    """Write the checkpoint folder, or keep one that was written for the same request. Returns `folder`."""
    described = json.dumps({"model": name, "layers": layers, "format": file_format})
    made = folder / "made.json"
    if made.is_file() and made.read_text() == described:
        return folder
    write_sizes(SIZES[name], layers, file_format, folder)
    made.write_text(described)
    return folder


def write_sizes(sizes: Sizes, layers: int | None, file_format: str, folder: Path) -> None:
    """Write the checkpoint folder of a model of any sizes."""
    config = config_of(sizes, layers)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    _write_file(config, sizes, file_format, folder / FILE)


def _shape(place: GgufPlace, target: Tensor) -> tuple[int, ...]:
    shape = list(target.shape)
    if place.span is not None:
        shape[place.span.dim] = place.span.length
    return tuple(shape)


def _format(name: str, target: Tensor, file_format: str) -> str:
    if target.dim() == 1 or "ffn_gate_inp" in name or name.endswith(".bias"):
        return "fp32"
    if "_exps." not in name and file_format in _OTHERS:
        return _OTHERS[file_format]
    return _HEADS.get(file_format, file_format) if name == "output.weight" else file_format


def _write_file(config: PreTrainedConfig, sizes: Sizes, file_format: str, path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, sizes.architecture)
    add_settings(writer, read_base(path.parent), sizes.architecture)
    writer.add_tokenizer_model("none")
    writer.add_quantization_version(2)
    tensors = tensors_of(config, sizes.architecture, file_format)
    for tensor in tensors:
        row = STORED["f32" if tensor.format == "fp32" else tensor.format]
        kind = gguf.GGMLQuantizationType(row.gguf)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        writer.write_tensor_data(np.concatenate(list(_values(tensor, generator))))
    writer.close()


def _values(tensor: FileTensor, generator: torch.Generator) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the tensor as flat pieces: one, or one per expert."""
    *experts, rows, columns = (1, *tensor.shape) if len(tensor.shape) < 3 else tensor.shape
    if len(tensor.shape) == 1:
        values = torch.randn(columns, generator=generator)
        yield (_SIZE * values if tensor.name.endswith(".bias") else 1 + 0.1 * values).numpy()
        return
    if tensor.format in BLOCKS:
        one = random_blocks(rows, columns, tensor.format, _SIZE, generator)
    else:
        one = torch.randn(rows, columns, generator=generator) * _SIZE
        one = one if tensor.format == "fp32" else one.bfloat16().view(torch.uint16)
    for expert in range(experts[0]):
        yield one.roll(expert, 0).flatten().numpy()


def head_dim(config: Any) -> int:
    """Return the size of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def weight_bytes(tensors: Sequence[FileTensor], config: Any, batch: int) -> float:
    """Return the bytes of the weights that a step of `batch` tokens reads.

    Experts count as often as a router that chooses independently and evenly is expected to hit them.
    """
    missed = (1 - config.num_experts_per_tok / config.num_experts) ** batch
    total = 0.0
    for tensor in tensors:
        if "_exps" in tensor.name:
            total += tensor.nbytes * (1 - missed)
        elif tensor.name.startswith("token_embd"):
            total += tensor.nbytes * batch / tensor.shape[0]
        else:
            total += tensor.nbytes
    return total


def cache_bytes(config: Any, case: Case) -> int:
    """Return the bytes of keys and values of a decode step; a layer with a window reads that."""
    window, every = getattr(config, "sliding_window", None), ["full_attention"] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or every
    seen = sum(min(case.tokens, window) if window and kind == "sliding_attention" else case.tokens for kind in kinds)
    return case.batch * seen * 2 * config.num_key_value_heads * head_dim(config) * _CACHED_BYTES


def floor_bytes(tensors: Sequence[FileTensor], config: Any, case: Case) -> float:
    """Return the bytes that a decode step cannot do without: active weights as the file stores them, and the cache.

    Over the read bandwidth they are the floor of its time.
    """
    return weight_bytes(tensors, config, case.batch) + cache_bytes(config, case)
