"""The options of `ktc bench moe`: from the typed words to a `Request`. Refused: invalid options (U030).

Implementations may be named one by one or by group: `ktc` (every format that the instruction sets multiply), `hf`,
`kt`, `all`. A run includes only the named ones; a missing named one ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ktc.diagnostics import Diagnostic, InputRefused, listing, suggest
from ktc.foundation import environment, host
from ktc.foundation.formats import FORMATS
from ktc.foundation.isa import Isa
from ktc.model.experts.lora import MAX_RANK
from ktc.model.kernels.kernel_spec import KERNELS
from ktc.tools.bench import kt, ours, peers
from ktc.tools.bench.request import PASSES, SHAPES, Pass, Request, Shape

T = TypeVar("T")

DEFAULT_IMPLS = ("ktc_bf16", *peers.HF, peers.DENSE, kt.PREFIX)
_CUSTOM = "custom"
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Typed:
    """The words of the command line; lists are comma-separated."""

    shape: str = "v2lite"
    hidden: int | None = None
    intermediate: int | None = None
    experts: int | None = None
    top_k: int | None = None
    tokens: str = "1,32,512"
    passes: str = "forward"
    impls: str = ""
    lora_ranks: str = "0"
    isas: str = ""
    threads: int = 1
    rounds: int = 0
    kt_python: Path | None = None


def parse(typed: Typed) -> Request:
    """Return the request. Raise InputRefused (U030, H211) and HostLacks (H210)."""
    shape, isas = _shape(typed), _isas(typed.isas)
    _require_threads(typed.threads)
    asked = tuple(dict.fromkeys(each for word in _words(typed.impls) for each in _group(word, isas)))
    impls = asked or DEFAULT_IMPLS
    if typed.kt_python is not None and not {*impls} & {*kt.NAMES}:
        raise _refused("`--kt-python` is for kt_kernel, which `--impl` leaves out")
    for word in _words(typed.impls):
        _require_even(shape, word)
    passes: tuple[Pass, ...] = tuple(_one_of("--pass", word, PASSES) for word in _words(typed.passes))
    return Request(
        shape,
        tokens=_numbers("--tokens", typed.tokens, 1, _MAX_TOKENS),
        passes=_some("--pass", passes),
        impls=impls,
        required=frozenset(_words(typed.impls)),
        lora_ranks=_numbers("--lora-rank", typed.lora_ranks, 0, MAX_RANK),
        isas=isas,
        threads=typed.threads,
        rounds=typed.rounds,
        kt_python=typed.kt_python,
    )


def _require_threads(threads: int) -> None:
    """Raise InputRefused for more threads than this process may use: limits and peers would run on more."""
    usable = max(1, host.usable_threads() // environment.local_world_size())
    if threads > usable:
        raise _refused(f"`--threads {threads}` is more than the {usable} that this process may use")


def _shape(typed: Typed) -> Shape:
    sizes = {"--hidden": typed.hidden, "--intermediate": typed.intermediate, "--top-k": typed.top_k}
    if typed.shape == _CUSTOM:
        missing = [name for name, size in {**sizes, "--experts": typed.experts}.items() if size is None]
        if missing:
            raise _refused(f"`--shape {_CUSTOM}` needs {', '.join(f'`{name}`' for name in missing)}")
        return _possible(
            Shape(_CUSTOM, typed.hidden or 0, typed.intermediate or 0, typed.experts or 0, typed.top_k or 0)
        )
    shape = SHAPES[_one_of("--shape", typed.shape, (*SHAPES, _CUSTOM))]
    given = [name for name, size in sizes.items() if size is not None]
    if given:
        raise _refused(f"`{given[0]}` is for `--shape {_CUSTOM}`; `{shape.name}` has its own")
    if typed.experts is not None and typed.experts > shape.num_experts:
        raise _refused(f"`{shape.name}` has {shape.num_experts} experts; more are for `--shape {_CUSTOM}`")
    return _possible(replace(shape, num_experts=typed.experts or shape.num_experts))


def _possible(shape: Shape) -> Shape:
    if shape.top_k > shape.num_experts:
        raise _refused(f"a token cannot choose {shape.top_k} of {shape.num_experts} experts")
    return shape


def _group(word: str, isas: Sequence[Isa]) -> tuple[str, ...]:
    """Return the implementations that a word names. Formats of other ISAs are known too."""
    own = ours.names(tuple(isas))
    groups = {"ktc": own, "hf": peers.HF, "kt": kt.NAMES, "all": (*own, *peers.NAMES, *kt.NAMES)}
    if word in groups:
        return groups[word]
    known = (*ours.names(tuple(KERNELS)), *peers.NAMES, *kt.NAMES)
    impl = _one_of("--impl", word, (*groups, *known))
    if impl.startswith(ours.PREFIX) and impl not in own:
        raise _refused(f"`{impl}` has no kernel for {listing(isas)}", f"these have: {listing(own)}")
    return (impl,)


def _require_even(shape: Shape, impl: str) -> None:
    for name in FORMATS:
        if impl == f"{ours.PREFIX}{name}" and not ours.even_rows(shape, name):
            raise _refused(f"`{name}` cuts rows into groups or blocks, of which {shape} has no whole number")


def _isas(text: str) -> tuple[Isa, ...]:
    here = host.detect()
    found: list[Isa] = [host.restrict(here, word).isas[0] for word in _words(text)]
    return tuple(dict.fromkeys(found)) or here.isas[:1]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str, least: int, most: int) -> tuple[int, ...]:
    words = _words(text)
    wrong = [word for word in words if not (word.isascii() and word.isdigit() and least <= int(word) <= most)]
    if wrong:
        raise _refused(f"`{option}` takes numbers from {least} to {most}, found `{wrong[0]}`")
    return _some(option, tuple(dict.fromkeys(map(int, words))))


def _some(option: str, found: tuple[T, ...]) -> tuple[T, ...]:
    if not found:
        raise _refused(f"`{option}` is empty")
    return tuple(dict.fromkeys(found))


def _one_of(option: str, word: str, options: Iterable[T]) -> T:
    known = {str(each): each for each in options}
    if word not in known:
        hint = suggest(word, known) or f"there are {listing(known, len(known))}"
        raise _refused(f"`{option}` knows no `{word}`", hint)
    return known[word]


def _refused(message: str, hint: str = "`ktc bench moe --help` lists the choices") -> InputRefused:
    return InputRefused(Diagnostic("U030", message, hint=hint))
