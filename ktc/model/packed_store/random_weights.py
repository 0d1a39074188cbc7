"""Random weights instead of a checkpoint: for measuring a model that is not at hand, or larger than the disk.

In: a model on meta tensors with its modules realised, and a seed. Out: the same model, filled: matrices of standard
deviation 0.02, weights of norms 1, other vectors 0, experts as they are packed. The values depend on the seed, the
name of a tensor and the kind of its device.
Refused: tensors that hold no numbers to compute with (L446).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.foundation import host
from ktc.foundation.anonymous_memory import HUGE_PAGE, take_huge_pages
from ktc.foundation.progress import Progress, Tally
from ktc.model.experts.layouts.packed import huge_pages
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.random_experts import STD, RandomExperts
from ktc.model.experts.references.block_reference import random_blocks
from ktc.model.graph.typed import named_modules, owner_of
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.packed_store.memory import tensor_bytes
from ktc.model.packed_store.placement import device_of
from ktc.model.packed_store.weight_store import assign


def fill_random(model: nn.Module, placement: Mapping[str, str], seed: int, progress: Progress | None = None) -> None:
    """Fill every parameter and persistent buffer of `model` that is on meta, and all experts.

    Raises:
        InputRefused: L446 for a tensor of integers, before anything is filled.
    """
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    empty = {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
    _require_floats(empty)
    tally, lock = Tally(sum(tensor_bytes(model, placement).values()), progress), threading.Lock()

    def done(size: int) -> None:
        with lock:
            tally.add(size)

    def fill(name: str) -> None:
        value = _value(name, empty[name], device_of(name, placement), seed)
        assign(*owner_of(model, name), value)
        done(value.nbytes)

    with torch.no_grad(), ThreadPoolExecutor(host.usable_threads()) as pool:
        list(pool.map(fill, empty))
    for fqn, module in named_modules(model):
        if isinstance(module, StoredLinear):
            _load_random_blocks(module, zlib.crc32(fqn.encode()) + seed)
    random = RandomExperts(seed)
    for layer, experts in enumerate(module for module in model.modules() if isinstance(module, FusedMoe)):
        random.fill(experts, layer, done)


def fill_within(model: nn.Module, placement: Mapping[str, str], seed: int, most: int) -> None:
    """Fill a model on meta for a trial: random values in up to `most` bytes, then zeros.

    Zeros on a CPU are pages that are only read, which take no memory. Tensors of integers are zeros too.
    """
    left = most
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, like in tensors.items():
        if not like.is_meta:
            continue
        device = device_of(name, placement)
        is_random = like.is_floating_point() and like.nbytes <= left
        left -= like.nbytes * is_random
        value = _value(name, like, device, seed) if is_random else _zeros(like, device)
        is_parameter = isinstance(like, nn.Parameter)
        tensor = nn.Parameter(value, like.requires_grad) if is_parameter else value
        setattr(*owner_of(model, name), tensor)
    random = RandomExperts(seed)
    for number, layer in enumerate(model.modules()):
        if isinstance(layer, StoredLinear):
            _load_random_blocks(layer, seed + number)
        if not isinstance(layer, FusedMoe):
            continue
        if layer.weights.nbytes <= left:
            left -= layer.weights.nbytes
            random.fill(layer, number, lambda size: None)
        else:
            layer.weights.loads.loaded_all()


def _load_random_blocks(layer: StoredLinear, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer.load_blocks(random_blocks(layer.out_features, layer.in_features, layer.format, STD, generator))


def _zeros(like: Tensor, device: torch.device) -> Tensor:
    if device.type != "cpu" or like.nbytes < HUGE_PAGE:
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    return huge_pages(like.nbytes).view(like.dtype).view(like.shape)  # `torch.zeros` writes them


def _require_floats(tensors: Mapping[str, Tensor]) -> None:
    tables = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if tables:
        message = f"{listing(tables, 3)} has integers, whose meaning is the model's own: they cannot be random"
        raise InputRefused(Diagnostic("L446", message, hint="use a checkpoint: `ktc compile MODEL RULES -o OUT`"))


def _value(name: str, like: Tensor, device: torch.device, seed: int) -> Tensor:
    value = torch.empty(like.shape, dtype=like.dtype, device=device)
    if device.type == "cpu":
        take_huge_pages(value.data_ptr(), value.nbytes)
    if value.dim() < 2:
        return value.fill_(1 if name.rpartition(".")[2] == "weight" else 0)
    number = seed * 0x1_0000_0001 + zlib.crc32(name.encode())  # a generator of the CPU uses half of its bits
    return value.normal_(0, STD, generator=torch.Generator(device).manual_seed(number))
