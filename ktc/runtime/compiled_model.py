"""What a compiled model does otherwise than the stock class: how it is loaded, and what it will not save.

`CompiledModel` stands before the stock class (`class KtcX(CompiledModel, X)`), here for `ktc.load` and in
`modeling_ktc.py` for `AutoModelForCausalLM`. Refused: writing the base model as a checkpoint.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.runtime.fused_moe import FusedMoe

log = logging.getLogger(__name__)


class CompiledModel:
    """Mixin before a stock causal LM."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """Load the compiled folder. Placement and dtype are the compiler's: `device_map` and the like are ignored.

        Takes `config`, `attn_implementation`, and ktc's own `weights`, `reference`, `allow_nonfinite`.
        Raises what `ktc.load` raises, and `InputRefused` (L422) for a quantisation config.
        """
        from ktc.runtime.load import load_as

        if kwargs.get("quantization_config") is not None:
            hint = "choose a weight format in the rule file instead"
            message = "a compiled model cannot be quantised while it is loaded"
            raise InputRefused(Diagnostic("L422", message, hint=hint))
        config = kwargs.get("config")
        model = load_as(
            cast("type[PreTrainedModel]", cls),
            Path(pretrained_model_name_or_path),
            config=config if isinstance(config, PreTrainedConfig) else None,
            attention=kwargs.get("attn_implementation"),
            **{name: kwargs[name] for name in ("weights", "reference", "allow_nonfinite") if name in kwargs},
        )
        _tell_ignored_dtype(kwargs.get("dtype") or kwargs.get("torch_dtype"), model.dtype)
        if kwargs.get("output_loading_info"):
            nothing: dict[str, Any] = {
                "missing_keys": [],
                "unexpected_keys": [],
                "mismatched_keys": [],
                "error_msgs": [],
            }
            return cast("PreTrainedModel", (model, nothing))
        return model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Always refused: the experts lie in packed form, a checkpoint written from here would lack them."""
        raise InputRefused(
            Diagnostic(
                "L423",
                "a compiled model is not written as a checkpoint: its experts are packed and it would lack them",
                hint=f"save the adapter (`PeftModel.save_pretrained`); its base is `{cast('Any', self).name_or_path}`",
            )
        )

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As the stock model counts, packed experts included."""
        counted = int(cast("Any", super()).num_parameters(only_trainable, exclude_embeddings))
        if only_trainable:
            return counted
        banks = [m for m in cast("nn.Module", self).modules() if isinstance(m, FusedMoe)]
        return counted + sum(3 * bank.num_experts * bank.hidden * bank.intermediate for bank in banks)

    # transformers reads the source of the class's module to learn what it can do, and treats classes from elsewhere as
    # unknown code whose tensors keep their names. Ours is the stock class, so the stock class answers.

    @classmethod
    def _stock(cls) -> Any:
        return next(base for base in cls.__mro__ if base.__module__.startswith("transformers."))

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls._stock()._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls._stock()._can_set_experts_implementation()

    @classmethod
    def is_custom_code(cls) -> bool:
        return False


def compiled_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The compiled form of a stock class, for models that are loaded without `modeling_ktc.py`."""
    return type(f"Ktc{stock.__name__}", (CompiledModel, stock), {"__module__": __name__, "__doc__": stock.__doc__})


def _tell_ignored_dtype(asked: object, dtype: torch.dtype) -> None:
    wanted = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if isinstance(wanted, torch.dtype) and wanted != dtype:
        log.warning("dtype %s was asked for; this model was compiled for %s and keeps it", wanted, dtype)
