"""The uses of an adapter that the names of its weights and its original rule out.

In: `AdapterFacts`, known before anything is trained. Out: a finding (A613) for each later command that will refuse the
adapter, with its reason and the ways that remain. `ktc.adapters` refuses for the same reasons, by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from ktc.checkpoint.gguf_architectures import gguf_architecture
from ktc.checkpoint.index import CheckpointIndex
from ktc.diagnostics import Diagnostic, Severity, listing

Stored = Literal["floats", "quantised", "a GGUF file"]
MERGED = ("--gguf", "--merged")


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The names that LoRA adapts (of layers or of weights) and those of modules that train themselves.

    `tied` are the weights of the model that share their values with another. `own_code`: of the model's class.
    """

    model_type: str
    layers: tuple[str, ...]
    modules: tuple[str, ...] = ()
    tied: frozenset[str] = frozenset()
    stored: Stored = "floats"
    own_code: bool = False


def refused_later(facts: AdapterFacts) -> tuple[Diagnostic, ...]:
    """Return what `ktc export` and `ktc merge` will refuse about the adapter."""
    if facts.own_code:
        message = "`ktc export` and `ktc merge` will refuse the adapter: the model's class is code of its own"
        return (_found(message, "use the adapter with peft, or with `ktc generate` and `ktc serve`", "note"),)
    return (*_without_place(facts), *_whole(facts), *_tied(facts), *_rounded(facts))


def no_gguf_adapter(architecture: str, layer: str) -> str:
    """Return why llama.cpp applies no adapter to a layer, "" if it does."""
    if architecture == "deepseek2" and _leaf(layer) == "kv_b_proj":
        return "llama.cpp applies none to latent keys and values"
    return ""


def stored_as(index: CheckpointIndex | None, *configs: object) -> Stored:
    """Return how the original keeps its weights, by its files and the parts of its config.json."""
    if index is not None and index.gguf is not None:
        return "a GGUF file"
    plain = (cast("Mapping[str, object]", c if isinstance(c, Mapping) else vars(c)) for c in configs)
    return "quantised" if any(each.get("quantization_config") for each in plain) else "floats"


def loses_additions(stored: Stored) -> str:
    """Return why nothing is merged into weights that are stored so, "" if they take additions."""
    return "" if stored == "floats" else "an adapter merged into its weights would be rounded away"


def _without_place(facts: AdapterFacts) -> Iterator[Diagnostic]:
    """Yield one warning for all layers to which llama.cpp applies no adapter."""
    architecture = gguf_architecture(facts.model_type) or ""
    why = {layer: reason for layer in facts.layers if (reason := no_gguf_adapter(architecture, layer))}
    if not why:
        return
    kept = dict.fromkeys(_leaf(layer) for layer in facts.layers if layer not in why)
    reason = next(iter(why.values()))
    message = f"`ktc export ADAPTER --gguf` will refuse adapters of {listing(dict.fromkeys(map(_leaf, why)))}: {reason}"
    ways = [] if facts.stored == "a GGUF file" else [f"`ktc export ADAPTER {' '.join(MERGED)}` writes the merged model"]
    if kept and not any(layer.endswith(".weight") or ".experts." in layer for layer in facts.layers):
        ways.append(f"`ktc train --targets {','.join(kept)}` trains without")
    yield _found(message, "; ".join(ways))


def _whole(facts: AdapterFacts) -> Iterator[Diagnostic]:
    if not facts.modules:
        return
    message = f"`ktc export` will refuse the adapter: {listing(facts.modules, 3)} train themselves, beside LoRA"
    yield _found(message, "`ktc merge OUT ADAPTER -o MERGED` merges them; peft reads the adapter as it is")


def _tied(facts: AdapterFacts) -> Iterator[Diagnostic]:
    found = [layer for layer in facts.layers if f"{layer.removesuffix('.weight')}.weight" in facts.tied]
    if found:
        message = f"`ktc merge` will refuse adapters of {listing(found, 3)}: the weight is tied to another"
        yield _found(message, "train without it, or use the adapter beside the model")


def _rounded(facts: AdapterFacts) -> Iterator[Diagnostic]:
    if why := loses_additions(facts.stored):
        message = f"`ktc merge` will refuse the adapter: the original is {facts.stored}, and {why}"
        yield _found(message, "use the adapter beside the model, or train it on the original of full precision", "note")


def _leaf(layer: str) -> str:
    return layer.removesuffix(".weight").rpartition(".")[2]


def _found(message: str, hint: str, severity: Severity = "warning") -> Diagnostic:
    return Diagnostic("A613", message, hint=hint, severity=severity)
