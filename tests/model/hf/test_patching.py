"""Other code for one object: patches that stack, are copied and can be removed, and attributes for a time."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from ktc.model.hf.patching import Patch, call_stock, called_as, stock_class, with_attributes


class Doubled(Patch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Shifted(Patch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1 + super().forward(x)


def test_patches_stack_and_each_can_be_removed() -> None:
    module, x = nn.Identity(), torch.ones(1)
    assert Shifted.put_on(Doubled.put_on(module)) is module
    assert module(x) == 3
    Doubled.remove_from(module)
    assert module(x) == 2 and isinstance(module, Shifted) and not isinstance(module, Doubled)
    with pytest.raises(ValueError, match="not in list"):
        Doubled.remove_from(module)
    Shifted.remove_from(module)
    assert type(module) is nn.Identity


def test_a_patched_object_has_the_name_of_its_class() -> None:
    module, other = Doubled.put_on(nn.Linear(2, 2)), Doubled.put_on(nn.Linear(3, 3))
    made = type(module)
    assert (made.__name__, made.__qualname__, made.__module__) == ("Linear", "Linear", nn.Linear.__module__)
    assert made is type(other) and stock_class(module) is nn.Linear and repr(module) == repr(nn.Linear(2, 2))


def test_copies_and_pickles_are_patched_and_compute_with_their_own_weights() -> None:
    module, x = Shifted.put_on(Doubled.put_on(nn.Linear(2, 2))), torch.ones(2)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module) and torch.equal(other(x), module(x))
        other.weight.data.zero_()
        other.bias.data.zero_()
        assert torch.equal(other(x), torch.ones(2)) and not torch.equal(module(x), torch.ones(2))
    assert type(copy.copy(module)) is type(module)


def test_a_replaced_call_runs_no_hook_and_the_stock_call_runs_them() -> None:
    module, hooks = nn.Linear(2, 2), Counter[str]()
    module.register_forward_hook(lambda *_: hooks.update(["ran"]))
    x = torch.ones(1, 2)
    expected = module(x)
    with called_as(module, lambda x: x + 1):
        assert torch.equal(module(x), x + 1)
        assert hooks["ran"] == 1
        assert torch.equal(call_stock(module, x), expected)
        assert hooks["ran"] == 2
    assert torch.equal(module(x), expected)
    assert type(module) is nn.Linear


def test_an_attribute_is_set_for_a_while_and_not_registered() -> None:
    module = nn.Linear(2, 2)
    with with_attributes(module, other=nn.Linear(1, 1)):
        assert isinstance(module.other, nn.Linear)
        assert list(module.children()) == []
    assert not hasattr(module, "other")


def test_a_call_is_redirected_within_a_redirected_call() -> None:
    module: Any = Doubled.put_on(nn.Identity())
    with called_as(module, lambda x: x - 1):
        with called_as(module, lambda x: x - 2):
            assert module(5) == 3
        assert module(5) == 4 and call_stock(module, 5) == 10
    assert module(5) == 10
