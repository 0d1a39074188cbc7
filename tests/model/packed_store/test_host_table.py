"""A table of embeddings in host memory: where it is read to, and what it counts as."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ktc.model.experts.host import page_lock
from ktc.model.manifest.configs import HOST_TABLE
from ktc.model.manifest.manifest import Rewrite
from ktc.model.packed_store.host_table import is_on_host, show_tables, with_tables
from ktc.model.packed_store.memory import tensor_bytes

STEP = Rewrite("embed", HOST_TABLE, None, "cpu", {}, "", "")


def model() -> Any:
    made = nn.ModuleDict({"embed": nn.Embedding(8, 4, dtype=torch.bfloat16), "head": nn.Linear(4, 8)})
    return made.requires_grad_(requires_grad=False)


def test_tables_are_read_to_the_host_where_the_model_is_placed() -> None:
    assert with_tables({"": "cuda:0"}, [STEP]) == {"": "cuda:0", "embed": "cpu"}
    assert with_tables({}, [STEP]) == {}
    with torch.device("meta"):
        sizes = tensor_bytes(model(), with_tables({"": "cuda:0"}, [STEP]))
    assert sizes == {"cpu": 64, "cuda:0": 160}


class Cuda:
    """CUDA as the code for tables calls it, on the CPU: pages locked for the current GPU, which sees no others."""

    def __init__(self) -> None:
        self.current, self.status = 0, 0
        self.locked, self.seen = dict[int, int](), list[int]()

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked |= {address: self.current} if self.status == 0 else {}
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]

    def as_tensor(self, array: Any, device: torch.device) -> Tensor:
        about = dict(array.__cuda_array_interface__)
        self.seen.append(about["shape"][0])
        seen = torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=about, kept=array)))
        return seen if self.locked.get(about["data"][0]) == device.index else seen.clone()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch, "as_tensor", made.as_tensor)
    monkeypatch.setattr(page_lock, "_forget_error", lambda: None)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor.clone())
    return made


def shown(device: str = "cuda:0") -> Any:
    made = model()
    show_tables(made, [replace(STEP, device=device)])
    return made


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_shown_table_is_its_host_memory_and_counts_there(device: str, cuda: Cuda) -> None:
    made = model()
    rows, address = made["embed"](torch.tensor([3, 1])), made["embed"].weight.data_ptr()
    assert not is_on_host(made["embed"].weight)
    show_tables(made, [replace(STEP, device=device)])
    assert torch.equal(made["embed"](torch.tensor([3, 1])), rows)
    assert made["embed"].weight.data_ptr() == address and cuda.locked == {address: int(device[-1])}
    assert is_on_host(made["embed"].weight) and not made["embed"].weight.requires_grad
    made["embed"].weight = nn.Parameter(made["embed"].weight.detach())
    assert not is_on_host(made["embed"].weight)


def test_pages_are_locked_as_long_as_a_tensor_is_over_them(cuda: Cuda) -> None:
    made = shown()
    weight = made["embed"].weight
    del made
    gc.collect()
    assert cuda.locked
    del weight
    assert not cuda.locked


def test_memory_that_a_model_puts_in_their_place_is_not_the_tables(cuda: Cuda) -> None:
    made = shown()
    made["embed"]._apply(lambda tensor: tensor.clone())  # as `to` does, and `resize_token_embeddings`
    assert not cuda.locked and not is_on_host(made["embed"].weight)


@pytest.mark.parametrize(("status", "why"), [(0, "another GPU locked its pages"), (2, "locks none of its pages")])
def test_a_table_that_its_gpu_does_not_see_is_told_and_counts_there(
    status: int, why: str, cuda: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.status = status
    monkeypatch.setattr(cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    made = shown("cuda:1")
    assert not is_on_host(made["embed"].weight) and sum(cuda.seen) <= 1, "one byte is copied to ask"
    assert not cuda.locked
    (told,) = caplog.messages
    assert "L467" in told and why in told and "`embed`" in told and "expert" not in told
