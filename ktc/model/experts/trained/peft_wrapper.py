"""`ExpertsParamWrapper`: PEFT's LoRA on a parameter of `FusedMoe`, without the weights it adapts.

PEFT wraps a module once for each of its parameters that `LoraConfig.target_parameters` names, one wrapper in the other.
Stock wrappers add B A to the weights of all experts before every call; these hand their factors to the layer's one
autograd node.
Names, shapes and files are those of stock PEFT, which has no dropout here: theirs is an `nn.Dropout` for each adapter,
as in PEFT's linear layers. Refused: merging, initialisations that read the weights, ranks above `MAX_RANK` together,
biases, dropout of several active adapters or of one that is merged in every step, and adapting the experts as if they
were one linear layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

from peft.tuners.lora.config import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import versions
from ktc.model.experts.trained.lora import MAX_RANK, NO_LORA, ExpertsLora, Lora

ADAPTED: Final = ("gate_up_proj", "up_proj", "down_proj")
PUT_BY_PEFT: Final = frozenset({"gate_up_proj", "down_proj"})  # in `target_parameters`, for names of modules
# Before 0.19 PEFT took every stacked weight for (E, inputs, outputs). If it is stored the other way round, A meets the
# outputs.
_READS_TRANSPOSED: Final = versions.release(versions.installed("peft") or "0") < (0, 19)
ASKED: Final = "_ktc_asked"


@dataclass(frozen=True, slots=True)
class AskedTargets:
    """The targets of a new `LoraConfig`, before PEFT changed them; `modules` is a text if it is a pattern."""

    modules: frozenset[str] | str
    parameters: frozenset[str]

    @classmethod
    def of(cls, config: LoraConfig) -> AskedTargets:
        """Return the targets of a config that was just made."""
        modules = config.target_modules
        return cls(
            modules if isinstance(modules, str) else frozenset(modules or ()), frozenset(config.target_parameters or ())
        )


class ExpertsParamWrapper(ParamWrapper):
    """One parameter of a `FusedMoe`, adapted. `base_layer` is the module, or the wrapper of its other parameter."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, parameter_name: str | None = None, **kwargs: Any):
        if parameter_name is None or parameter_name not in ADAPTED:
            raise _refused_target(adapter_name, parameter_name)
        _require_asked_for(adapter_name, kwargs.get("config"))
        # stock PEFT would refuse later and explain less
        _require_suited(adapter_name, int(kwargs["r"]), kwargs, base_layer)
        dropout, kwargs = _without_dropout(kwargs)
        super().__init__(base_layer, adapter_name, parameter_name=parameter_name, **kwargs)
        self._set_dropout(adapter_name, dropout)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, *args: Any, **kwargs: Any) -> None:
        """Add an adapter of rank `r`. Raises `InputRefused` (L432) for settings that experts cannot have."""
        _require_suited(adapter_name, r, kwargs, self)
        dropout, kwargs = _without_dropout(kwargs)
        super().update_layer(adapter_name, r, lora_alpha, *args, **kwargs)
        self._set_dropout(adapter_name, dropout)

    def _set_dropout(self, adapter_name: str, probability: float) -> None:
        if probability:
            self.lora_dropout[adapter_name] = nn.Dropout(probability)

    def _dropout_of(self, name: str) -> float:
        """Return the probability with which the next call drops inputs of an adapter."""
        layer = self.lora_dropout[name]
        return layer.p if isinstance(layer, nn.Dropout) and layer.training else 0.0

    def forward(self, x: Tensor, *args: Any, lora: ExpertsLora = NO_LORA, **kwargs: Any) -> Tensor:
        """Call the experts with this parameter's factors and with `lora`, those of the wrappers around this one."""
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        return cast("Any", self.base_layer)(x, *args, lora=self._gathered(lora), **kwargs)

    def _gathered(self, lora: ExpertsLora) -> ExpertsLora:
        """Return `lora` with the factors of this parameter."""
        factors = None if self.disable_adapters else self._active_lora()
        if factors is None:
            return lora
        return replace(lora, down=factors) if self.parameter_name == "down_proj" else replace(lora, gate_up=factors)

    def _active_lora(self) -> Lora | None:
        """Return the factors of the active adapters together: A (E, r, in), B (E, out, r).

        Those of a single adapter are views of PEFT's own matrices.
        """
        active = [self._lora_of(str(name)) for name in self.active_adapters if name in self.lora_A]
        rank = sum(lora.rank for lora in active)
        if len(active) > 1 and rank > MAX_RANK:
            message = f"the active adapters on routed experts have rank {rank} together"
            raise InputRefused(
                Diagnostic("L432", message, hint=f"the kernels take {MAX_RANK}: `set_adapter` with fewer")
            )
        if len(active) > 1 and any(lora.dropout for lora in active):
            message = "several active adapters on routed experts train with dropout, each with inputs of its own"
            raise InputRefused(Diagnostic("L432", message, hint="`set_adapter` with one, or `lora_dropout=0`"))
        return Lora.joined(active) if active else None

    def _lora_of(self, name: str) -> Lora:
        parameters = tuple(cast("Tensor", layers[name].weight) for layers in (self.lora_A, self.lora_B))
        a, b = parameters
        rank = a.shape[0] // self.num_experts
        a, b = a.reshape(self.num_experts, rank, -1), b.reshape(-1, rank, self.num_experts).permute(2, 0, 1)
        if _READS_TRANSPOSED and not cast("Any", self.get_base_layer()).form.transposed:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        scale = float(cast("Any", self).scaling[name])
        return Lora(a, b, scale, parameters, (scale,), self._dropout_of(name))

    def expert_of(self, side: Literal["A", "B"], rows: int, row: int, column: int) -> int:
        """Return the expert of a value in PEFT's matrix A (E r, inputs), or B (outputs, r E), which has `rows` rows."""
        return row // (rows // self.num_experts) if side == "A" else column % self.num_experts

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse (L433): the weights are packed."""
        raise InputRefused(
            Diagnostic(
                "L433",
                "an adapter cannot be merged into a compiled model: its experts are packed",
                hint="save the adapter, load it with stock PEFT on the original model, and merge it there",
            )
        )


# PEFT compares the class's name when it wraps a second parameter, so this class needs the stock name.
ExpertsParamWrapper.__name__ = "ParamWrapper"


def _refused_target(adapter_name: str, parameter_name: str | None) -> InputRefused:
    what = f"the parameter `{parameter_name}` of routed experts" if parameter_name else "routed experts as one layer"
    hint = "name their weights in `target_parameters`, or use `OUT.lora_config()`"
    return InputRefused(Diagnostic("L430", f"adapter `{adapter_name}` targets {what}", hint=hint))


def _require_asked_for(adapter_name: str, config: LoraConfig | None) -> None:
    """Refuse (L434) targets that PEFT has reinterpreted.

    Since 0.19, PEFT reads `gate_proj` and the like in `target_modules` as the routed experts' weights, and drops the
    layers of that name from the targets: shared experts and dense layers would silently stay as they are.
    """
    asked: AskedTargets | None = getattr(config, ASKED, None)
    if asked is None or config is None:
        return
    added = (set(config.target_parameters or ()) - asked.parameters) & PUT_BY_PEFT
    if not added:  # what a user names later has a path
        return
    taken = (
        asked.modules - set(config.target_modules or ()) if isinstance(asked.modules, frozenset) else {asked.modules}
    )
    if taken:
        message = f"names {_quoted(taken)} in `target_modules`, which PEFT interprets as the routed experts"
    else:  # its fields were set later, unnoticed
        message = f"was made without {_quoted(added)} in `target_parameters`, which PEFT may have read in other targets"
    hint = (
        'for routed experts write `target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]`; '
        'for shared experts and dense layers name their weights there: `"mlp.shared_experts.gate_proj.weight"`'
    )
    raise InputRefused(Diagnostic("L434", f"adapter `{adapter_name}` {message}", hint=hint))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _require_suited(adapter_name: str, r: int, settings: Mapping[str, Any], layer: nn.Module) -> None:
    wrong = _unsuited(r, settings, layer)
    if wrong:
        message = f"adapter `{adapter_name}` on routed experts: {wrong}"
        raise InputRefused(Diagnostic("L432", message, hint="see `ktc explain L432` for what experts can have"))


def _without_dropout(settings: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the dropout of an adapter, and its settings without: stock PEFT refuses one for a weight."""
    if "config" not in settings:  # before 0.19
        return float(settings.get("lora_dropout", 0.0)), {**settings, "lora_dropout": 0.0}
    config = copy.copy(settings["config"])
    dropout, config.lora_dropout = float(config.lora_dropout), 0.0
    return dropout, {**settings, "config": config}


def _unsuited(r: int, settings: Mapping[str, Any], layer: nn.Module) -> str:
    """Return the setting of this adapter that the experts in `layer` cannot have, "" if there is none."""
    # PEFT 0.19 and newer pass the config, older releases its fields
    config = cast("Mapping[str, Any]", settings["config"].__dict__ if "config" in settings else settings)
    dropout, initialisation = config["lora_dropout"], config["init_lora_weights"]
    if r > MAX_RANK:
        return f"rank {r}, of which the kernels take {MAX_RANK} at most"
    experts: Any = layer.get_base_layer() if isinstance(layer, ParamWrapper) else layer
    if dropout and experts.weights.training.merged:
        return f"dropout {dropout:g}, and the adapter is merged in every step"
    if initialisation not in (True, False, "gaussian", "orthogonal"):
        return f"initialisation `{initialisation}`, which reads the weights that are packed"
    if config.get("use_dora"):
        return "DoRA, which reads the weights that are packed"
    return ""
