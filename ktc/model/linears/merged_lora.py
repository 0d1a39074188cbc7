"""`MergedLoraLinear`: PEFT's LoRA on a `TrainedLinear`, whose factors are merged before the weight is rounded.

Refused (L432): an adapter with dropout, a bias or a variant, and one on a layer whose weight trains itself; merging
into the loaded model (L433).
"""

from __future__ import annotations

from typing import Any, cast

from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.trained.lora import Factors
from ktc.model.linears.trained_linear import TrainedLinear


class MergedLoraLinear(Linear):
    """PEFT's LoRA on a `TrainedLinear`: the factors are merged before the weight is rounded."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(base_layer, adapter_name, *args, **kwargs)
        if not cast("TrainedLinear", self.get_base_layer()).weight_training.merged:
            message = f"adapter `{adapter_name}` on a linear layer that trains itself"
            raise InputRefused(Diagnostic("L432", message, hint="leave it out of `target_modules`"))

    def update_layer(self, adapter_name: str, r: int, *args: Any, **kwargs: Any) -> None:
        """Add an adapter of rank `r`. Raises `InputRefused` (L432) for one that cannot be merged in every step."""
        super().update_layer(adapter_name, r, *args, **kwargs)
        dropout = self.lora_dropout[adapter_name]
        if not isinstance(dropout, nn.Identity) or adapter_name in self.lora_variant or self.lora_bias[adapter_name]:
            message = f"adapter `{adapter_name}` has dropout, a bias or a variant, and is merged before it is rounded"
            raise InputRefused(Diagnostic("L432", message, hint="use plain LoRA without dropout"))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Multiply with the rounded sum of the weight and the active adapters. Raises `InputRefused` (L432).

        Refused: adapters that differ from row to row (`adapter_names`), which one rounded sum cannot serve.
        """
        if kwargs.pop("adapter_names", None) is not None:
            message = "each row of the batch names its own adapter, and adapters are merged before rounding"
            raise InputRefused(Diagnostic("L432", message, hint="`set_adapter`, and a batch for each adapter"))
        base = cast("TrainedLinear", self.get_base_layer())
        return base(x, None if self.disable_adapters else self._factors())

    def _factors(self) -> Factors | None:
        active = [self._factors_of(str(name)) for name in self.active_adapters if name in self.lora_A]
        return Factors.joined(active) if active else None

    def _factors_of(self, name: str) -> Factors:
        a, b = (cast("Tensor", layers[name].weight) for layers in (self.lora_A, self.lora_B))
        scale = float(cast("dict[str, float]", self.scaling)[name])
        return Factors(a, b, scale, (a, b), (scale,))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse (L433): a merged weight would be rounded again, to another one."""
        message = "an adapter that is merged before rounding is not merged into the loaded model"
        raise InputRefused(Diagnostic("L433", message, hint="save the adapter, and run `ktc merge --int4`"))
