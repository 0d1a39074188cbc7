"""The values of the stages -> the `Package` that is written. Nothing is decided here."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from ktc.foundation.host import Host
from ktc.foundation.isa import PREFERENCE
from ktc.model.hf.private_api import read_as_experts
from ktc.model.hf.stock_model import has_towers, left_out_bytes
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.model.manifest.assumptions import NO_ASSUMPTIONS, Assumptions
from ktc.model.manifest.manifest import Rewrite
from ktc.model.manifest.stock_facts import assumptions_of
from ktc.stages.analysis import Analysis
from ktc.stages.capture import CapturedModel
from ktc.stages.capture.model import build_on_meta
from ktc.stages.codegen.render import KernelSource
from ktc.stages.link.adapter import adapter_json
from ktc.stages.link.package import KernelFile, Package
from ktc.stages.link.rules import rule_files
from ktc.stages.link.stages import STAGES, dump_stage
from ktc.stages.pictures.dump import to_json
from ktc.stages.plan.report import plan_json
from ktc.stages.proof import Proof
from ktc.stages.rewrite import block_files, linear_steps, recipe, stack_rows


def assemble(
    analysis: Analysis,
    settings: Mapping[str, str],
    proofs: Sequence[Proof],
    source: KernelSource,
    library: KernelLibrary | None,
) -> Package:
    """Return everything that goes into OUT, as text and plain values."""
    captured, rules, plan, blocks = analysis.captured, analysis.ruleset, analysis.plan, analysis.blocks
    assert captured.source.folder is not None, "only a model with a folder is compiled"
    units = {unit.name.removesuffix(".cpp"): unit for unit in source.units}
    builds = {} if library is None else dict(library.builds)
    steps = (*recipe(blocks, plan.host), *linear_steps(plan))
    return Package(
        name=captured.source.name,
        checkpoint=captured.source.folder,
        class_name=type(captured.model).__name__,
        dtype=str(captured.model.dtype).removeprefix("torch."),
        weights=stack_rows(analysis.weights.sources, blocks),
        rules=PurePosixPath(rules.entry).name,
        settings=settings,
        rule_files=rule_files(rules.sources, rules.entry),
        host=host_json(plan.host),
        isa=min((spec.isa for spec in plan.kernels), key=PREFERENCE.index, default="scalar"),  # the most demanding
        plan=plan_json(plan),
        kernels=tuple(KernelFile(s.entry, asdict(s), units[s.entry].text, builds[s.entry]) for s in source.specs),
        bindings=units["bindings"].text if library is not None else "",
        library=library.path if library is not None else None,
        rewrites=steps,
        assumptions=_assumptions(captured, steps),
        placement={p.fqn: p.device for p in plan.placements} | {stream.fqn: "cpu" for stream in plan.streams},
        memory={device.device: device.weights for device in plan.devices},
        cuda_graph=plan.cuda_graph,
        processes=plan.processes,
        has_towers=has_towers(captured.model),
        left_out_bytes=left_out_bytes(captured.model, captured.source.config),
        model_type=captured.source.config.model_type,
        lora=plan.lora and adapter_json(plan.lora, read_as_experts(str(captured.model.config.model_type))),
        proofs=tuple(proof.to_json() for proof in proofs),
        own_code=captured.source.own_code,
        code=captured.source.code,
        blocks=block_files(captured, blocks),
        graphs={stage: to_json(dump_stage(stage, captured, analysis.matches, plan, blocks)) for stage in STAGES},
    )


def _assumptions(captured: CapturedModel, steps: Sequence[Rewrite]) -> Assumptions:
    """Examine a new model, as a load does: what capture ran may have changed its own attributes."""
    return assumptions_of(build_on_meta(copy.deepcopy(captured.source.config)), steps) if steps else NO_ASSUMPTIONS


def host_json(host: Host) -> dict[str, Any]:
    """Return the host as the manifest records it."""
    return {**asdict(host), "isas": list(host.isas), "features": sorted(host.features)}
