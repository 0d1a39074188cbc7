"""A decoder layer run in parts, so that backward does not recompute its experts.

In: a layer with its cuts, and a call of it. Out: its parts `attend`, `route` (or both as one) and `finish`; each runs
the layer's own code from its start, with the results of earlier parts filled in, compiled or as it is. So a part of any
class of layer can be computed again, and the experts between `route` and `finish` run once. Refused, as `CannotStack`:
layers that call their experts more than once, or return more than hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from ktc.model.experts.host.saved_on_host import HostOffloaded
from ktc.model.experts.host.staging import to_device
from ktc.model.hf.patching import call_stock, called_as, with_attributes
from ktc.training.trainers.compiled_parts import CompiledLayer, NotCompiled, Part
from ktc.training.trainers.random_state import RandomState
from ktc.training.trainers.split_layer import CannotStack, LayerCall, SplitLayer


class _PartEnd(BaseException):
    """Ends a layer's code where a part ends. Not an `Exception`, which the code might catch."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def values_of(tensor: Tensor | None, offloaded: HostOffloaded | None) -> Tensor | None:
    """Return a tensor, or the values of the offloaded one whose placeholder it is."""
    return tensor if tensor is None or offloaded is None else offloaded.values(tensor)


class LayerRun:
    """One call of a layer, part by part. Every part has its own random numbers, and the same ones when repeated.

    With `compiled` the parts are compiled. One that the compiler refuses runs as it is, and so do the parts after it.
    """

    def __init__(
        self, split: SplitLayer, call: LayerCall, device: torch.device, compiled: CompiledLayer | None = None
    ) -> None:
        self._split, self._call, self._device = split, call, device
        self._compiled = compiled
        self._modes: dict[Part, bool] = {}  # which parts ran compiled: a repeated part must run likewise
        self._states: list[RandomState] = []
        self._outputs: int | None = None  # of attention, if it returns a tuple

    @property
    def is_compiled(self) -> bool:
        """Whether its parts run compiled, as far as is known."""
        return self._compiled is not None and all(self._modes.values())

    def begin_part(self) -> RandomState:
        """Start a part, and return the random numbers that it begins from. The caller calls this once before each."""
        self._states.append(RandomState.now(self._device))
        return self._states[-1]

    def attend(self, x: Tensor) -> Tensor:
        """Return the attention's output for the layer's input (B, T, H)."""
        attention = self._split.attention
        assert attention is not None, "a layer without attention has no such part"
        compiled = self._run_compiled("attend", x)
        if compiled is not None:
            return compiled[0]

        def stop(*args: Any, **kwargs: Any) -> Any:
            out = call_stock(attention, *args, **kwargs)
            if isinstance(out, tuple):
                self._outputs = len(cast("tuple[Any, ...]", out))
                raise _PartEnd(out[0])
            raise _PartEnd(out)

        return self._reached(x, {attention: stop})

    def route(
        self, x: Tensor, attended: Tensor | None, offloaded: HostOffloaded | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the arguments of the experts: hidden states (B T, H), indices and weights (B T, K).

        `attended` is the attention's output, or the placeholder of `offloaded`.
        """
        assert self._split.experts is not None, "a dense layer has no such part"
        attended = values_of(attended, offloaded)
        compiled = self._run_compiled("route", x, attended)
        if compiled is not None:
            return compiled[0]

        def stop(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            raise _PartEnd((hidden_states, top_k_index, top_k_weights))

        cuts, _ = self._attended(attended)
        return self._reached(x, {**cuts, self._split.experts: stop})

    def attend_and_route(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the attention's output, and then what `route` returns, of the layer's input."""
        attention, experts = self._split.attention, self._split.experts
        assert attention is not None, "a layer without attention has no such part"
        assert experts is not None, "a dense layer has no such part"
        compiled = self._run_compiled("attend_and_route", x)
        if compiled is not None:
            self._end_of_attention()
            return cast("tuple[Tensor, ...]", compiled[0])
        attended: list[Tensor] = []

        def observed(*args: Any, **kwargs: Any) -> Any:
            out = cast("Tensor | tuple[Any, ...]", call_stock(attention, *args, **kwargs))
            self._outputs = len(out) if isinstance(out, tuple) else None
            attended.append(out[0] if isinstance(out, tuple) else out)
            self._end_of_attention()
            return out

        def stop(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            raise _PartEnd((attended[0], hidden_states, top_k_index, top_k_weights))

        return cast("tuple[Tensor, ...]", self._reached(x, {attention: observed, experts: stop}))

    def _end_of_attention(self) -> None:
        """Keep the state of random numbers after attention, which parts without it begin from."""
        if len(self._states) == 1:
            self.begin_part()

    def finish(
        self, x: Tensor, attended: Tensor | None, offloaded: HostOffloaded | None, routed: Tensor | None,
        routed_offloaded: HostOffloaded | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the layer's output. `routed` (B T, H) is the output of its experts.

        `attended` and `routed` are values, or the placeholders of offloaded ones.
        """
        attended, routed = values_of(attended, offloaded), values_of(routed, routed_offloaded)
        cuts, part = self._attended(attended)
        calls: list[int] = []
        if routed is not None:
            routed = to_device(routed, x.device)

        def known(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            assert routed is not None
            calls.append(part)
            self._states[part].restore()
            return routed

        compiled = self._run_compiled("finish", x, attended, routed)
        if compiled is not None:
            return self._checked(compiled[0])
        if self._split.experts is not None:
            cuts[self._split.experts] = known
        out = self._checked(self._run(x, cuts))
        if self._split.experts is not None and len(calls) != 1:
            raise CannotStack(f"a `{type(self._split.layer).__name__}` calls its experts {len(calls)} times")
        return out

    def _checked(self, out: Any) -> Tensor:
        if not isinstance(out, Tensor):
            raise CannotStack(f"a `{type(self._split.layer).__name__}` returns more than hidden states")
        return out

    def _run_compiled(self, part: Part, x: Tensor, *given: Tensor | None) -> tuple[Any] | None:
        """Return the result of a part in a tuple, `None` if it does not run compiled."""
        if self._compiled is None or not self._modes.get(part, all(self._modes.values())):
            return None
        try:
            result = self._compiled.run(part, self._call, x, *given)
        except NotCompiled:
            if part in self._modes:  # in backward, after a compiled forward
                raise
            self._modes[part] = False
            return None
        self._modes[part] = True
        self._outputs = self._compiled.outputs
        return (result,)

    def _attended(self, attended: Tensor | None) -> tuple[dict[nn.Module, Callable[..., Any]], int]:
        """Replace the attention by its output, and return the number of the next part."""
        if self._split.attention is None or attended is None:
            return {}, 1

        def known(*args: Any, **kwargs: Any) -> Any:
            self._states[1].restore()
            return attended if self._outputs is None else (attended, *[None] * (self._outputs - 1))

        return {self._split.attention: known}, 2

    def _reached(self, x: Tensor, cuts: Mapping[nn.Module, Callable[..., Any]]) -> Any:
        try:
            self._run(x, cuts)
        except _PartEnd as reached:
            return reached.value
        raise CannotStack(f"a `{type(self._split.layer).__name__}` does not always call its parts")

    def _run(self, x: Tensor, cuts: Mapping[nn.Module, Callable[..., Any]]) -> Any:
        """Run the layer's own code with some of its modules replaced."""
        self._states[0].restore()
        with ExitStack() as stack:
            stack.enter_context(self._call.autocasting())
            for module, replacement in cuts.items():
                stack.enter_context(called_as(module, replacement))
            # the parts are checkpointed; a layer that checkpoints itself would run its experts again
            stack.enter_context(with_attributes(self._split.layer, gradient_checkpointing=False))
            return call_layer(self._split.layer, self._call, x)


def call_layer(layer: nn.Module, call: LayerCall, x: Tensor) -> Any:
    """Call the layer's forward without its hooks, which ran when the call was recorded."""
    args, kwargs = call.with_hidden(x)
    return layer.forward(*args, **kwargs)
