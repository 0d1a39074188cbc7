"""A table of embeddings in host memory: where it is read to, and what it counts as."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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


def test_a_shown_table_has_the_same_rows_and_counts_as_the_hosts() -> None:
    made = model()
    rows = made["embed"](torch.tensor([3, 1]))
    assert not is_on_host(made["embed"].weight)
    show_tables(made, [STEP])
    assert torch.equal(made["embed"](torch.tensor([3, 1])), rows)
    assert is_on_host(made["embed"].weight) and not made["embed"].weight.requires_grad
    made["embed"].weight = nn.Parameter(made["embed"].weight.detach())
    assert not is_on_host(made["embed"].weight)
