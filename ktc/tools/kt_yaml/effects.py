"""The effect of a KTransformers rule on a module, in terms of ktc: a device, a prefill device, an optional rewrite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ktc.foundation.module_paths import from_inside
from ktc.model.targets import CpuMoe, GpuMoe, LinearTarget, MlaAbsorbed
from ktc.tools.kt_yaml import names
from ktc.tools.kt_yaml.names import Defaults
from ktc.tools.kt_yaml.replay import Visit
from ktc.tools.kt_yaml.rules import KtRule

_STOCK = {"attention": "attention modules", "fused": "modules"}
UNMATCHED_DEVICE = "cuda:0"  # KTransformers' `default_device`
MLA, GQA = "attn.mla", "attn.gqa"
_IMPLIED = {
    "block": "nothing of its own: the experts' rewrite implies it",
    "rope": "nothing: buffers are made on their node's device",
    "model": "nothing of its own: transfers follow from placement",
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A rewrite of the kernel facet: the operand of `match`, the target, and the settings that the file decides."""

    root: str
    target: str
    settings: tuple[tuple[str, str | bool], ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one module. `lost` says why a rewrite that the file requests is impossible here."""

    path: str
    rule: KtRule | None
    device: str
    prefill: str
    kernel: Kernel | None = None
    lost: str = ""
    located: bool = False  # it holds tensors, or the file says where it is
    inside: bool = False  # part of the replacement of a module above it

    @property
    def pinned(self) -> bool:
        """Whether the rewrite itself decides the device."""
        return self.kernel is not None and self.kernel.target == CpuMoe.name


@dataclass(frozen=True, slots=True)
class Reach:
    """The operands of `match` by path, and the linears that a rewritten latent attention absorbs."""

    paths: Mapping[str, frozenset[str]]
    absorbed: frozenset[str]


def outcomes(visits: Sequence[Visit], reach: Reach) -> tuple[Outcome, ...]:
    """Return one outcome per module, in the order of the visits."""
    training = trains(visit.rule for visit in visits)
    effects = [_outcome(visit, reach, training) for visit in visits]
    pinned = frozenset(outcome.path for outcome in effects if outcome.pinned)
    latent = frozenset(o.path for o in effects if o.kernel is not None and o.kernel.target == MlaAbsorbed.name)
    return tuple(_settled(outcome, pinned, latent, reach) for outcome in effects)


def trains(rules: Iterable[KtRule | None]) -> bool:
    """Return whether any rule inserts experts for training."""
    return any(rule is not None and rule.settings.get("generate_op") == names.TRAINING_EXPERTS for rule in rules)


def _settled(outcome: Outcome, pinned: frozenset[str], latent: frozenset[str], reach: Reach) -> Outcome:
    """Return the outcome of a module that is part of a rewrite above it."""
    above = {*from_inside(outcome.path)} - {outcome.path}
    if pinned & above:
        return replace(outcome, kernel=None, located=False, inside=True)
    if outcome.kernel is not None and outcome.path in reach.absorbed and latent & above:
        lost = f"`{MlaAbsorbed.name}` absorbs `{outcome.path}`, which therefore has no separate kernel"
        return replace(outcome, kernel=None, lost=lost)
    return outcome


def implied(rule: KtRule) -> str:
    """Return why a rule that fires adds no rule to the program, "" if it adds one."""
    return _IMPLIED.get(rule.kind, "")


def _outcome(visit: Visit, reach: Reach, training: bool) -> Outcome:
    path, rule = visit.module.fqn, visit.rule
    holds = bool(visit.module.tensors) and path != ""
    if rule is None:
        return Outcome(path, None, UNMATCHED_DEVICE, UNMATCHED_DEVICE, located=holds)
    device, prefill = _devices(rule)
    kernel = _kernel(rule, path, reach, training) if visit.inside is None else None
    lost = _lost(kernel, path, reach) if kernel or visit.inside else _no_kernel(rule, training)
    kept = None if lost else kernel
    if kept is not None and kept.target == CpuMoe.name:
        device = "cpu"
    else:  # other modules compute every call on one device
        prefill = device
    located = holds or (rule.kind == "rope" and path != "")
    return Outcome(path, rule, device, prefill, kept, lost, located, visit.inside is not None)


def _devices(rule: KtRule) -> tuple[str, str]:
    defaults = names.DEFAULTS.get(rule.kind)
    device = str(rule.settings.get("generate_device") or _full((defaults or Defaults()).generate_device))
    if defaults is None:  # only linears and experts can run on another device during prefill
        return device, str(rule.settings.get("prefill_device") or device)
    if _operation(rule, "prefill_op") is None:
        return device, device
    return device, str(rule.settings.get("prefill_device") or _full(defaults.prefill_device))


def _full(device: str) -> str:
    return device if device == "cpu" or ":" in device else f"{device}:0"


def _operation(rule: KtRule, key: str) -> str | None:
    """Return the operation of a phase: the rule's, `null` included; without one, the constructor's default."""
    if key in rule.settings:
        named = rule.settings[key]
        return str(named) if named is not None else None
    defaults = names.DEFAULTS[rule.kind]
    return defaults.generate_op if key == "generate_op" else defaults.prefill_op


def operations(rule: KtRule) -> tuple[str, ...]:
    """Return the operations that a rule names or implies."""
    if rule.kind not in names.DEFAULTS:
        return ()
    phases = (_operation(rule, "generate_op"), _operation(rule, "prefill_op"))
    return tuple(operation for operation in phases if operation)


def _kernel(rule: KtRule, path: str, reach: Reach, training: bool) -> Kernel | None:
    match rule.kind:
        case "linear" if training:
            return Kernel("linear", LinearTarget.name, (("kernel", "torch"),)) if operations(rule) else None
        case "linear":
            return _linear(rule)
        case "experts":
            return _experts(rule)
        case "attention":
            return _attention(rule, path, reach)
        case _:
            return None


def _linear(rule: KtRule) -> Kernel | None:
    generate, prefill = _operation(rule, "generate_op"), _operation(rule, "prefill_op")
    kernel = names.LINEAR_KERNELS[generate] if generate else None
    during = names.LINEAR_KERNELS[prefill] if prefill else None
    main = kernel or during
    if main is None or _no_kernel(rule, training=False):
        return None
    other = (("prefill", during),) if during and during != main else ()
    return Kernel("linear", LinearTarget.name, (("kernel", main), *other))


def _experts(rule: KtRule) -> Kernel | None:
    operation = _operation(rule, "generate_op")
    if operation in names.CPU_EXPERTS:
        form, isa = names.BACKENDS[str(rule.settings.get("backend") or "llamafile")]
        return Kernel("experts", CpuMoe.name, (("format", form), ("isa", isa)))
    form = names.GPU_EXPERTS[operation] if operation else None
    return Kernel("experts", GpuMoe.name, (("format", form),)) if form else None


def _no_kernel(rule: KtRule, training: bool) -> str:
    """Return why ktc has no kernel for what a rule names, "" where it has one or the rule names none."""
    if rule.kind in _STOCK:
        return f"the model's own {_STOCK[rule.kind]} stay: ktc has no kernel for them"
    named = operations(rule)[:1] if rule.kind == "experts" else operations(rule)
    kernels = {**names.GPU_EXPERTS, **({} if training else names.LINEAR_KERNELS)}
    missing = next((name for name in named if name in kernels and kernels[name] is None), "")
    return f"ktc has no kernel for `{missing}`: the modules stay unchanged" if missing else ""


def _attention(rule: KtRule, path: str, reach: Reach) -> Kernel | None:
    if path in reach.paths[GQA]:
        return None
    absorb = "always" if rule.settings.get("absorb_for_prefill") else "decode"
    return Kernel(MLA, MlaAbsorbed.name, (("absorb", absorb),))


def _lost(kernel: Kernel | None, path: str, reach: Reach) -> str:
    """Return why ktc cannot apply this rewrite to the module, "" if it can."""
    if kernel is None:
        return ""
    if not path:
        return "a rule cannot name the model as a whole"
    if path in reach.paths[kernel.root]:
        return ""
    what = "attention" if kernel.root == MLA else f"`{kernel.root}`"
    return f"ktc finds no {what} at `{path}` that `{kernel.target}` could rewrite"
