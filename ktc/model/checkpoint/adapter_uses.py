"""The later uses of an adapter that are impossible by the names of its weights or by its original.

In: `AdapterFacts`, known before anything is trained. Out: a finding (A613) for each later command that will refuse the
adapter, with its reason and the ways that remain, and where stock PEFT will. `ktc.adapters` refuses for the same
reasons, by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from ktc.diagnostics import Diagnostic, Severity, listing
from ktc.model.checkpoint.gguf_architectures import gguf_architecture, without_gguf_name
from ktc.model.checkpoint.index import CheckpointIndex

Stored = Literal["floats", "quantised", "a GGUF file"]
MERGED = ("--gguf", "--merged")


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The names that LoRA adapts (of layers or of weights) and those of modules that train themselves.

    `tied` are the weights of the model that share their values with another. `own_code`: of the model's class.
    `stacked`: PEFT reads the experts of a layer in one tensor alone. `num_layers` of the model, 0 if unknown.
    `dropout`: of what the adapter reads some is dropped in training.
    """

    model_type: str
    layers: tuple[str, ...]
    modules: tuple[str, ...] = ()
    tied: frozenset[str] = frozenset()
    stored: Stored = "floats"
    own_code: bool = False
    stacked: bool = False
    num_layers: int = 0
    dropout: bool = False


def refused_later(facts: AdapterFacts) -> tuple[Diagnostic, ...]:
    """Return the reasons for which `ktc export` and `ktc merge` will refuse the adapter."""
    if facts.own_code:
        message = "`ktc export` and `ktc merge` will refuse the adapter: the model's class is code of its own"
        return (_found(message, "use the adapter with peft, or with `ktc generate` and `ktc serve`", "note"),)
    exports = _whole(facts) if facts.modules else (*_stacked(facts), *_without_gguf(facts))
    return (*exports, *_dropped(facts), *_tied(facts), *_rounded(facts))


def no_gguf_adapter(architecture: str, layer: str) -> str:
    """Return why llama.cpp applies no adapter to a layer, "" if it does."""
    if architecture == "deepseek2" and _leaf(layer) == "kv_b_proj":
        return "llama.cpp applies none to latent keys and values"
    return ""


def no_architecture(model_type: str) -> str:
    """Return why a model has no GGUF files."""
    return f"no GGUF architecture is known for `{model_type}`"


def only_stacked(model_type: str) -> str:
    """Return why experts of a model are not written one by one."""
    return f"peft reads those of `{model_type}` stacked"


def other_layout(*, stacked: bool) -> str:
    """Return the layout for other tools that `ktc export` writes of every adapter, with experts stacked or not."""
    return "peft-fused" if stacked else "per-expert"


def stored_as(index: CheckpointIndex | None, *configs: object) -> Stored:
    """Return how the original keeps its weights, by its files and the parts of its config.json."""
    if index is not None and index.gguf is not None:
        return "a GGUF file"
    plain = (cast("Mapping[str, object]", c if isinstance(c, Mapping) else vars(c)) for c in configs)
    return "quantised" if any(values.get("quantization_config") for values in plain) else "floats"


def loses_additions(stored: Stored) -> str:
    """Return why nothing is merged into weights that are stored so, "" if they take additions."""
    return "" if stored == "floats" else "an adapter merged into its weights would be rounded away"


def _stacked(facts: AdapterFacts) -> Iterator[Diagnostic]:
    """Yield a note where the default layout of `ktc export` has no place for the experts."""
    if facts.stacked and _has_experts(facts):
        message = f"`ktc export ADAPTER` will refuse experts one by one, its default: {only_stacked(facts.model_type)}"
        hint = f"`ktc export ADAPTER --layout {other_layout(stacked=True)}` writes them stacked"
        yield _found(message, hint, "note")


def _dropped(facts: AdapterFacts) -> Iterator[Diagnostic]:
    """Yield a note where stock PEFT refuses the adapter as training saves it."""
    if facts.dropout and _has_experts(facts):
        message = "stock peft will refuse the adapter as it is saved: it has no dropout on routed experts"
        layout = " --layout peft-fused" if facts.stacked else ""
        yield _found(
            message, f"`ktc export ADAPTER{layout}` writes `lora_dropout` as 0, which stock peft reads", "note"
        )


def _without_gguf(facts: AdapterFacts) -> Iterator[Diagnostic]:
    """Yield a finding for each reason why `ktc export --gguf` refuses."""
    architecture = gguf_architecture(facts.model_type)
    if architecture is None:
        message = f"`ktc export ADAPTER --gguf` will refuse the adapter: {no_architecture(facts.model_type)}"
        layout = other_layout(stacked=facts.stacked and _has_experts(facts))
        yield _found(message, f"`ktc export ADAPTER --layout {layout}` writes it for other tools", "note")
        return
    latent = {layer: reason for layer in facts.layers if (reason := no_gguf_adapter(architecture, layer))}
    if latent:
        reason = next(iter(latent.values()))
        ways = () if facts.stored == "a GGUF file" else (f"`ktc export ADAPTER {' '.join(MERGED)}` writes it merged",)
        yield _lost(facts, latent, reason, *ways)
    names = {f"{layer.removesuffix('.weight')}.weight": layer for layer in facts.layers if _is_whole_name(layer)}
    unnamed = [names[name] for name in without_gguf_name(architecture, facts.num_layers, names)]
    if nameless := [layer for layer in unnamed if layer not in latent]:
        yield _lost(facts, nameless, f"files of `{architecture}` have no name for them")


def _lost(facts: AdapterFacts, layers: Iterable[str], why: str, *ways: str) -> Diagnostic:
    """Return one warning for all layers that have no place in a GGUF adapter for the same reason."""
    lost = frozenset(layers)
    message = f"`ktc export ADAPTER --gguf` will refuse adapters of {listing(dict.fromkeys(map(_leaf, layers)))}: {why}"
    kept = dict.fromkeys(_leaf(layer) for layer in facts.layers if layer not in lost)
    if kept and not any(layer.endswith(".weight") or ".experts." in layer for layer in facts.layers):
        ways = (*ways, f"`ktc train --targets {','.join(kept)}` trains without")
    elif not ways:
        ways = ("`ktc export ADAPTER` writes it for other tools",)
    return _found(message, "; ".join(ways))


def _has_experts(facts: AdapterFacts) -> bool:
    return any(".experts." in f".{layer}" for layer in facts.layers)


def _is_whole_name(layer: str) -> bool:
    """Return whether a name includes its layer, and is not one of routed experts, whose names are constructed."""
    return "." in layer and ".experts." not in layer


def _whole(facts: AdapterFacts) -> Iterator[Diagnostic]:
    message = f"`ktc export` will refuse the adapter: {listing(facts.modules, 3)} train themselves, beside LoRA"
    yield _found(message, "`ktc merge OUT ADAPTER -o MERGED` merges them; peft reads the adapter as it is")


def _tied(facts: AdapterFacts) -> Iterator[Diagnostic]:
    tied = [layer for layer in facts.layers if f"{layer.removesuffix('.weight')}.weight" in facts.tied]
    if tied:
        message = f"`ktc merge` will refuse adapters of {listing(tied, 3)}: the weight is tied to another"
        yield _found(message, "train without it, or use the adapter beside the model")


def _rounded(facts: AdapterFacts) -> Iterator[Diagnostic]:
    if why := loses_additions(facts.stored):
        message = f"`ktc merge` will refuse the adapter: the original is {facts.stored}, and {why}"
        yield _found(message, "use the adapter beside the model, or train it on the original of full precision", "note")


def _leaf(layer: str) -> str:
    return layer.removesuffix(".weight").rpartition(".")[2]


def _found(message: str, hint: str, severity: Severity = "warning") -> Diagnostic:
    return Diagnostic("A613", message, hint=hint, severity=severity)
