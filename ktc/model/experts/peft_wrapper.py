"""`ExpertsParamWrapper`: PEFT's LoRA on a parameter of `FusedMoe`, without the weights it adapts.

PEFT wraps a module once for each of its parameters that `LoraConfig.target_parameters` names, one wrapper in the other.
Stock wrappers add B A to the weights of all experts before every call; these hand their factors to the layer's one
autograd node.
Names, shapes and files are those of stock PEFT. Refused: dropout, merging, initialisations that read the weights,
ranks above `MAX_RANK` together, biases, and adapting the experts as if they were one linear layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

from peft.tuners.lora.config import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import versions
from ktc.model.experts.lora import MAX_RANK, NO_LORA, ExpertsLora, Lora

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
        _require_suited(adapter_name, int(kwargs["r"]), kwargs)  # stock PEFT would refuse later and explain less
        super().__init__(base_layer, adapter_name, parameter_name=parameter_name, **kwargs)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, *args: Any, **kwargs: Any) -> None:
        """Add an adapter of rank `r`. Raises `InputRefused` (L432) for settings that experts cannot have."""
        _require_suited(adapter_name, r, kwargs)
        super().update_layer(adapter_name, r, lora_alpha, *args, **kwargs)

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
        return Lora.joined(active) if active else None

    def _lora_of(self, name: str) -> Lora:
        parameters = tuple(cast("Tensor", layers[name].weight) for layers in (self.lora_A, self.lora_B))
        a, b = parameters
        rank = a.shape[0] // self.num_experts
        a, b = a.reshape(self.num_experts, rank, -1), b.reshape(-1, rank, self.num_experts).permute(2, 0, 1)
        if _READS_TRANSPOSED and not cast("Any", self.get_base_layer()).form.transposed:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        scale = float(cast("Any", self).scaling[name])
        return Lora(a, b, scale, parameters, (scale,))

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


def _require_suited(adapter_name: str, r: int, settings: Mapping[str, Any]) -> None:
    wrong = _unsuited(r, settings)
    if wrong:
        message = f"adapter `{adapter_name}` on routed experts: {wrong}"
        raise InputRefused(Diagnostic("L432", message, hint="see `ktc explain L432` for what experts can have"))


def _unsuited(r: int, settings: Mapping[str, Any]) -> str:
    """Return the setting of this adapter that experts cannot have, "" if there is none."""
    # PEFT 0.19 and newer pass the config, older releases its fields
    config = cast("Mapping[str, Any]", settings["config"].__dict__ if "config" in settings else settings)
    dropout, initialisation = config["lora_dropout"], config["init_lora_weights"]
    if r > MAX_RANK:
        return f"rank {r}, of which the kernels take {MAX_RANK} at most"
    if dropout:
        return f"dropout {dropout:g}, which has no meaning for weights that many tokens share"
    if initialisation not in (True, False, "gaussian", "orthogonal"):
        return f"initialisation `{initialisation}`, which reads the weights that are packed"
    if config.get("use_dora"):
        return "DoRA, which reads the weights that are packed"
    return ""
