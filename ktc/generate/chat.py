"""A conversation: what the user types, what the model answers, and the turns that both have behind them.

In: lines, as an iterator that ends when the user leaves. Out: the pace of each answer, through `say` the answers.
`/reset` forgets the conversation, `/exit` ends it; an interrupt ends the answer that is being given.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import FrameType

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.generate.answers import Pace, Sampling, answer
from ktc.generate.language_model import LanguageModel
from ktc.generate.prompts import Message, render

COMMANDS = "/reset forgets what was said, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"


def converse(
    opened: LanguageModel,
    sampling: Sampling,
    lines: Iterable[str],
    say: Callable[[str], None],
    tell: Callable[[str | Diagnostic], None],
    *,
    system: str = "",
) -> tuple[Pace, ...]:
    """Answers line after line, each with all that was said before it, until the lines end or one is `/exit`.

    `say` gets the pieces of answers, `tell` what is said about them. A turn that is refused is forgotten, and told.
    """
    history, paces = list[Message](), list[Pace]()
    for line in lines:
        said = line.strip()
        if said == "/exit":
            break
        if said == "/reset":
            history.clear()
            tell("the conversation begins anew")
        elif said.startswith("/"):
            tell(f"there is no command `{said.split()[0]}`: {COMMANDS}")
        elif said:
            paces += _turn(opened, sampling, history, said, say, tell, system)
    return tuple(paces)


def _turn(
    opened: LanguageModel,
    sampling: Sampling,
    history: list[Message],
    said: str,
    say: Callable[[str], None],
    tell: Callable[[str | Diagnostic], None],
    system: str,
) -> list[Pace]:
    """One question and its answer; both join the history, an interrupted answer as far as it went."""
    asked = Message("user", said)
    try:
        prompt = render(opened, [*history, asked], system=system)
        with answers_stop() as interrupted:
            found, pace = answer(opened, prompt, sampling, say, interrupted)
    except InputRefused as refusal:
        for diagnostic in refusal.diagnostics:
            tell(diagnostic)
        return []
    say("\n")
    history += [asked, Message("assistant", found.text)]
    tell(f"{pace}{', interrupted' if found.finish == 'interrupted' else ''}")
    return [pace]


@contextmanager
def answers_stop() -> Generator[threading.Event]:
    """Within it the first Ctrl-C sets the event, at which the answer ends with its token; a second one interrupts."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
