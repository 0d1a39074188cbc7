"""The candidates of a machine with GPUs: where modules are, and where calls of routed experts are computed.

A GPU takes what saves most time for its bytes: first all that every token uses, then the experts of whole layers. What
is left of the experts stays in host memory, where the CPU computes them or whence the bus sends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from ktc.foundation.host import Host
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.stages.capture import CapturedModel
from ktc.stages.choose.counts import ItemClass, best_counts
from ktc.stages.choose.types import Candidate
from ktc.stages.cost import Use, Work, predict
from ktc.stages.plan.types import Choices, Plan

CPU: Final = Candidate("everything on the CPU", Choices())
_TOKENS: Final = tuple(2**power for power in range(21))
_FILLED: Final = (1.0, 0.9, 0.75, 0.5)  # shares of the room that resident experts take


@dataclass(frozen=True, slots=True)
class Question:
    """What candidates are made of: a model, its plan and works on the CPU alone, the host, and bytes that GPUs hold.

    `uses` have their weights in the sum that is made least. `room` has the bytes of each GPU for weights. `experts` has
    the FQN of the experts by layer.
    """

    captured: CapturedModel
    plan: Plan
    works: tuple[Work, ...]
    host: Host
    uses: tuple[tuple[Use, float], ...]
    room: tuple[int, ...]

    @property
    def experts(self) -> dict[int, str]:
        """The routed experts with a kernel, by layer."""
        return {
            site.layer: action.at(site.fqn)
            for rewrite in self.plan.rewrites
            for site in rewrite.sites
            for action in rewrite.actions
            if isinstance(action.kernel, FusedMoeSpec)
        }


def candidates(question: Question) -> Iterator[Candidate]:
    """Yield the candidates. Each is complete; that it fits is decided by its plan."""
    yield CPU
    gpus = tuple(f"cuda:{number}" for number in range(len(question.room)))
    if not gpus:
        return
    devices, left = _placed(question)
    if not devices:
        return
    on_gpu = Choices(devices)
    partly = "" if devices.keys() == {""} else ", as much as fits of the rest on the GPU"
    yield Candidate(f"experts on the CPU{partly}", on_gpu)
    if not question.experts:
        return
    for number in range(1, len(gpus) + 1):
        yield from _sent(question, on_gpu, gpus[:number], left)
    if devices.keys() == {""} and not _adapted(question):
        yield from _whole(question, gpus)
    elif len(gpus) > 1:
        yield from _shared_out(question, gpus)


def _placed(question: Question) -> tuple[dict[str, str], int]:
    """Return the modules on the first GPU, all that experts are not if there is room, and the bytes that are left."""
    works = [work for work in question.works if work.experts is None]
    total = round(sum(_bytes(work) for work in works))
    table = question.captured.ends[0]
    embeddings = sum(p.numel() * p.element_size() for p in question.captured.model.get_submodule(table).parameters())
    if total + embeddings <= question.room[0]:
        return {"": "cuda:0"}, question.room[0] - total - embeddings
    return _partly(question, works)


def _partly(question: Question, works: Sequence[Work]) -> tuple[dict[str, str], int]:
    """Return the sites that save most time on the first GPU."""
    classes, layers = list[ItemClass](), list[list[int | None]]()
    ordered = sorted(works, key=lambda work: (work.kind, work.products, work.layer or 0))
    for (kind, _), group in groupby(ordered, key=lambda work: (work.kind, work.products)):
        same = list(group)
        classes.append(ItemClass(kind, len(same), round(_bytes(same[0])), _gain(question, same[0])))
        layers.append([work.layer for work in same])
    counts = best_counts([item for item in classes if item.name != "norms"], question.room[0])
    kinds = [item for item in classes if item.name != "norms"]
    names = [layer for item, layer in zip(classes, layers, strict=True) if item.name != "norms"]
    devices: dict[str, str] = {}
    for item, numbers, count in zip(kinds, names, counts.counts, strict=True):
        for layer in numbers[:count]:
            devices |= dict.fromkeys(_modules(question, item.name, layer), "cuda:0")
    left = question.room[0] - sum(n * item.nbytes for n, item in zip(counts.counts, kinds, strict=True))
    return devices, left


def _modules(question: Question, kind: str, layer: int | None) -> list[str]:
    if layer is None:
        return [question.captured.ends[1]]
    sites = [site for site in question.captured.sites if site.layer == layer]
    attention = [site.fqn for site in sites if _is_attention(question, site.block)]
    return attention if kind == "attention" else [site.fqn for site in sites if site.fqn not in attention]


def _is_attention(question: Question, block: str) -> bool:
    from ktc.model.graph import ops
    from ktc.model.graph.typed import nodes_of

    graph = question.captured.block(block).graph
    return graph is not None and any(ops.operator(node) == "sdpa" for node in nodes_of(graph))


def _bytes(work: Work) -> float:
    """Return the bytes of a work on a device: weights, and adapters with their gradients and moments in fp32."""
    return work.weights + 16 * work.adapter


def _gain(question: Question, work: Work) -> float:
    """Return the seconds that a work saves on the first GPU in all uses."""
    rates, threads = question.host.rates, question.host.workers
    cpu, gpu = (replace(work, device=device) for device in ("cpu", "cuda:0"))
    return sum(
        weight * (predict((cpu,), use, rates, threads).seconds - predict((gpu,), use, rates, threads).seconds)
        for use, weight in question.uses
    )


# Routed experts ------------------------------------------------------------------------------------------------------
def _sent(question: Question, on_gpu: Choices, gpus: tuple[str, ...], left: int) -> Iterator[Candidate]:
    """Yield that many tokens go to `gpus`, with no layer resident there, and with as many as there is room for.

    One GPU may have places for single experts instead, which decoding steps read.
    """
    least = crossover(question, gpus)
    sent = replace(on_gpu, sent=gpus, least=least)
    where = listed(gpus)
    if least <= max(_TOKENS):
        yield Candidate(f"experts sent to {where} for calls of {least:,} tokens or more", sent)
    if len(gpus) == 1 and dict(on_gpu.devices) == {"": "cuda:0"} and question.plan.mode != "train":
        yield Candidate(f"single experts on {where}, as many as fit", replace(sent, keeps=True))
    layers = list(question.experts)
    packed = max(work.weights for work in question.works if work.experts is not None)
    room = min((left, *question.room[1 : len(gpus)])) if len(gpus) > 1 else left
    for count in dict.fromkeys(min(len(layers), int(most * room * len(gpus) / packed)) for most in _FILLED):
        if count > 0:
            resident = frozenset(question.experts[layer] for layer in spread(layers, count))
            rest = f", of {len(layers) - count} sent for calls of {least:,} tokens or more" * (count < len(layers))
            layers_of = f"{count} layer" + "s" * (count > 1)
            yield Candidate(f"experts of {layers_of} on {where}{rest}", replace(sent, resident=resident))


def _whole(question: Question, gpus: tuple[str, ...]) -> Iterator[Candidate]:
    """Yield the whole model on the first GPU, and its layers on several in turn."""
    stock = frozenset(question.experts.values())
    yield Candidate("the whole model on cuda:0", Choices({"": "cuda:0"}, stock=stock))
    if len(gpus) > 1:
        yield Candidate(f"the layers on {listed(gpus)} in turn", Choices(_in_turn(question, len(gpus)), stock=stock))


def _shared_out(question: Question, gpus: tuple[str, ...]) -> Iterator[Candidate]:
    """Yield all that every token uses on several GPUs, layers in turn, with the experts on the CPU, or sent to all."""
    rest = f"all but the experts on {listed(gpus)} in turn"
    in_turn = Choices(_in_turn(question, len(gpus)))
    yield Candidate(f"{rest}, experts on the CPU", in_turn)
    least = crossover(question, gpus)
    if least <= max(_TOKENS):
        sent = replace(in_turn, sent=gpus, least=least)
        yield Candidate(f"{rest}, experts sent to them for calls of {least:,} tokens or more", sent)


def _in_turn(question: Question, gpus: int) -> dict[str, str]:
    """Return the GPU of each layer: as many layers on each, the head on the last."""
    layers = sorted({site.layer for site in question.captured.sites})
    modules = {layer: _layer_module(question.captured, layer) for layer in layers}
    per_gpu = -(-len(layers) // gpus)
    devices = {modules[layer]: f"cuda:{number // per_gpu}" for number, layer in enumerate(layers)}
    return {"": "cuda:0", **devices, question.captured.ends[1]: f"cuda:{(len(layers) - 1) // per_gpu}"}


def _layer_module(captured: CapturedModel, layer: int) -> str:
    site = next(site for site in captured.sites if site.layer == layer)
    return site.fqn.partition(f".{layer}.")[0] + f".{layer}"


def _adapted(question: Question) -> bool:
    """Return whether the experts have adapters, which only their kernel takes."""
    return any(work.experts is not None and work.adapter for work in question.works)


def crossover(question: Question, gpus: tuple[str, ...]) -> int:
    """Return the tokens from which the bus to `gpus` is faster than the CPU, a power of two; above all if never."""
    work = next(work for work in question.works if work.experts is not None)
    assert work.experts is not None, "it has experts"
    sent = replace(work, experts=replace(work.experts, devices=gpus, least=1))
    rates, threads = question.host.rates, question.host.workers
    for tokens in _TOKENS:
        use = Use("prefill", 1, tokens)
        if predict((sent,), use, rates, threads).seconds < predict((work,), use, rates, threads).seconds:
            return tokens
    return 2 * _TOKENS[-1]


def spread(layers: Sequence[int], count: int) -> list[int]:
    """Return `count` of the layers at even distances."""
    return [layers[(2 * number + 1) * len(layers) // (2 * count)] for number in range(count)]


def listed(gpus: Sequence[str]) -> str:
    """Return the names of GPUs: `cuda:0`, `cuda:0 to cuda:3`."""
    return gpus[0] if len(gpus) == 1 else f"{gpus[0]} to {gpus[-1]}"
