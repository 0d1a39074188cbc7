"""Take one family through the compiler: its default config shrunk to a twin, captured, matched, rewritten and proven.

Input: a `model_type` of transformers. Output: a `Family` with the stage reached; any exception becomes its reason. The
twin is captured in fp32, so it is its own twin.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from census import describe
from census.checkpoints import whole_config
from census.programs import HOST, PROGRAMS, rewritten, rules, twin_proofs
from census.types import MATCHED, NONE, BlockProof, Component, Family, TwinProof
from ktc.diagnostics import Diagnostic, KtcError, ProofFailed
from ktc.language.dsl import syntax
from ktc.model import twin
from ktc.model.compare.comparison import in_a_line
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.stages.capture import BlockGraph, CapturedModel, ModelSource, capture
from ktc.stages.capture.length import PLAIN
from ktc.stages.match import Match, Matches
from ktc.stages.plan import BlockRewrite
from ktc.stages.proof import ProofTwin, as_twin, prove_on, reason, refuted
from ktc.stages.rewrite import RewrittenBlock

MOE, ATTENTION = ("moe",), ("attention", "mla")  # roles of patterns: what explains a whole block
NEAREST = "; closest: "
LARGEST = 100_000_000  # parameters of a twin; more means that a size of this family was not shrunk


def examine(family: str) -> Family:
    """Take one family through all stages. Raises only KeyboardInterrupt."""
    started, row = time.perf_counter(), Family(family, towers=family in twin.whole_families())
    try:
        for further in _steps(row):
            row = further
    except Exception as error:  # noqa: BLE001 - any failure of one family is its reason
        told = any(reason in _words(error) for reason in row.reasons)  # the plan repeats capture's reasons
        row = row if told else replace(row, reasons=(_words(error), *row.reasons))
    gc.collect()  # graphs and modules refer to each other
    return replace(row, seconds=time.perf_counter() - started)


def _steps(row: Family) -> Iterator[Family]:
    """Yield the row after each stage: described, matched, proven, compared as a whole."""
    config = twin.shrink(whole_config(row.family) if row.towers else twin.default_config(row.family))
    config.dtype = torch.float32
    captured = capture(ModelSource(row.family, None, config, None))
    yield (row := _described(row, captured))
    _refuse_large(captured)
    matches, plan, blocks = rewritten(captured, PROGRAMS[0])
    yield (row := _judged(row, captured, matches, plan.rewrites))
    proof_twin = as_twin(captured)
    proofs, left = _proven(captured, blocks, proof_twin)
    failures = [f"`{p.class_name}` cannot be proven: {p.failure}" for p in proofs if p.failure]
    wrong = [_wrong_words(proof) for proof in proofs if proof.wrong]
    yield (row := replace(row, proofs=proofs, reasons=tuple(dict.fromkeys((*wrong, *row.reasons, *failures)))))
    twins = twin_proofs(captured, proof_twin, left)
    wrong = [_wrong_twin(proof) for proof in twins if proof.wrong]
    yield replace(row, twins=twins, reasons=(*wrong, *row.reasons))


def _refuse_large(captured: CapturedModel) -> None:
    """Guard memory: the twin is on meta here, and the next stage allocates its weights."""
    sizes = {name: p.numel() for name, p in captured.model.named_parameters()}
    if sum(sizes.values()) > LARGEST:
        largest = max(sizes, key=lambda name: sizes[name])
        message = f"the small twin has {sum(sizes.values()):,} parameters, most of them in `{largest}`"
        raise ProofFailed(Diagnostic("P302", message, hint="a size of this config is unknown to `twin.shrink`"))


# verdicts ------------------------------------------------------------------------------------------------------------
def _described(row: Family, captured: CapturedModel) -> Family:
    """Return the descriptions of the captured blocks, and the verdicts before pattern matching."""
    graphs = [(block, block.graph) for block in captured.blocks if block.graph is not None]
    kinds = {block.key: describe.kind_of(graph, block.class_name) for block, graph in graphs}
    experts = [(block, node) for block, graph in graphs for node in describe.experts_nodes(graph)]
    beside = {key: _dense_beside(captured, key, kinds) for key in kinds}
    judged = _judged(row, captured, Matches((), ()), ())
    return replace(
        judged,
        router=_joined(describe.router_words(node) for _, node in experts),
        activation=_joined(str(ops.attributes(node)["form"]) for _, node in experts),
        shared_experts=_joined(describe.shared_words(node, beside[block.key]) for block, node in experts),
        reasons=_uncaptured(captured),
    )


def _uncaptured(captured: CapturedModel) -> tuple[str, ...]:
    return tuple(
        f"`{block.class_name}` could not be captured: {block.opaque}"
        for block in captured.blocks
        if block.graph is None and not block.opaque.startswith(PLAIN)
    )


def _dense_beside(captured: CapturedModel, key: str, kinds: Mapping[str, str]) -> list[str]:
    """Return the dense blocks in the same layers as the block `key`."""
    layers = {site.layer for site in captured.sites_of(key)}
    return [s.block for s in captured.sites if s.layer in layers and kinds.get(s.block) == "dense"]


def _joined(words: Iterator[str]) -> str:
    return "; ".join(dict.fromkeys(words))


def _judged(row: Family, captured: CapturedModel, matches: Matches, rewrites: Sequence[BlockRewrite]) -> Family:
    """Return the verdicts on experts, routing and attention, with the reason for each that is not `matched`."""
    by_block: dict[str, list[Match]] = {}
    for found in matches.matches:
        by_block.setdefault(found.block, []).append(found)
    experts = _experts_verdict(captured, rewrites)
    routing = _routing_verdict(captured, by_block, matches) if experts == MATCHED else experts
    attention, kinds = _attention_verdict(captured, by_block, matches)
    verdicts = (experts, routing, attention)
    told = [v.removeprefix("opaque: ") for v in verdicts if v not in (MATCHED, NONE)]
    near = [words for words in (v.partition(NEAREST)[2] for v in verdicts) if words]
    return replace(
        row, experts=experts, routing=routing, attention=attention, attention_kinds=kinds,
        near_miss=near[0] if near else "", reasons=tuple(dict.fromkeys((*told, *row.reasons))),
    )  # fmt: skip


def _experts_verdict(captured: CapturedModel, rewrites: Sequence[BlockRewrite]) -> str:
    rewritten = {(r.block, a.node) for r in rewrites for a in r.actions if a.target.takes_experts}
    graphs = [(b, b.graph) for b in captured.blocks if b.graph is not None]
    opaque = [
        b
        for b in captured.blocks
        if b.graph is None and not b.opaque.startswith(PLAIN) and not describe.is_mixer(b.class_name)
    ]
    nodes = [(b, node.name) for b, graph in graphs for node in describe.experts_nodes(graph)]
    left = [b for b, name in nodes if (b.key, name) not in rewritten]
    if opaque:
        return f"opaque: `{opaque[0].class_name}` could not be captured: {opaque[0].opaque}"
    if left:
        return f"opaque: no rule rewrites the experts of `{left[0].class_name}`"
    if nodes:
        return MATCHED
    if captured.facts["experts"]:
        return "opaque: no captured block has an experts operator: the experts run as the model's own code"
    return NONE


def _routing_verdict(captured: CapturedModel, by_block: Mapping[str, list[Match]], matches: Matches) -> str:
    """Return whether the pattern of a whole MoE block (role `moe`) found every block with experts."""
    for block in captured.blocks:
        if block.graph is None or not describe.experts_nodes(block.graph):
            continue
        if not any(_role(found.root) in MOE for found in by_block.get(block.key, ())):
            return f"opaque: the routing of `{block.class_name}` stays its own code{_nearest(block, matches, MOE)}"
    return MATCHED


def _attention_verdict(
    captured: CapturedModel, by_block: Mapping[str, list[Match]], matches: Matches
) -> tuple[str, tuple[str, ...]]:
    """Return the verdict over all softmax attention, and the kind of each distinct mixer in words."""
    verdict, kinds = NONE, list[str]()
    for block in captured.blocks:
        if block.graph is None:
            if not describe.is_mixer(block.class_name):
                continue
            if block.opaque.startswith(PLAIN):
                kinds.append(f"linear (`{block.class_name}`)")
            else:
                kinds.append(f"opaque (`{block.class_name}`)")
                verdict = f"opaque: `{block.class_name}` could not be captured: {block.opaque}"
            continue
        kind = describe.kind_of(block.graph, block.class_name)
        if any(ops.operator(node) == "recurrence" for node in nodes_of(block.graph)):
            kinds.append(f"recurrent (`{block.class_name}`)")
        elif kind == "linear attention":
            kinds.append(f"linear (`{block.class_name}`)")
        if kind != "attention":
            continue
        found = next((m for m in by_block.get(block.key, ()) if _role(m.root) in ATTENTION), None)
        if found is None:
            kinds.append(f"own code (`{block.class_name}`)")
            verdict = f"opaque: `{block.class_name}` fits no attention pattern{_nearest(block, matches, ATTENTION)}"
        else:
            kinds.append(describe.attention_words(block.graph, latent=_role(found.root) == "mla"))
            verdict = MATCHED if verdict == NONE else verdict
    return verdict, tuple(dict.fromkeys(kinds))


def _role(pattern: str) -> str:
    """Return the role of a pattern; one that chooses between patterns has theirs."""
    found = rules(PROGRAMS[0]).patterns.get(pattern)
    if found is None or found.declaration.role is not None:
        return found.declaration.role.text if found and found.declaration.role else ""
    home, terms = pattern.rpartition(".")[0], [binding.term for binding in found.declaration.bindings]
    choices = (choice for term in terms if isinstance(term, syntax.Alternatives) for choice in term.choices)
    named = (choice.callee[-1] for choice in choices if isinstance(choice, syntax.Call))
    return next((role for name in named if (role := _role(f"{home}.{name}"))), "")


def _nearest(block: BlockGraph, matches: Matches, roles: Collection[str]) -> str:
    near = [m for m in matches.near_misses if m.block == block.key and _role(m.pattern) in roles]
    return f"{NEAREST}{max(near, key=lambda miss: miss.matched)}" if near else ""


# proofs --------------------------------------------------------------------------------------------------------------
def _proven(
    captured: CapturedModel, blocks: Sequence[RewrittenBlock], proof_twin: ProofTwin
) -> tuple[tuple[BlockProof, ...], Mapping[str, tuple[str, str]]]:
    """Return the proof of each rewrite, and the blocks that a compilation leaves as they are.

    An exception becomes the failure of each.
    """
    names = [captured.block(block.rewrite.block).class_name for block in blocks]
    try:
        proofs = prove_on(proof_twin, captured, blocks, HOST)
    except Exception as error:  # noqa: BLE001 - a failing proof is a row; the census continues
        failure = _words(error)
        left = {block.rewrite.block: ("P301", failure) for block in blocks}
        return tuple(
            BlockProof(_part(block), block.rewrite.key, name, failure=failure)
            for block, name in zip(blocks, names, strict=True)
        ), left
    found = (
        BlockProof(_part(b), p.rewrite, p.class_name, p.forward, p.gradients, p.holds, "" if p.compared else reason(p))
        for b, p in zip(blocks, proofs, strict=True)
    )
    return tuple(found), refuted(proofs)


def _part(block: RewrittenBlock) -> Component:
    return "experts" if any(action.target.takes_experts for action in block.rewrite.actions) else "attention"


def _wrong_words(proof: BlockProof) -> str:
    worst = max(proof.gradients, key=lambda name: proof.gradients[name], default="")
    gradient = f", worst gradient {proof.gradients[worst]:.1e} ({worst})" if worst else ""
    return (
        f"WRONG: the rewrite of `{proof.class_name}` differs from the original: forward {proof.forward:.1e}{gradient}"
    )


def _wrong_twin(proof: TwinProof) -> str:
    what = [f"logits {proof.logits:.1e}"] if proof.logits else []
    what += ["other greedy tokens"] if proof.tokens is False else []
    worst = max(proof.gradients, key=lambda name: proof.gradients[name], default="")
    what += [f"worst LoRA gradient {proof.gradients[worst]:.1e} ({worst})"] if worst else []
    what += [proof.difference] if proof.difference else []
    return f"WRONG: the whole twin of `{proof.program}` differs from stock: {', '.join(what)}"


def _words(error: BaseException) -> str:
    """Return an error's message in one line."""
    if isinstance(error, KtcError):
        first = error.diagnostics[0]
        return f"{first.code}: {first.message}" + f" ({first.hint})" * bool(first.hint)
    return in_a_line(error)
