"""`CalledExperts`: `FusedMoe` in the place of an experts module that its layer calls in a way of its own.

In: the arguments of the stock module, by position or by name. Out: its result. Refused: other arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ktc.model.experts.backends.graph_backend import HostNode
from ktc.model.experts.backends.kept_backend import SplitNode
from ktc.model.experts.backends.tracing import never_traced
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.own_module import Called, Role, call_routed
from ktc.model.experts.references.kept_split import COMPUTED_ELSEWHERE
from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.experts.weights import ExpertsWeights


class CalledExperts(FusedMoe):
    """`FusedMoe` with the `forward` of another module.

    Args:
        inputs: the parameters of that `forward` in their order, with their roles.
        called: the meaning of these parameters.
    """

    def __init__(self, weights: ExpertsWeights, inputs: Mapping[str, Role], called: Called, **settings: Any) -> None:
        super().__init__(weights, **settings)
        self.inputs = dict(inputs)
        self.called: Called = called

    def forward(self, *args: Tensor, lora: ExpertsLora | None = None, **kwargs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Call the experts as the stock module does. Raises `TypeError` for other arguments."""
        given = {**dict(zip(self.inputs, args, strict=False)), **kwargs}
        if given.keys() != self.inputs.keys() or len(args) + len(kwargs) != len(given):
            raise TypeError(f"these experts take {', '.join(self.inputs)}")
        roles = {role: given[name] for name, role in self.inputs.items()}

        def compute(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            if self.called == "by_expert" and self._zero_gives_zero:
                return self._without_zeros(hidden, index, weights, lora)
            return FusedMoe.forward(self, hidden, index, weights, lora)

        return call_routed(
            self.called, self.num_experts, compute, roles["hidden"], roles.get("index"), roles.get("weights")
        )

    @property
    def _zero_gives_zero(self) -> bool:
        """Whether hidden states of zero give zero, and have no gradient: a router leaves most rows of an expert zero.

        A gate of zero times an up of zero has no gradient. A bias, an offset of up, or experts without a gate have one.
        """
        return self.form.gated and not self.form.biased and self.form.activation.up_offset == 0

    @never_traced
    def _without_zeros(self, hidden: Tensor, index: Tensor, weights: Tensor, lora: ExpertsLora | None) -> Tensor:
        is_chosen = (hidden != 0).any(-1)
        host = self._host_of_step(len(hidden), lora)
        if host is not None:  # no code of a captured step waits for a number of rows
            return self._noted(self._chosen_alone, host, hidden, index, weights, is_chosen)
        rows = torch.nonzero(is_chosen).squeeze(-1)
        computed = FusedMoe.forward(self, hidden[rows], index[rows], weights[rows], lora)
        return torch.zeros_like(hidden).index_copy(0, rows, computed.to(hidden.dtype))

    def _chosen_alone(
        self, host: HostNode, hidden: Tensor, index: Tensor, weights: Tensor, is_chosen: Tensor
    ) -> Tensor:
        index = index.masked_fill(~is_chosen[:, None], COMPUTED_ELSEWHERE)
        self._admitted(hidden, index, weights, None)
        return host.run_some(hidden, index, weights)

    def _host_of_step(self, rows: int, lora: ExpertsLora | None) -> HostNode | None:
        """Return what calls the experts of a captured step on the CPU; None for other calls, and those with LoRA.

        A call has a row for each expert and token, too many for experts that a GPU keeps: see `SplitNode`.
        """
        if torch.is_grad_enabled() or (lora is not None and any(lora.products)):
            return None
        backend = self.backend(rows, plain=True)
        backend = backend.host if isinstance(backend, SplitNode) else backend
        return backend if isinstance(backend, HostNode) else None
