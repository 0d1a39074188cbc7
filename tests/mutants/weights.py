"""Mutants of loaded weights: rows of `weights.json`, and bytes of the packed store, for `ktc prove`.

Each damages a copy of a small compiled DeepSeek-V2, sealed as a wrong compiler would seal it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import ktc
from ktc.inference.prove.run import Request, prove_model
from ktc.model.checkpoint import WeightSource, read_sources, write_sources
from ktc.model.experts.module import FusedMoe
from ktc.model.packed_store import packed_file, packed_store
from mutants.mutant import Mutant, Verdict

Damage = Callable[[Path], None]
LAYER = "model.layers.1"
EXPERTS = f"{LAYER}.mlp.experts"
_PARTS = ("gate", "up", "down")


def weights_verdict(mutant: Mutant, clean: Path, folder: Path) -> Verdict:
    """Return what `ktc prove` says about a damaged copy of the compiled model `clean`, made in `folder`."""
    out = Path(shutil.copytree(clean, folder / clean.name))
    mutant.change(out)
    report = prove_model(Request(out, count=48, layers="1-2"))
    red = next((row for layer in report.layers for row in layer.rows if row.red), None)
    return Verdict("") if red is None else Verdict("prove", f"{red.what or 'layer'}: {red.red}")


# Rows -----------------------------------------------------------------------------------------------------------------
def rows(change: Callable[[list[WeightSource]], list[WeightSource]]) -> Damage:
    """Return the damage of `weights.json`; the store is then of other rows, and is not used."""

    def damaged(out: Path) -> None:
        path, manifest = out / "weights.json", out / "ktc.json"
        old = list(read_sources(path.read_bytes()))
        new = change(old)
        assert new != old, "the damage changes a row"
        path.write_text(write_sources(new))
        content = json.loads(manifest.read_text())
        content["files"]["weights.json"] = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest.write_text(json.dumps(content))
        shutil.rmtree(out / "packed", ignore_errors=True)

    return damaged


def exchanged(one: str, other: str) -> Damage:
    """Return the damage that two tensors of the checkpoint go to each other's places."""
    names = {one: other, other: one}

    def change(old: list[WeightSource]) -> list[WeightSource]:
        found = {row.source_key: row for row in old}
        return [
            replace(row, source_key=names[row.source_key], file=found[names[row.source_key]].file)
            if row.source_key in names
            else row
            for row in old
        ]

    return rows(change)


def taken_from(one: str, other: str) -> Damage:
    """Return the damage that a place gets the tensor of another place too."""

    def change(old: list[WeightSource]) -> list[WeightSource]:
        found = {row.source_key: row for row in old}
        return [replace(row, source_key=other, file=found[other].file) if row.source_key == one else row for row in old]

    return rows(change)


def layers_exchanged(old: list[WeightSource]) -> list[WeightSource]:
    """Exchange the routers of two layers."""
    moved = {f"model.layers.{a}.mlp.gate.weight": f"model.layers.{b}.mlp.gate.weight" for a, b in ((1, 2), (2, 1))}
    return [replace(row, target=moved.get(row.target, row.target)) for row in old]


# Packed bytes ---------------------------------------------------------------------------------------------------------
def packed(change: Callable[[FusedMoe], None]) -> Damage:
    """Return the damage of one layer's experts in the packed store. Only `ktc verify` reads digests of contents."""

    def damaged(out: Path) -> None:
        experts = ktc.load(out).get_submodule(EXPERTS)
        assert isinstance(experts, FusedMoe)
        before = bytes(experts.packed_storage)
        change(experts)
        assert bytes(experts.packed_storage) != before, "the damage changes a byte"
        with (out / "packed" / packed_store.file_name(EXPERTS)).open("r+b") as file:
            file.seek(packed_file.DATA)
            file.write(experts.packed_storage)

    return damaged


def part(expert: int, name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """Return the damage of one matrix of one expert."""
    return packed(lambda m: m.load_expert(expert, name, change(m.expert(expert, name))))  # type: ignore[arg-type]


def exchange(one: tuple[int, str], other: tuple[int, str]) -> Callable[[FusedMoe], None]:
    def change(m: FusedMoe) -> None:
        first, second = m.expert(*one), m.expert(*other)  # type: ignore[arg-type]
        m.load_expert(*one, second)  # type: ignore[arg-type]
        m.load_expert(*other, first)  # type: ignore[arg-type]

    return change


def experts_exchanged(m: FusedMoe) -> None:
    for name in _PARTS:
        exchange((3, name), (5, name))(m)


def every_expert(change: Callable[[Tensor], Tensor]) -> Callable[[FusedMoe], None]:
    def changed(m: FusedMoe) -> None:
        for expert in range(m.num_experts):
            m.load_expert(expert, "down", change(m.expert(expert, "down")))

    return changed


def neurons_moved(m: FusedMoe) -> None:
    """Put inner neurons in another order, the same one everywhere."""
    for name in _PARTS:
        m.load_expert(2, name, m.expert(2, name).roll(1, 1 if name == "down" else 0))  # type: ignore[arg-type]


def bytes_exchanged(m: FusedMoe) -> None:
    """Exchange 64 bytes of the store with those 4 KiB later."""
    storage = m.packed_storage
    one, other = bytes(storage[:64]), bytes(storage[4096:4160])
    storage[:64], storage[4096:4160] = other, one


def transposed(matrix: Tensor) -> Tensor:
    """Transpose the largest square at the front of a matrix."""
    size = min(matrix.shape)
    square = matrix[:size, :size].T.clone()
    matrix[:size, :size] = square
    return matrix


def first_row_zero(matrix: Tensor) -> Tensor:
    matrix[0] = 0
    return matrix


_ROWS: tuple[tuple[str, Damage, str], ...] = (
    ("rows of two experts exchanged", exchanged(f"{EXPERTS}.3.up_proj.weight", f"{EXPERTS}.5.up_proj.weight"), ""),
    ("rows of gate and up exchanged", exchanged(f"{EXPERTS}.3.gate_proj.weight", f"{EXPERTS}.3.up_proj.weight"), ""),
    ("rows of two layers' experts exchanged", exchanged(
        f"{EXPERTS}.0.down_proj.weight", "model.layers.2.mlp.experts.0.down_proj.weight"), ""),
    ("a row of an expert from its neighbour", taken_from(
        f"{EXPERTS}.7.gate_proj.weight", f"{EXPERTS}.6.gate_proj.weight"), ""),
    ("rows of routers exchanged", rows(layers_exchanged), ""),
    ("rows of the shared expert exchanged", exchanged(
        f"{LAYER}.mlp.shared_experts.gate_proj.weight", f"{LAYER}.mlp.shared_experts.up_proj.weight"), ""),
    ("rows of norms exchanged", exchanged(
        f"{LAYER}.input_layernorm.weight", f"{LAYER}.post_attention_layernorm.weight"), ""),
    ("rows of attention outputs exchanged", exchanged(
        f"{LAYER}.self_attn.o_proj.weight", "model.layers.2.self_attn.o_proj.weight"), ""),
    ("rows in another order", rows(lambda old: old[::-1]), "each row names its own place"),
    ("packed experts exchanged", packed(experts_exchanged), ""),
    ("packed gate and up exchanged", packed(exchange((7, "gate"), (7, "up"))), ""),
    ("packed expert of zeros", part(0, "down", torch.zeros_like), ""),
    ("packed scale of one expert", part(4, "down", lambda matrix: 1.02 * matrix), ""),
    ("packed scale of all experts", packed(every_expert(lambda matrix: 1.02 * matrix)), ""),
    ("packed matrix transposed", part(1, "up", transposed), ""),
    ("packed row lost", part(1, "gate", first_row_zero), ""),
    ("packed sign of one expert", part(2, "down", lambda matrix: -matrix), ""),
    ("packed bytes exchanged", packed(bytes_exchanged), ""),
    ("packed NaN", part(0, "down", lambda matrix: torch.full_like(matrix, torch.nan)), ""),
    ("packed neurons in another order", packed(neurons_moved),
     "gate, up and down in the same other order give the same sum, up to rounding"),
)  # fmt: skip
MUTANTS = tuple(Mutant(name, "deepseek_v2", "weights", change, why) for name, change, why in _ROWS)
