"""Facts about a core that sparse attention needs, and the bytes of its steps."""

from __future__ import annotations

from ktc.model.attention.sparsity import Sparsity, Traffic
from ktc.model.attention.step_index import unfit_width
from ktc.model.graph import ops
from ktc.model.graph.latent import is_latent, latent_operands
from ktc.model.hf.indexer import has_indexer, positions_of_indexer
from ktc.model.hf.latent_cache import caches_latents
from ktc.model.targets.node_plan import CapturedNode

_MANY = 1 << 24  # positions, beyond any budget


def not_sparse(seen: CapturedNode) -> str:
    """Return why a core cannot be sparse, "" if it can."""
    core, stock, options = seen.core, seen.stock, ops.attributes(seen.core)
    used = [words for name, words in (("softcap", "soft cap"), ("bias", "position bias")) if options[name]]
    if used:
        return f"its scores have a {used[0]}"
    if int(options["window"]) >= 0:
        return f"it has a sliding window of {options['window']} positions"
    if not is_latent(core):
        if caches_latents(type(stock)):
            return "its keys are expanded from latents; match it by `attn.mla`"
        if has_indexer(stock):
            return "an indexer of its own chooses what it reads, and it has no latents"
        if options["mask"]:
            return "the block computes with a mask of its own"
        return "" if options["causal"] else "it is not causal"
    if not caches_latents(type(stock)):
        return f"`{type(stock).__name__}` caches keys and values, and no latents"
    if options["mask"] and not positions_of_indexer(stock):
        return "the block computes with a mask of its own"
    if not options["causal"] and not options["mask"]:
        return "it is not causal"
    return latent_operands(core).reason


def unfit_keys(seen: CapturedNode) -> str:
    """Return why keys of a core have no index in recorded steps on a GPU, "" if they can."""
    if is_latent(seen.core):
        operands = latent_operands(seen.core)
        return unfit_width(operands.rank, operands.rope)
    return unfit_width(int(ops.shape_of(seen.core.args[1])[-1]))


def index_bytes(seen: CapturedNode, sparsity: Sparsity) -> int:
    """Return the bytes of the index for one position of a sequence. A trained indexer has its own."""
    if positions_of_indexer(seen.stock):
        return 0
    return traffic(seen, sparsity, _MANY).index // _MANY


def traffic(seen: CapturedNode, sparsity: Sparsity, positions: int) -> Traffic:
    """Return the bytes of a step of one sequence."""
    core, element = seen.core, seen.dtype.itemsize
    heads = int(ops.shape_of(core.args[0])[1])
    if is_latent(core):
        operands = latent_operands(core)
        width = operands.rank + operands.rope
        return sparsity.traffic(positions, heads, 1, width * element, width)
    key, value = (ops.shape_of(core.args[at]) for at in (1, 2))
    row_bytes = (int(key[-1]) + int(value[-1])) * element
    return sparsity.traffic(positions, heads, int(key[1]), row_bytes, int(key[-1]))
