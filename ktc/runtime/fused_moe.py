"""`FusedMoe`: the routed experts of one layer as one module with one autograd node.

In: hidden states and the router's choice, as Hugging Face's experts modules take them. Out: the weighted sum of the
experts' outputs. Gradients go to the hidden states and the routing weights; the base weights are frozen.
Without a kernel the module is its own PyTorch reference on plain tensors. Refused: an expert index out of range,
a forward before every expert is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

import torch
from torch import Tensor, nn

from ktc.runtime.experts_reference import ACTIVATIONS, fused_moe_reference
from ktc.runtime.kernel_library import Kernel

Part = Literal["gate", "up", "down"]
PARTS: tuple[Part, ...] = ("gate", "up", "down")

__all__ = ["PARTS", "FusedMoe", "Part", "fused_moe_reference"]


class FusedMoe(nn.Module):
    """Routed experts with frozen weights; forward takes `(T, H), (T, K) int64, (T, K)` and returns `(T, H)`.

    `gate_up_proj` (E, 2I, H) and `down_proj` (E, H, I) can be asked for by name, as PEFT does, but are no registered
    parameters: optimizers, `state_dict` and `.to()` do not see them. With a kernel they are shapes without storage.

    Args:
        kernel: an entry of the kernel library, or `None` for the PyTorch reference.
        threads: workers of the kernel's engine.
        dtype: what the parameters report; in reference mode also the dtype they are stored and computed in.
        activations: `keep` saves gate and up of every slot for backward, `recompute` computes them again.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        top_k: int,
        activation: str = "silu",
        *,
        kernel: Kernel | None = None,
        threads: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        activations: Literal["keep", "recompute"] = "keep",
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation `{activation}`; expected one of {', '.join(ACTIVATIONS)}")
        self.num_experts, self.hidden, self.intermediate, self.top_k = num_experts, hidden, intermediate, top_k
        self.activation, self.activations, self.threads, self.dtype = activation, activations, threads, dtype
        self._absent = {(expert, part) for expert in range(num_experts) for part in PARTS}
        self._hold("gate_up_proj", torch.zeros(num_experts, 2 * intermediate, hidden, dtype=dtype))
        self._hold("down_proj", torch.zeros(num_experts, hidden, intermediate, dtype=dtype))

    def _hold(self, name: str, tensor: Tensor) -> None:
        """Keep a parameter as a plain attribute, past `nn.Module`'s registration."""
        self.__dict__[name] = nn.Parameter(tensor, requires_grad=False)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The two weights by name, for whoever asks this module itself; a parent does not list them."""
        dot = "." if prefix else ""
        for name in ("gate_up_proj", "down_proj"):
            yield f"{prefix}{dot}{name}", cast(nn.Parameter, self.__dict__[name])
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def load_expert(self, expert: int, part: Part, tensor: Tensor) -> None:
        """Store one matrix of one expert: gate and up are `(I, H)`, down is `(H, I)`; any float dtype."""
        expected = (self.hidden, self.intermediate) if part == "down" else (self.intermediate, self.hidden)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"expert {expert}, `{part}`: expected shape {expected}, found {tuple(tensor.shape)}")
        self._store(expert, part, tensor.detach())
        self._absent.discard((expert, part))

    def _store(self, expert: int, part: Part, tensor: Tensor) -> None:
        with torch.no_grad():
            if part == "down":
                self.down_proj[expert].copy_(tensor)
            else:
                offset = 0 if part == "gate" else self.intermediate
                self.gate_up_proj[expert, offset : offset + self.intermediate].copy_(tensor)

    def missing(self) -> tuple[tuple[int, Part], ...]:
        """The (expert, part) pairs that were never loaded, in order of expert."""
        return tuple(sorted(self._absent, key=lambda pair: (pair[0], PARTS.index(pair[1]))))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        assert not self._absent, f"{len(self._absent)} expert weights were never loaded, first {self.missing()[0]}"
        device = hidden_states.device
        out = fused_moe_reference(
            hidden_states.cpu(), top_k_index.cpu(), top_k_weights.cpu(), self.gate_up_proj, self.down_proj, self.activation
        )
        return out.to(device)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden={self.hidden}, intermediate={self.intermediate}, top_k={self.top_k}, "
            f"activation={self.activation}, kernel=reference"
        )
