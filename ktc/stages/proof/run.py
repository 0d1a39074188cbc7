"""Prove every distinct rewrite: what the loader realises, beside the stock modules, at every site of a twin.

Input: a captured model and its rewritten blocks. Output: a `Proof` for each, which says where it does not hold. Sites
that run the same code with the same settings and constants share the long list of cases; each has the short one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ktc.diagnostics import KtcError, ProofFailed
from ktc.foundation.host import Host
from ktc.foundation.stage_progress import counted
from ktc.model.compare.comparison import Comparison, decided
from ktc.model.compare.copies import copied
from ktc.model.loading.graph_block import modules_forgotten
from ktc.stages.capture import CapturedModel
from ktc.stages.proof.cases import (
    ALWAYS,
    SCALES,
    Call,
    Case,
    long_cases,
    other_experts_cases,
    overflow_cases,
    record,
    scaled,
    short_cases,
)  # fmt: skip
from ktc.stages.proof.compare import Constants, compare_blocks, computes_otherwise_in_double, replaced_code
from ktc.stages.proof.twins import (
    SEED,
    ProofTwin,
    SmallRewrite,
    carried_over,
    depends_on_sizes,
    does_not_run,
    one_thread,
    realised,
    twin_of_model,
)  # fmt: skip
from ktc.stages.proof.types import TOLERANCE, Constant, Proof
from ktc.stages.proof.whole import whole_difference
from ktc.stages.rewrite import RewrittenBlock


def prove(captured: CapturedModel, blocks: Sequence[RewrittenBlock], host: Host) -> tuple[Proof, ...]:
    """Return the proof of every rewrite, valid or not. Raises ProofFailed (P302) if the twin does not run.

    Code with numbers that depend on a size is compared on a second twin of other sizes too.
    """
    if not blocks:
        return ()
    twin = twin_of_model(captured)
    proofs = prove_on(twin, captured, blocks, host)
    sized = [
        block
        for block, proof in zip(blocks, proofs, strict=True)
        if proof.holds and depends_on_sizes(captured, block, twin)
    ]
    if not sized:
        return proofs
    try:
        second = prove_on(twin_of_model(captured, second=True), captured, sized, host)
    except KtcError as error:
        why = f"it has numbers that depend on sizes, and no second twin: {error.diagnostics[0].message}"
        second = tuple(replace(p, compared=False, difference=why) for p in proofs if p.rewrite in _keys(sized))
    again = {proof.rewrite: proof for proof in second if not proof.holds}
    return tuple(again.get(proof.rewrite, proof) for proof in proofs)


def _keys(blocks: Sequence[RewrittenBlock]) -> set[str]:
    return {block.rewrite.key for block in blocks}


def prove_on(
    twin: ProofTwin, captured: CapturedModel, blocks: Sequence[RewrittenBlock], host: Host
) -> tuple[Proof, ...]:
    """`prove` on a twin that exists already, which does not change."""
    before, twin = twin, replace(twin, model=copied(twin.model))  # blocks may count their calls
    carried = [carried_over(captured, block, twin) for block in blocks]
    with one_thread(), modules_forgotten():
        sites = {site.fqn for small in carried for block in small.blocks for site in block.rewrite.sites}
        try:
            calls = record(twin.model, sorted(sites), SEED)
        except Exception as error:  # foreign code on an unusual config raises anything
            raise ProofFailed(does_not_run(error)) from error
        model, refused = realised(twin, [small for small in carried if not small.failure], host)
        pair = _Pair(twin, model, carried, host)
        proofs = tuple(_proof(captured, small, refused, pair, calls) for small in counted(carried, len(carried)))
        return _as_a_whole(before, carried, proofs, host)


def _as_a_whole(
    twin: ProofTwin, carried: Sequence[SmallRewrite], proofs: Sequence[Proof], host: Host
) -> tuple[Proof, ...]:
    """Return the proofs, refuted where the whole model differs with that rewrite alone, or with all that hold."""
    holding = [small for small, proof in zip(carried, proofs, strict=True) if proof.holds]
    error, difference = _whole(twin, holding, host) if holding else (0.0, "")
    if not difference:
        return tuple(proofs)
    alone = {small.of.rewrite.key: _whole(twin, [small], host) for small in holding}
    if not any(difference for _, difference in alone.values()):
        alone = dict.fromkeys(alone, (error, difference))
    judged = ((proof, *alone.get(proof.rewrite, (0.0, ""))) for proof in proofs)
    return tuple(
        replace(proof, forward=max(proof.forward, error), difference=difference) if difference else proof
        for proof, error, difference in judged
    )


def _whole(twin: ProofTwin, rewrites: Sequence[SmallRewrite], host: Host) -> tuple[float, str]:
    def in_double() -> tuple[PreTrainedModel, PreTrainedModel]:
        wide = _as_stock_runs(twin)
        wide.model.double()
        return wide.model, realised(wide, rewrites, host)[0]

    stock = _as_stock_runs(twin)
    return whole_difference(stock.model, realised(stock, rewrites, host)[0], SEED, in_double)


def _as_stock_runs(twin: ProofTwin) -> ProofTwin:
    """Return a copy whose experts run by the implementation that stock chooses, which blocks that stay keep."""
    model = copied(twin.model)
    model.set_experts_implementation(twin.experts)
    return replace(twin, model=model)


def refuted(proofs: Sequence[Proof]) -> dict[str, tuple[str, str]]:
    """Return the blocks whose rewrites do not hold, by key: the code of the finding (P300, P301) and the reason."""
    return {proof.block: ("P300" if proof.compared else "P301", reason(proof)) for proof in proofs if not proof.holds}


def reason(proof: Proof) -> str:
    """Return in words why a proof does not hold."""
    if not proof.compared:
        return f"cannot be proven: {proof.difference}"
    worst = max(proof.gradients, key=lambda name: proof.gradients[name], default="")
    gradient = f", gradient of {worst} {proof.gradients[worst]:.1e}" if worst else ""
    errors = f"forward {proof.forward:.1e}{gradient}, allowed {proof.tolerance:.0e}"
    return f"computes something else than stock{f' ({proof.difference})' * bool(proof.difference)}: {errors}"


@dataclass(slots=True)
class _Pair:
    """The stock twin and the realised one, and both in fp64 once that is needed."""

    twin: ProofTwin
    realised: PreTrainedModel
    rewrites: Sequence[SmallRewrite]
    host: Host
    _double: tuple[PreTrainedModel, PreTrainedModel] | None = field(default=None)
    _implementation: str = "eager"

    def at(self, fqn: str) -> tuple[nn.Module, nn.Module]:
        return self.twin.model.get_submodule(fqn), self.realised.get_submodule(fqn)

    @contextmanager
    def implemented_by(self, experts: str) -> Generator[None]:
        """Run the stock experts in both precisions by another implementation than the eager one."""
        try:
            self._set(experts)
            yield
        finally:
            self._set("eager")

    def _set(self, experts: str) -> None:
        self._implementation = experts
        for model in (self.twin.model, *(() if self._double is None else self._double[:1])):
            model.set_experts_implementation(experts)

    def in_double(self, fqn: str) -> tuple[nn.Module, nn.Module]:
        if self._double is None:
            stock = copied(self.twin.model).double()
            wide = ProofTwin(self.twin.captured, stock, self.twin.experts)
            self._double = stock, realised(wide, [r for r in self.rewrites if not r.failure], self.host)[0]
            stock.set_experts_implementation(self._implementation)
        return self._double[0].get_submodule(fqn), self._double[1].get_submodule(fqn)


@dataclass(slots=True)
class _Findings:
    """The findings of the comparisons of one rewrite."""

    forward: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict[str, float])
    cases: dict[str, None] = field(default_factory=dict[str, None])
    difference: str = ""

    def add(self, fqn: str, case: Case, compared: Comparison) -> None:
        if compared.raised:
            self.difference = f"it raises {compared.raised} at `{fqn}`, {case.name}"
            self.forward = compared.worst
        if compared.raised or compared.refused:
            return
        self.cases[case.name] = None
        for name, error in compared.errors.items():
            if error > TOLERANCE and not self.difference:
                self.difference = f"{name} at `{fqn}`, {case.name}"
            if name.startswith("gradient of "):
                of = name.removeprefix("gradient of ")
                self.gradients[of] = max(self.gradients.get(of, 0.0), error)
            else:
                self.forward = max(self.forward, error)


def _proof(
    captured: CapturedModel, small: SmallRewrite, refused: Mapping[str, str], pair: _Pair,
    calls: Mapping[str, Sequence[tuple[str, Call]]],
) -> Proof:  # fmt: skip
    rewrite = small.of.rewrite
    rules = tuple(dict.fromkeys(action.rule for action in rewrite.actions))
    sites = tuple(site.fqn for site in rewrite.sites)
    failure = small.failure or refused.get(rewrite.key, "")
    findings, constants = _Findings(), list[Constant]()
    if not failure:
        factor = SCALES[0]
        for fqn, leading in _sites(small):
            if leading:
                met, factor = _compare_long(fqn, pair, calls[fqn], findings)
                constants += met
            else:
                larger = scaled(calls[fqn], factor)
                _compare(fqn, pair, [*short_cases(calls[fqn]), *([larger] if larger else [])], findings)
            if findings.difference:
                break
        if not findings.cases and not findings.difference:
            called = any(calls[fqn] for fqn in sites)
            failure = "stock code raises on every input" if called else "the small twin never calls the block"
    together = _together(constants)
    if not failure and not findings.difference:
        failure = _unproven(together)
    return Proof(
        rewrite.key, rewrite.block, captured.block(rewrite.block).class_name, rules, sites, findings.forward,
        findings.gradients, tuple(findings.cases), together, SEED, TOLERANCE, failure or findings.difference,
        compared=not failure,
    )  # fmt: skip


def _sites(small: SmallRewrite) -> Iterator[tuple[str, bool]]:
    """Yield every site of a rewrite, and whether it has the long list of cases: the last of equal ones has."""
    for block in small.blocks:
        *others, last = block.rewrite.sites
        yield last.fqn, True
        yield from ((site.fqn, False) for site in others)


def _compare_long(
    fqn: str, pair: _Pair, calls: Sequence[tuple[str, Call]], findings: _Findings
) -> tuple[tuple[Constant, ...], float]:
    """Compare the long cases, then larger and larger hidden states until values are on both sides of every constant.

    Returns the constants, and the largest factor of hidden states that was needed to meet one.
    """
    stock, rewritten = pair.at(fqn)
    replaced = replaced_code(stock, rewritten)
    with Constants() as met:
        for case in long_cases(calls, SEED):
            if not case.poisoned:
                _forward_alone(stock, case, met, replaced)
    _compare(fqn, pair, long_cases(calls, SEED), findings)
    before, needed = met.counted, SCALES[0]
    for factor in SCALES:
        if factor not in ALWAYS and all(constant.met for constant in before):
            continue
        case = scaled(calls, factor)
        if case is None:
            break
        with met:
            _forward_alone(stock, case, met, replaced)
        newly = met.counted != before and _newly_met(before, met.counted)
        needed = factor if newly else needed
        if newly or factor in ALWAYS:
            _compare(fqn, pair, [case], findings)
        before = met.counted
    if replaced:
        _compare(fqn, pair, overflow_cases(calls), findings)
    chosen = pair.twin.experts  # the implementation of experts that the stock model chooses itself
    if chosen not in ("eager", ""):
        with pair.implemented_by(chosen):
            _compare(fqn, pair, other_experts_cases(calls, chosen), findings)
    return before, needed


def _newly_met(before: Sequence[Constant], after: Sequence[Constant]) -> bool:
    known = {_key(constant) for constant in before if constant.met}
    return any(constant.met and _key(constant) not in known for constant in after)


def _key(constant: Constant) -> tuple[str, float, bool]:
    return constant.operator, constant.value, constant.replaced


def _forward_alone(stock: nn.Module, case: Case, constants: Constants, replaced: Sequence[str]) -> None:
    """Run a copy of the stock block for its comparisons with constants. The comparison reports what it raises."""
    call, stock = case.call.fresh(), copied(stock)
    try:
        with torch.no_grad(), constants.replacing(map(stock.get_submodule, replaced)):
            stock(*call.args, **call.kwargs)
    except Exception:  # noqa: BLE001 - foreign code, which the comparison runs again
        pass


def _compare(fqn: str, pair: _Pair, cases: Iterable[Case], findings: _Findings) -> None:
    """Compare the cases one after another until one differs."""
    for case in cases:
        if findings.difference:
            return
        findings.add(fqn, case, _compared(fqn, pair, case))


def _compared(fqn: str, pair: _Pair, case: Case) -> Comparison:
    """Return the comparison in fp32, or in fp64 where rounding may explain the errors in fp32.

    Stock code that computes something else in fp64 explains nothing: it may read the dtype, or branch on an overflow.
    """

    def compared(stock: nn.Module, rewritten: nn.Module) -> Comparison:
        return compare_blocks(stock, rewritten, case, SEED)

    stock, rewritten = pair.at(fqn)
    single = compared(stock, rewritten)
    if case.poisoned:
        return single
    exact = decided(single, compared, lambda: pair.in_double(fqn))
    if exact is single or exact.raised:
        return exact
    return single if computes_otherwise_in_double(stock, pair.in_double(fqn)[0], case, SEED) else exact


def _together(constants: Sequence[Constant]) -> tuple[Constant, ...]:
    """Return each constant once, with the counts of all sites."""
    counts: dict[tuple[str, float, bool], tuple[int, int]] = {}
    for constant in constants:
        below, above = counts.get(_key(constant), (0, 0))
        counts[_key(constant)] = below + constant.below, above + constant.above
    return tuple(Constant(name, value, *sums, replaced) for (name, value, replaced), sums in counts.items())


def _unproven(constants: Sequence[Constant]) -> str:
    """Return in words a constant of replaced code that no input was beyond, "" if there is none."""
    for constant in constants:
        if constant.unproven:
            operator = f"`{constant.operator}`"
            return f"its code compares with {constant.value:g} ({operator}), and no input is on both sides of it"
    return ""
