"""One mutant: a change of a value between two stages, or of what the loader puts in place.

In: the model's name, the kind of change, the change. Out: `verdict`, which proves the changed model. A change of
nothing is an error of the mutant, not a survivor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

from torch import fx, nn

from ktc.diagnostics import KtcError
from ktc.model.manifest.manifest import Rewrite
from ktc.stages.proof import Proof, reason
from ktc.stages.proof import twins as loader
from mutants.models import Twin, analysed, twin_of

Kind = Literal["recipe", "recognised", "graph", "module", "weights"]
Recipe = tuple[Rewrite, ...]


class NoChange(Exception):
    """The mutant found nothing to change in its model."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`change` by kind:

    `recipe` takes and returns the rows; `recognised` returns a context inside of which the model is captured and
    planned; `graph` changes a rewritten graph in place. `module` changes the modules that the loader made, and returns
    whether there are any. `weights` damages a copy of OUT. `equivalent` is why the change alters no result, or why that
    is not proven; "" for one that has to be noticed.
    """

    name: str
    model: str
    kind: Kind
    change: Callable[..., Any]
    equivalent: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`by` is what noticed the mutant: the proof, `ktc prove`, or a stage that refuses it; "" for nothing."""

    by: Literal["proof", "prove", "stage", ""]
    told: str = ""


def verdict(mutant: Mutant) -> Verdict:
    """Return what the proof says about a model with this mutant. Raises NoChange."""
    try:
        if mutant.kind == "recognised":
            with mutant.change():
                twin = analysed(mutant.model)
            proofs = twin.proofs()
            if left := _sites(twin_of(mutant.model)) - _sites(twin):
                return Verdict("stage", f"`{min(left)}` keeps its own code")
        else:
            twin = twin_of(mutant.model)
            with _between(mutant):
                proofs = twin.proofs()
    except KtcError as error:
        return Verdict("stage", f"{error.diagnostics[0].code}: {error.diagnostics[0].message}")
    except NoChange:
        raise
    except Exception as error:  # noqa: BLE001 - an invariant of any stage, which a compilation reports as a bug of ktc
        return Verdict("stage", f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return _of(proofs)


def _sites(twin: Twin) -> set[str]:
    return {site.fqn for block in twin.blocks for site in block.rewrite.sites}


def _of(proofs: Sequence[Proof]) -> Verdict:
    wrong = next((proof for proof in proofs if not proof.holds), None)
    return Verdict("") if wrong is None else Verdict("proof", f"{wrong.class_name}: {reason(wrong)}")


@contextmanager
def _between(mutant: Mutant) -> Iterator[None]:
    """Put the change between the stages of the proof's twin. Raises NoChange if it was of nothing."""
    changed: list[bool] = []
    patches: dict[str, AbstractContextManager[Any]] = {
        "recipe": mock.patch.object(loader, "recipe", _rows(mutant, changed)),
        "graph": mock.patch.object(loader, "rewrite_block", _graph(mutant, changed)),
        "module": mock.patch.object(loader, "realise", _realised(mutant, changed)),
    }
    with patches.get(mutant.kind, nullcontext()):
        yield
    if not any(changed):
        raise NoChange(mutant.name)


def _rows(mutant: Mutant, changed: list[bool]) -> Callable[..., Recipe]:
    stock = loader.recipe

    def recipe(*args: Any) -> Recipe:
        rows = stock(*args)
        new = tuple(mutant.change(rows))
        changed.append(new != rows)
        return new

    return recipe


def _graph(mutant: Mutant, changed: list[bool]) -> Callable[..., fx.GraphModule]:
    stock = loader.rewrite_block

    def rewrite_block(*args: Any) -> fx.GraphModule:
        graph = stock(*args)
        before = str(graph.graph)
        mutant.change(graph)
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        graph.recompile()
        changed.append(str(graph.graph) != before)
        return graph

    return rewrite_block


def _realised(mutant: Mutant, changed: list[bool]) -> Callable[..., None]:
    stock = loader.realise

    def realise(model: nn.Module, steps: Recipe, *rest: object, **named: Any) -> None:
        stock(model, steps, *rest, **named)  # type: ignore[arg-type]
        places = [model.get_submodule(step.fqn) for step in steps if step.module != "graph_block"]
        changed.append(bool(mutant.change(places)))

    return realise
