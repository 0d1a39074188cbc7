"""A conversation between the user and the model, with its history.

Input: lines, as an iterator that ends when the user leaves. Output: the pace of each answer; `say` receives the
answers. `/reset` clears the history, `/exit` ends the conversation; an interrupt ends the current answer.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import FrameType

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.generate.answers import Pace, answer
from ktc.inference.generate.language_model import LanguageModel
from ktc.inference.generate.prompts import Message, render
from ktc.inference.generate.sampling import Sampling

COMMANDS = "/reset clears the conversation, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"


def converse(
    opened: LanguageModel,
    sampling: Sampling,
    lines: Iterable[str],
    say: Callable[[str], None],
    tell: Callable[[str | Diagnostic], None],
    *,
    system: str = "",
) -> tuple[Pace, ...]:
    """Answer line after line, each with the history, until the lines end or one is `/exit`.

    `say` receives the pieces of answers, `tell` the notes. A refused turn is removed from the history and reported.
    """
    history, paces = list[Message](), list[Pace]()
    for line in lines:
        said = line.strip()
        if said == "/exit":
            break
        if said == "/reset":
            history.clear()
            tell("the conversation is cleared")
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
    """Answer one question and append both to the history; an interrupted answer is appended as far as it went."""
    question = Message("user", said)
    try:
        prompt = render(opened, [*history, question], system=system)
        with answers_stop() as interrupted:
            answered, pace = answer(opened, prompt, sampling, say, interrupted)
    except InputRefused as refusal:
        for diagnostic in refusal.diagnostics:
            tell(diagnostic)
        return []
    say("\n")
    history += [question, Message("assistant", answered.text)]
    tell(f"{pace}{', interrupted' if answered.finish == 'interrupted' else ''}")
    if pace.sparse_attention is not None:
        tell(str(pace.sparse_attention))
    return [pace]


@contextmanager
def answers_stop() -> Generator[threading.Event]:
    """Set the event at the first Ctrl-C inside the context, which ends the answer; a second one interrupts."""
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
