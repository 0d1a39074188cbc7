"""llama.cpp as an engine of `ktc bench decode`, in a process of its own environment's Python."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.tools.bench.decode.engines import steps_of
from ktc.tools.bench.requests import Case
from ktc.tools.bench.rounds import Seconds

from .child import Child

_TIMEOUT_SECONDS: Final = 900
_WORKER: Final = Path(__file__).with_name("llama_worker.py")


@contextmanager
def _refusing() -> Generator[None]:
    """Turn a failure of llama.cpp's process into HostLacks (H245)."""
    try:
        yield
    except RuntimeError as error:
        hint = "`make llama-environment` makes its environment; `--peer-python` takes another one's Python"
        raise HostLacks(Diagnostic("H245", f"llama.cpp cannot be measured: {error}", hint=hint)) from error


class LlamaEngine:
    """llama.cpp on the same file."""

    impl = "llama.cpp"

    def __init__(self, python: Path, file: Path, threads: int, stack: ExitStack) -> None:
        """Start its process. Raises HostLacks (H245), as every method does."""
        with _refusing():
            self._child = Child(python, _WORKER, _TIMEOUT_SECONDS, stack)
            self.about = self._ask("open", file=str(file), threads=threads)

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        with _refusing():
            return self._child.ask(do, **arguments)

    def prepare(self, case: Case) -> None:
        """Read a prompt of the case's length into the first sequence, and copy it to the others."""
        held, room = (case.tokens, 2 * steps_of(case)) if case.kind == "decode" else (0, case.tokens)
        self._ask("prepare", sequences=case.batch, context=held, room=room)

    def run(self, case: Case) -> Seconds:
        """By the clocks of its process."""
        if case.kind == "prefill":
            spent = self._ask("prefill", tokens=[token % 500 for token in range(case.tokens)])
            return Seconds(spent["cpu"], spent["wall"])
        steps = steps_of(case)
        spent = self._ask("decode", steps=steps)
        return Seconds(spent["cpu"], spent["wall"]) / steps

    def logits(self, tokens: Sequence[int], *, exact: bool = False) -> Tensor:
        """Read the prompt in one call; `exact` keeps keys and values in fp32."""
        self._ask("prepare", sequences=1, context=0, room=len(tokens), exact=exact)
        return torch.tensor(self._ask("logits", tokens=list(tokens))["logits"])
