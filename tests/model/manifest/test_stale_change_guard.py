"""A block whose code is a graph: changes of modules that the graph does not call, or of values in it, are said once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_experts import PLAIN_EXPERTS
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ktc.model.experts.module import FusedMoe
from ktc.model.loading.realise import realise
from ktc.model.manifest.manifest import Rewrite
from ktc.model.manifest.stale_change_guard import called_modules, guard, remember
from ktc.model.manifest.stock_facts import assumptions_of, spelled

WIDTH, COUNT = 8, 4
CODE = """
import torch

def forward(self, hidden_states):
    scores = torch.ops.aten.linear.default(hidden_states, self.chooser.weight)
    weights, index = torch.topk(scores.softmax(-1), 2)
    late = getattr(self.late, "0")(hidden_states)
    return self.pickers(hidden_states, index, weights * 0.5) + late
"""


class Picker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.noise = nn.Parameter(torch.randn(COUNT, WIDTH)), 0.0

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + self.noise


def scaled(settings: Any, x: Tensor) -> Tensor:
    return x * settings.scale


class Grove(nn.Module):
    def __init__(self, settings: PreTrainedConfig) -> None:
        super().__init__()
        self.settings, self.limits = settings, [7.0]
        self.width = settings.hidden_size
        self.chooser, self.late = Chooser(), nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.pickers = nn.ModuleList(Picker() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = torch.topk(self.chooser(x).softmax(-1), self.settings.per_token)
        found = sum(
            picker(x) * (weights * (index == number)).sum(-1, keepdim=True)
            for number, picker in enumerate(self.pickers)
        )
        return scaled(self.settings, found).clamp(max=self.limits[0]) + self.late[0](x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig(per_token=2, scale=0.5, hidden_size=WIDTH, pad_token_id=0)
        self.layers = nn.ModuleList(nn.ModuleDict({"grove": Grove(self.config)}) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["grove"](x)
        return x


RECIPE = [
    step
    for number in range(3)
    for fqn in [f"layers.{number}.grove"]
    for step in (
        Rewrite(fqn, "graph_block", None, "cpu", {
            "file": "grove.py", "experts": "pickers", "num_experts": COUNT, "hidden": WIDTH, "intermediate": WIDTH,
            "form": "silu", "parts": {"gate": "gate.weight", "up": "up.weight", "down": "down.weight"},
        }, "r", "r.ktr:1:1"),
        Rewrite(f"{fqn}.pickers", "fused_moe", None, "cpu", {
            "num_experts": COUNT, "hidden": WIDTH, "intermediate": WIDTH, "top_k": 2, "form": "silu", "threads": 1,
            "activations": "keep", "numa": "none", **PLAIN_EXPERTS,
        }, "r", "r.ktr:1:1"),
    )
]  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Any:
    torch.manual_seed(1)
    made: Any = Model()
    (tmp_path / "grove.py").write_text(CODE)
    x = torch.randn(5, WIDTH)
    wanted = made(x)
    remembered = remember(made, RECIPE)
    realise(made, RECIPE, None, tmp_path)
    guard(made, RECIPE, remembered, tmp_path)
    assert isinstance(made.layers[1].grove.pickers, FusedMoe)
    assert torch.allclose(made(x), wanted, atol=1e-5)
    return made


def hook(*_: object) -> None:
    """A hook that changes nothing."""


def another_chooser(grove: Any) -> None:
    grove.chooser = Chooser()


def another_limit(grove: Any) -> None:
    grove.limits[0] = 3.0


def another_forward(grove: Any) -> None:
    grove.chooser.forward = torch.zeros_like


IGNORED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a setting": (lambda grove: setattr(grove, "width", 9), "grove.width` is now 9, and the compiled code has 8"),
    "a setting in place": (another_limit, "grove.limits` is now list(3.0), and the compiled code has list(7.0)"),
    "a setting below": (lambda grove: setattr(grove.chooser, "noise", 0.1), "grove.chooser.noise` is now 0.1"),
    "a tensor": (lambda grove: setattr(grove, "width", torch.ones(2)), "grove.width` is now a `Tensor`"),
    "a module": (another_chooser, "grove.chooser` was replaced, and the compiled code does not call it"),
    "a hook": (lambda grove: grove.chooser.register_forward_hook(hook), "grove.chooser` has hooks, and the compiled"),
    "a forward": (another_forward, "grove.chooser.forward` was replaced, and"),
    "another config": (
        lambda grove: setattr(grove, "settings", PreTrainedConfig(scale=2)), "grove.settings` is now a `PreTrainedC",
    ),
    "a config value": (lambda grove: setattr(grove.settings, "per_token", 1), "`config.per_token` is now 1, and"),
    "a config value of a helper": (lambda g: setattr(g.settings, "scale", 1.5), "`config.scale` is now 1.5, and the"),
}  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
def test_a_change_without_effect_is_said_once(model: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    change, says = IGNORED[name]
    model(torch.randn(5, WIDTH))
    assert not caplog.records
    for layer in model.layers:
        change(layer.grove)
    for _ in range(2):
        model(torch.randn(5, WIDTH))
    (record,) = caplog.records
    assert says in record.message
    assert "L428" in record.message


def test_a_change_of_one_layer_in_the_middle_is_said(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    model.layers[1].grove.chooser.noise = 1.0
    model(torch.randn(5, WIDTH))
    assert "`layers.1.grove.chooser.noise` is now 1.0" in caplog.text


def test_code_of_a_class_that_is_replaced_is_said(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Chooser, "forward", lambda self, x: x)
    model(torch.randn(5, WIDTH))
    assert "test_stale_change_guard.Chooser.forward` was replaced" in caplog.text


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        return self.inner(*args) * 2


def wrapped(grove: Any) -> None:
    grove.late[0] = Doubled(grove.late[0])
    grove.pickers = Doubled(grove.pickers)


EFFECTIVE: dict[str, Callable[[Any], object]] = {
    "modules that are called": wrapped,
    "hooks on modules that are called": lambda grove: grove.late[0].register_forward_hook(lambda m, a, out: out * 2),
    "a forward of the block": lambda grove: setattr(grove, "forward", lambda x: x * 2),
    "weights": lambda grove: grove.chooser.weight.data.mul_(-1),
    "a config value that was copied": lambda grove: setattr(grove.settings, "hidden_size", 9),
    "a config value of others": lambda grove: setattr(grove.settings, "pad_token_id", 9),
}


@pytest.mark.parametrize("name", EFFECTIVE)
def test_a_change_that_takes_effect_or_needs_none_is_not_said(
    model: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(5, WIDTH)
    before = model(x)
    for layer in model.layers:
        EFFECTIVE[name](layer.grove)
    assert torch.equal(model(x), before) == name.startswith("a config value")
    assert not caplog.records


def test_a_copy_is_compared_with_itself(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    copied = copy.deepcopy(model)
    copied.layers[0].grove.width = 9
    model(torch.randn(5, WIDTH))
    assert not caplog.records
    copied(torch.randn(5, WIDTH))
    assert len(caplog.records) == 1


def test_the_assumptions_are_few_and_equal_experts_are_one_row() -> None:
    found = assumptions_of(Model(), RECIPE)  # type: ignore[arg-type]
    assert found.config == {"config.per_token": "2", "config.scale": "0.5"}
    (row,) = found.sites
    assert row.sites == ("layers.0.grove", "layers.1.grove", "layers.2.grove")
    assert [module.name for module in row.modules if module.name.startswith("pickers")] == [
        "pickers", "pickers.*", "pickers.*.up", "pickers.*.gate", "pickers.*.down",
    ]  # fmt: skip
    assert row.modules[0].attributes == {"width": "8", "limits": "list(7.0)"}
    assert {name.partition(".")[2] for name in found.code} == {"Grove", "Picker", "Chooser"}


def test_spellings_are_equal_for_equal_values() -> None:
    assert spelled({"a": (1, None)}) == "dict(tuple('a', tuple(1, None)))"
    assert spelled({3, 1}) == spelled({1, 3}) == "set(1, 3)"
    assert spelled(torch.nn.functional.relu) == "torch.nn.functional.relu"
    assert spelled([torch.ones(1)]) is None
    assert spelled(torch.float32) is None


def test_the_called_modules_are_read_from_the_code() -> None:
    assert called_modules(CODE) == {"late.0", "pickers"}
