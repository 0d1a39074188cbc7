"""The request of `ktc bench decode`: from the typed words to a `Request`. Refused: invalid options (U030)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ktc.diagnostics import Diagnostic, InputRefused, listing, suggest
from ktc.foundation import environment, host
from ktc.tools.bench.decode.sizes import SIZES

Impl = Literal["ktc", "hf", "llama.cpp"]
IMPLS: Final = ("ktc", "hf")
PEERS: Final = ("llama.cpp",)
FILE_FORMATS: Final = ("q4_0", "q8_0", "bf16", "q4_k")
LLAMA_PYTHON: Final = Path("build/llama/bin/python")
_MOST_TOKENS: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class Typed:
    """The words of the command line; lists are comma-separated."""

    model: str = "olmoe"
    layers: int | None = 4
    file_format: str = "q8_0"
    batches: str = "1,8"
    contexts: str = "0,512,4096"
    prefill: str = "512,2048"
    impls: str = "ktc"
    peer: str = ""
    peer_python: Path | None = None
    rule: str = "moe-inference"
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    isa: str = ""
    threads: int = 1
    rounds: int = 5
    profile: bool = False
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. A decode step adds a token to each of `batch` sequences of `tokens` tokens.

    A prefill reads one prompt of `tokens` tokens.
    """

    kind: Literal["decode", "prefill"]
    batch: int
    tokens: int

    def __str__(self) -> str:
        if self.kind == "prefill":
            return f"prefill of {self.tokens}"
        return f"decode, batch {self.batch}, context {self.tokens}"


@dataclass(frozen=True, slots=True)
class Request:
    """One run. `layers` None is the whole depth, `isa` "" the best of this machine, `folder` None a temporary one.

    With one thread time is CPU time, with more of them wall time.
    """

    model: str
    layers: int | None
    file_format: str
    cases: tuple[Case, ...]
    impls: tuple[Impl, ...]
    peer_python: Path
    rule: str
    settings: Mapping[str, str]
    isa: str
    threads: int
    rounds: int
    profile: bool
    folder: Path | None


def parse(typed: Typed) -> Request:
    """Return the request. Raise InputRefused (U030)."""
    _one_of("--model", typed.model, tuple(SIZES))
    _one_of("--format", typed.file_format, FILE_FORMATS)
    peers = _words("--peer", typed.peer, PEERS)
    if typed.peer_python is not None and not peers:
        raise refused("`--peer-python` is for a `--peer`, and none is named")
    usable = max(1, host.usable_threads() // environment.local_world_size())
    if typed.threads > usable:
        raise refused(f"`--threads {typed.threads}` is more than the {usable} that this process may use")
    batches, contexts = _numbers("--batch", typed.batches, 1), _numbers("--context", typed.contexts, 0)
    decodes = [Case("decode", batch, tokens) for batch in batches for tokens in contexts]
    prefills = [Case("prefill", 1, tokens) for tokens in _numbers("--prefill", typed.prefill, 1)]
    impls = _words("--impl", typed.impls, IMPLS)
    if not (decodes or prefills) or not (impls or peers):
        raise refused("nothing is left to be measured")
    if typed.profile and "ktc" not in impls:
        raise refused("`--profile` is of ktc's steps, which `--impl` leaves out")
    return Request(
        model=typed.model,
        layers=typed.layers,
        file_format=typed.file_format,
        cases=(*decodes, *prefills),
        impls=(*impls, *peers),  # pyright: ignore[reportArgumentType]  (checked words)
        peer_python=(typed.peer_python or LLAMA_PYTHON).absolute(),
        rule=typed.rule,
        settings=typed.settings,
        isa=typed.isa,
        threads=typed.threads,
        rounds=typed.rounds,
        profile=typed.profile,
        folder=typed.folder,
    )


def _words(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        _one_of(option, word, known)
    return words


def _one_of(option: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        raise refused(f"`{option}` knows no `{word}`", suggest(word, known) or f"there are {listing(known)}")


def _numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit() and least <= int(word) <= _MOST_TOKENS):
            raise refused(f"`{option}` takes numbers from {least} to {_MOST_TOKENS}, found `{word}`")
    return tuple(dict.fromkeys(map(int, words)))


def refused(message: str, hint: str = "`ktc bench decode --help` lists the choices") -> InputRefused:
    """Return the refusal of an invalid option."""
    return InputRefused(Diagnostic("U030", message, hint=hint))
