"""Markers for a model's own experts modules: the call of one becomes one experts node of a block's graph.

Input: a model on meta tensors. Inside `own_experts_marked`, a candidate module is read at its first call
(`own_experts`). One that computes only experts then calls the marker with tensors of the stock layout. All others run
their own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ktc.model.experts.own_module import OwnExperts, StockExperts, call_routed, stock_experts
from ktc.model.graph.typed import named_modules
from ktc.stages.capture.canonical import NoExperts
from ktc.stages.capture.forwards import Forward, replaced_forwards
from ktc.stages.capture.own_experts import is_candidate, own_experts
from ktc.stages.capture.reasons import reason_of
from ktc.stages.capture.trace import Reads, note_reads, recording_reads

STOCK = "ktc_stock"  # child of a recognised module, with its tensors in the stock layout, on meta
Marker = Callable[[Tensor, Tensor, Tensor, StockExperts, str], Tensor]


class View(StockExperts):
    """The stock tensors of a recognised module, and what it was recognised as."""

    def __init__(self, module: nn.Module, experts: OwnExperts) -> None:
        super().__init__(
            stock_experts(module, experts.form, experts.parts, experts.sizes), experts.inputs, experts.called
        )
        self.experts = experts


class _Known:
    """The modules that were read, by their code, and the settings of the config that their code reads.

    `reasons` explains why code was not recognised. While a module is read, modules inside it run their own code.
    """

    def __init__(self) -> None:
        self._by_code: dict[object, tuple[OwnExperts | None, Reads]] = {}
        self.reasons: dict[object, str] = {}
        self.reading = False

    def of(self, code: object, read: Callable[[], OwnExperts | None]) -> OwnExperts | None:
        """Return what `read` returns for modules with this code."""
        if code not in self._by_code:
            self.reading = True
            try:
                with recording_reads() as reads:
                    self._by_code[code] = read(), reads
            finally:
                self.reading = False
        return self._by_code[code][0]

    def note_settings(self, code: object) -> None:
        """Count the settings that the module's own code reads as read, since the marker does not run it."""
        note_reads(self._by_code[code][1])


class _Call:
    """The `forward` of a candidate while markers are set."""

    def __init__(self, module: nn.Module, forward: Forward, known: _Known, marker: Marker) -> None:
        self._module, self._forward, self._known, self._marker = module, forward, known, marker
        self._asked, self._code = False, code_of(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._asked and not self._known.reading:
            self._asked = True
            experts = self._known.of(self._code, lambda: self._read(args, kwargs))
            if experts is not None:
                self._module.add_module(STOCK, View(self._module, experts))
        view = getattr(self._module, STOCK, None)
        if not isinstance(view, View):
            return self._forward(*args, **kwargs)
        self._known.note_settings(self._code)
        given = inspect.signature(self._forward).bind(*args, **kwargs).arguments
        roles = {role: given[name] for name, role in view.experts.inputs.items()}

        def compute(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return self._marker(hidden, index, weights, view, str(view.experts.form))

        count, called = view.experts.sizes[0], view.experts.called
        return call_routed(called, count, compute, roles["hidden"], roles.get("index"), roles.get("weights"))

    def _read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OwnExperts | None:
        try:
            return own_experts(self._module, self._forward, args, kwargs)
        except NoExperts as error:
            self._known.reasons[self._code] = str(error)
        except Exception as error:  # noqa: BLE001 - export raises anything, and so does foreign code
            self._known.reasons[self._code] = reason_of(error)
        return None

    @property
    def reason(self) -> str:
        """Why the module runs its own code, "" if nothing is known."""
        return self._known.reasons.get(self._code, "")


def code_of(module: nn.Module) -> object:
    """Return a key that is equal for modules with the same code, settings and shapes, in layers of the same number."""
    settings = tuple(
        (name, type(inner), tuple(sorted((k, _plain(v)) for k, v in vars(inner).items() if k not in _OF_EVERY_MODULE)))
        for name, inner in named_modules(module)
    )
    return settings, tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())


_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})


def _plain(value: object) -> str:
    return repr(value) if isinstance(value, int | float | str) else f"at {id(value)}"


@contextmanager
def own_experts_marked(model: PreTrainedModel, marker: Marker) -> Generator[None]:
    """Run the experts modules of the model's own as calls of `marker` inside the context."""
    candidates = [module for _, module in named_modules(model) if is_candidate(module)]
    known = _Known()
    try:
        with replaced_forwards([(m, _Call(m, m.forward, known, marker)) for m in candidates]):
            yield
    finally:
        for module in candidates:
            if hasattr(module, STOCK):
                delattr(module, STOCK)


def recognised(block: nn.Module) -> tuple[OwnExperts, ...]:
    """Return the recognised modules in a block, with their FQNs there."""
    views = [(name, module) for name, module in named_modules(block) if isinstance(module, View)]
    return tuple(replace(view.experts, fqn=name.rpartition(STOCK)[0].rstrip(".")) for name, view in views)


def not_recognised(block: nn.Module) -> str:
    """Return in words which module of a block was read and not recognised as experts, and why; "" if none was."""
    calls = ((name, vars(module).get("forward")) for name, module in named_modules(block))
    reasons = ((name, call.reason) for name, call in calls if isinstance(call, _Call))
    return next((f"`{name or type(block).__name__}` is not read as experts: {why}" for name, why in reasons if why), "")
