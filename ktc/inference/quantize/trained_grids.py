"""The weights that training rounded, and whether a merge may round them again.

In: the record of an adapter (`adapter_ktc.json`), or the recipe of a compiled model where an adapter has none. Out: by
module, the grid, and what was rounded: a frozen base, to which the adapter is added exactly, or the sums that a merge
writes.
Refused: a merge that rounds again without a request for it (Q505), and another scheme or other modules than those of
training (Q506).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.foundation.module_paths import is_inside
from ktc.inference.quantize.scheme import Scheme
from ktc.model.loading.trained_beside import MERGED, STORED, TRAINED, rounded_modules
from ktc.model.manifest import manifest as compiled

_BESIDE = "use the adapter beside the INT4 model, or accept the drift that is reported: `--requantize-merged`"


@dataclass(frozen=True, slots=True)
class Rounded:
    """The grid of a module's weights, as `Int4Grid` writes it. `is_frozen`: the adapter was apart; `by`: who says so"""

    grid: str
    is_frozen: bool
    by: str


def rounded_in_training(model: Path, adapter: Path | None) -> Mapping[str, Rounded]:
    """Return what training rounded, by the module's FQN. Raises InputRefused (A602) for a damaged record."""
    recorded = None if adapter is None else rounded_modules(adapter)
    if adapter is None or recorded is None:
        return _of_program(model)
    modules: dict[str, Rounded] = {}
    for path, words in recorded.items():
        if not words.endswith(STORED):
            grid = words.removesuffix(MERGED).removesuffix(TRAINED)
            modules[path] = Rounded(grid, grid == words, f"training with `{adapter.name}`")
    return modules


def _of_program(model: Path) -> Mapping[str, Rounded]:
    rewrites = compiled.read_manifest(model).rewrites if (model / compiled.FILE).is_file() else ()
    return {
        rewrite.fqn: Rounded(grid, not (rewrite.args.get("merged") or rewrite.args.get("masters")), f"`{rewrite.rule}`")
        for rewrite in rewrites
        if (grid := str(rewrite.args.get("grid") or ""))
    }


def merged_grid(rounded: Mapping[str, Rounded], hint: str = _BESIDE) -> str:
    """Return the grid of the sums or trained weights that a merge writes, "" for none.

    Raises InputRefused (Q505) where a frozen base was rounded, to which the adapter is added exactly.
    """
    frozen = next(((path, module) for path, module in rounded.items() if module.is_frozen), None)
    if frozen is not None:
        raise InputRefused(rounds_again(f"weights that {frozen[1].by} rounded at `{frozen[0]}`", hint))
    return " and ".join(dict.fromkeys(module.grid for module in rounded.values()))


def require_trained_grid(rounded: Mapping[str, Rounded], taken: Collection[str], scheme: Scheme, modules: str) -> None:
    """Compare the modules `taken`, which a merge rounds, with those of training. Raises InputRefused (Q505, Q506)."""
    grid = merged_grid(rounded)
    if grid and grid != scheme.grid:
        message = f"training rounded weights to `{grid}`, and the scheme `{scheme.name}` is `{scheme.grid}`"
        raise InputRefused(Diagnostic("Q506", message, hint="use the scheme of the program, or `ktc merge` alone"))
    if not rounded:
        return
    more = [path for path in taken if not any(is_inside(path, module) for module in rounded)]
    less = [path for path in rounded if not any(is_inside(module, path) for module in taken)]
    if more or less:
        what = f"did not round {listing(more, 2)}" if more else f"rounded {listing(less, 2)} too"
        message = f"training {what}, and `--modules {modules}` {'does' if more else 'does not'}"
        raise InputRefused(Diagnostic("Q506", message, hint="`--modules trained` rounds what training rounded"))


def rounds_again(weights: str, hint: str = _BESIDE) -> Diagnostic:
    """Return the refusal (Q505) of a merge with weights that were rounded before."""
    message = f"the adapter was trained beside {weights}, and a merge rounds the sum of both again"
    return Diagnostic("Q505", message, hint=hint)
