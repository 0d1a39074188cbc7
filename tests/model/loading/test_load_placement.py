"""Placement: the nearest ancestor's entry counts, and activations go where the next module stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ktc.diagnostics import HostLacks
from ktc.model.manifest.manifest import read_manifest
from ktc.model.packed_store.placement import (
    check_devices,
    device_map,
    device_of,
    follow,
    loss_function_of,
    return_loss_to_labels,
)

SPLIT = {"model": "cuda:0", "model.layers.1": "cuda:1", "model.layers.1.mlp.experts": "cpu", "lm_head": "cuda:1"}


@pytest.mark.parametrize(
    ("fqn", "device"),
    [
        ("model.embed_tokens.weight", "cuda:0"),
        ("model.layers.1.mlp.gate.weight", "cuda:1"),
        ("model.layers.1.mlp.experts.down_proj", "cpu"),
        ("model.layers.10.mlp.gate.weight", "cuda:0"),
        ("lm_head.weight", "cuda:1"),
        ("other", "cpu"),
    ],
)
def test_the_nearest_ancestor_decides(fqn: str, device: str) -> None:
    assert device_of(fqn, SPLIT) == torch.device(device)
    assert device_of("other", {"": "cuda:0"}) == torch.device("cuda:0")


def test_the_map_for_hugging_face_is_there_only_if_devices_differ() -> None:
    assert device_map({"model": "cpu", "lm_head": "cpu"}) is None
    assert device_map({"model": "cuda:0", "lm_head": "cpu"}) == {"model": 0}, "PEFT dispatches a model with `cpu`"


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(HostLacks, match="`cuda:77`"):
        check_devices(("cpu", "cuda:77"))


def test_experts_that_stay_on_a_gpu_need_it(compiled_twin: Callable[..., Path]) -> None:
    manifest = read_manifest(compiled_twin("tiny:deepseek_v2", "moe-lora"))
    check_devices(manifest.devices)
    there = {"prefill": ["cuda:77"], "resident": True}
    steps = tuple(replace(step, args={**step.args, **there}) for step in manifest.rewrites)
    with pytest.raises(HostLacks, match="`cuda:77`"):
        check_devices(replace(manifest, rewrites=steps).devices)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.mlp = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, scale: tuple[torch.Tensor, object]) -> torch.Tensor:
        return x + self.mlp(self.mixer(x) * scale[0])


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(3, 3), nn.ModuleList(Layer() for _ in range(3)), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        states = [self.embed(x)]
        for layer in self.layers:
            states.append(layer(states[-1], scale=(torch.ones(()), self)))
        return [*states, self.head(states[-1])]


def place(model: nn.Module, placement: dict[str, str]) -> None:
    for name, parameter in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(parameter.to(device_of(name, placement))))
    follow(model, placement)


@pytest.mark.parametrize(
    ("placement", "devices"),
    [
        ({"layers.1": "meta"}, "cpu cpu meta cpu cpu"),
        ({"layers": "meta"}, "cpu meta meta meta cpu"),
        ({"layers.1": "meta", "head": "meta"}, "cpu cpu meta cpu meta"),
        ({"": "meta"}, "meta meta meta meta meta"),
        ({"embed": "meta", "layers": "meta", "layers.2.mlp": "cpu", "head": "meta"}, "meta meta meta meta meta"),
        ({"layers.2.mlp": "meta"}, "cpu cpu cpu cpu cpu"),
    ],
)
def test_activations_follow_the_modules(
    placement: dict[str, str], devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The meta device stands for a GPU; a move back from it has no values, so a made-up tensor stands for them.
    to = torch.Tensor.to

    def moved(tensor: torch.Tensor, *where: Any, **options: Any) -> torch.Tensor:
        back = tensor.is_meta and where == (torch.device("cpu"),)
        return torch.zeros(tensor.shape) if back else to(tensor, *where, **options)

    model = Stack()
    place(model, placement)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    assert " ".join(state.device.type for state in model(torch.ones(4, 3))) == devices


class Reading(nn.Module):
    """A model that calls the embeddings of its language model itself, as many that read images do."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.language = nn.Linear(3, 3), Stack()

    def get_input_embeddings(self) -> nn.Module:
        return self.language.embed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_input_embeddings()(x)


def test_embeddings_that_a_model_calls_itself_receive_token_ids() -> None:
    model = Reading()
    place(model, {"language": "meta"})
    assert model(torch.ones(4, 3)).is_meta


def test_a_model_on_the_cpu_gets_no_hooks() -> None:
    model = Stack()
    follow(model, {"": "cpu", "layers.1": "cpu"})
    assert not any(module._forward_pre_hooks for module in model.modules())


class Scored:
    """A model as `return_loss_to_labels` sees it, whose head is on another device than its input."""

    def __init__(self) -> None:
        self.loss_function: Any = lambda logits, labels: logits.sum()


def test_the_loss_is_returned_to_the_device_of_the_labels() -> None:
    model: Any = Scored()
    return_loss_to_labels(model)
    logits, labels = torch.ones(2, 3), torch.ones(2, 3, device="meta")  # the meta device stands for a GPU
    assert model.loss_function(logits, labels).device.type == "meta"
    assert model.loss_function(logits=logits, labels=labels).device.type == "meta"


def test_the_loss_of_a_model_on_several_gpus_is_still_computed_in_chunks() -> None:
    model: Any = Scored()
    assert loss_function_of(model) is model.loss_function
    stock = model.loss_function
    return_loss_to_labels(model)
    assert loss_function_of(model) is stock
    assert loss_function_of(object()) is None
