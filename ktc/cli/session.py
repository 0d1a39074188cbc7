"""One run of a command: its output, its diagnostics and its exit code.

A `Session` wraps the body of a command. Errors of ktc are shown as diagnostics and become their exit code. Any other
error is reported as a bug, with its trace under `-v` and in the log file. Stdout carries only the output of ktc (with
`--json` one object): output of a library or a child process goes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import typer

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, KtcError, render, to_json
from ktc.foundation import environment, versions
from ktc.foundation.files import refusing, write_file
from ktc.foundation.machine_faults import MachineFault, diagnosed, failed, fault_in, is_machine_fault
from ktc.foundation.regular_files import name_fault

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

INTERRUPTED = 130
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
_PLAIN_WIDTH = 120  # columns of tables in a file or a pipe


def _ending_signals() -> Iterator[signal.Signals]:
    """Yield the signals that end a command as Ctrl-C does: it first removes unfinished files.

    A process of torchrun keeps its SIGTERM: torchrun sends it when another one failed
    (`ktc.training.trainers.rank_liveness`).
    """
    yield signal.SIGINT
    if _OF_TORCHRUN not in os.environ and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        yield signal.SIGTERM


class Session:
    """A command's output. Results are printed by `show` for people and by `result` for programs, products by `emit`.

    Progress goes to `console` and remarks to `tell`, both on stderr. `-q` leaves out only these two.
    """

    def __init__(
        self, as_json: bool = False, verbose: bool = False, quiet: bool = False, log_file: Path | None = None
    ) -> None:
        self.as_json, self.verbose, self.quiet = as_json, verbose, quiet
        self.exit_code = 0
        self.sources: Mapping[str, str] = {}  # texts that diagnostics may refer to
        self._log_file = log_file
        self._log = logging.getLogger("ktc.session")
        self._result: dict[str, Any] = {}
        self._muted = False
        self._started = time.perf_counter()
        self._interrupted = False

    def __enter__(self) -> Session:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._interrupt) for number in _ending_signals()}
        _open_standard_streams()
        sys.stdout.flush()
        # A path that is not UTF-8 has lone surrogates, which are shown escaped.
        self._stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
        os.dup2(2, 1)
        self._redirect = redirect_stdout(sys.stderr)
        self._redirect.__enter__()
        sys.unraisablehook = self._unraisable
        threading.excepthook = self._warn_of_thread
        try:
            self._open_log()
        except OSError as error:
            message = f"cannot write the log file `{self._log_file}`"
            refusal = failed(error, "U002", message)
            if isinstance(error, FileNotFoundError):  # its folder, which the user named
                refusal = InputRefused(Diagnostic("U002", f"{message}: {error.strerror}"))
            self.__exit__(type(refusal), refusal, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._report(error)
        try:
            if (reports := environment.reports_folder()) is not None:  # to the starter, which prints
                self._leave(reports)
            elif self.as_json:
                self._stdout.write(self._object() + "\n")
            self._stdout.flush()
        except OSError as failure:
            self._report(failure)
        sys.stdout.flush()
        self._redirect.__exit__(None, None, None)
        os.dup2(self._stdout.fileno(), 1)
        with suppress(OSError):  # of what could not be flushed above
            self._stdout.close()
        self._close_log()
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                signal.signal(number, before)
        sys.unraisablehook = sys.__unraisablehook__
        threading.excepthook = threading.__excepthook__
        raise typer.Exit(self.exit_code) from None

    def _object(self) -> str:
        return json.dumps(self._result, indent=2, default=os.fspath)

    def _leave(self, reports: Path) -> None:
        with suppress(OSError):  # the starter is gone
            write_file(reports / f"{environment.process_rank()}.json", self._object())

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Stay silent about an interrupt that fell into a `__del__`: `raise_if_interrupted` raises it again."""
        if not (self._interrupted and issubclass(unraisable.exc_type, KeyboardInterrupt)):
            sys.__unraisablehook__(unraisable)

    def _warn_of_thread(self, ended: threading.ExceptHookArgs) -> None:
        """Show a fault of the machine that ended a thread of a library, as tensorboard's writer, as a warning."""
        fault = None if ended.exc_value is None else fault_in(ended.exc_value)
        if fault is None:
            threading.__excepthook__(ended)
        else:
            self.diagnose([replace(diagnosed(fault), severity="warning")])

    def raise_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt again if there was one: an import that it interrupted may have swallowed it."""
        if self._interrupted:
            raise KeyboardInterrupt

    def require_versions(self) -> None:
        """Refuse a torch, transformers or peft that is too old (H230); warn about one newer than any tested (H231).

        Before these start threads, also refuse an absurd number of them in the environment (H232).
        """
        environment.require_sane_threads()
        if newer := versions.require():
            self.diagnose(newer)

    @property
    def stdout(self) -> int:
        """The file of stdout, for a process whose output is that of this command."""
        return self._stdout.fileno()

    @property
    def color(self) -> bool:
        """Whether stdout is a terminal and NO_COLOR is not set."""
        return self._stdout.isatty() and "NO_COLOR" not in os.environ

    @property
    def is_conversation(self) -> bool:
        """Whether a person types and reads: stdin and stdout are terminals, without `--json`."""
        return not self.as_json and sys.stdin is not None and sys.stdin.isatty() and self._stdout.isatty()

    @property
    def _silent(self) -> bool:
        """Whether only errors are printed: another process reports, or `-q --json` has all of it in its object."""
        return self._muted or (self.quiet and self.as_json)

    @property
    def console(self) -> Console:
        """The console for progress: stderr."""
        from rich.console import Console

        return Console(file=sys.stderr, quiet=self.quiet, highlight=False)

    def mute(self) -> None:
        """Print only errors, neither results nor a JSON object: another process reports for this one."""
        self.as_json, self.quiet, self._muted = False, True, True

    def show(self, what: RenderableType) -> None:
        """Print a result, a table or a plain text: on stdout, with `--json` on stderr, with both options not at all."""
        from rich.console import Console
        from rich.text import Text

        stream = sys.stderr if self.as_json else self._stdout
        width = None if stream.isatty() else _PLAIN_WIDTH
        console = Console(file=stream, quiet=self._silent, highlight=False, width=width)
        if isinstance(what, str):
            console.print(Text(what), soft_wrap=True)  # a line of text stays one line, also in a file
        else:
            console.print(what)

    def tell(self, text: str, style: str = "") -> None:
        """Print a line that is not the result: on stderr, and with `-q` not at all."""
        from rich.text import Text

        self.console.print(Text(text, style=style), soft_wrap=True)

    def next(self, *words: object) -> None:
        """Print the command that usually follows, if there is one, which runs as it is: on stderr, after a success."""
        if words and not self.exit_code:
            self.tell(f"next: {shlex.join(map(str, words))}", style="dim")

    def result(self, value: dict[str, Any]) -> None:
        """Add to the object that `--json` prints, paths as text; `diagnose` adds its diagnostics."""
        self._result = {**self._result, **value}

    def adopt(self, result: Mapping[str, Any]) -> None:
        """Add the object of a process that has shown its results and diagnostics, after the diagnostics here."""
        both = [*self._result.get("diagnostics", []), *result.get("diagnostics", [])]
        self._result = {**self._result, **result, **({"diagnostics": both} if both else {})}

    def emit(self, text: str, output: Path | None) -> None:
        """Write a command's product to the file `output`, or to stdout if it is None. Raises InputRefused (U003)."""
        if output is None:
            self.stream(text if text.endswith("\n") else text + "\n")
            return
        with refusing(output):
            write_file(output, text)
        self.console.print(f"wrote {output}", markup=False)

    def stream(self, text: str) -> None:
        """Write a piece of a command's product to stdout, unchanged and unbuffered."""
        self._stdout.write(text)
        self._stdout.flush()

    def note(self, text: str) -> None:
        """Write a line to the log file, with the seconds since the start."""
        encodable = text.encode(errors="backslashreplace").decode()
        self._log.info("%7.2f s  %s", time.perf_counter() - self._started, encodable)

    def diagnose(self, diagnostics: Iterable[Diagnostic], sources: Mapping[str, str] | None = None) -> None:
        """Show diagnostics on stderr, with the source lines that they refer to, and add them to the JSON object."""
        diagnostics, sources = tuple(diagnostics), {**self.sources, **(sources or {})}
        self._result["diagnostics"] = [
            *self._result.get("diagnostics", []),
            *(to_json(diagnostic, sources) for diagnostic in diagnostics),
        ]
        hidden = ("note", "warning") if self._silent else ("note",) if self.quiet else ()
        if self._muted and environment.reports_folder() is not None:  # the starter shows the errors of all, once
            hidden = ("note", "warning", "error")
        shown = [diagnostic for diagnostic in diagnostics if diagnostic.severity not in hidden]
        if not shown:
            return
        color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        typer.echo(render(shown, sources, color), err=True, color=color)
        self.note(render(shown, sources))

    def _report(self, error: BaseException) -> None:
        if isinstance(error, typer.Exit):
            self.exit_code = error.exit_code
        elif isinstance(error, KeyboardInterrupt) or (self._interrupted and _is_of_interrupt(error)):
            self.exit_code = INTERRUPTED
            self.diagnose([Diagnostic("U130", "interrupted")])
        elif isinstance(error, InputRefused) and is_machine_fault(error, vanished=False):
            self._report_fault(error)  # a file that could not be read is not damaged
        elif isinstance(error, KtcError):
            self.exit_code = error.exit_code
            self.diagnose(error.diagnostics, error.sources)
        elif isinstance(error, BrokenPipeError):  # the reader of our output has closed it
            self.exit_code = 1
        elif (lacking := _lacking(error)) is not None:
            self._show_trace(error)
            self.exit_code = HostLacks.exit_code
            self.diagnose([lacking])
        elif fault := name_fault(error):
            self.exit_code = InputRefused.exit_code
            self.diagnose([Diagnostic("U005", fault, hint="name another file or folder")])
        elif fault_in(error):
            self._report_fault(error)
        else:
            self.exit_code = 1
            self._show_trace(error)
            hint = "" if self.verbose else "run it again with `-v`, and report it with the trace"
            self.diagnose([Diagnostic("U099", f"this is a bug in ktc: {type(error).__name__}: {error}", hint=hint)])

    def _report_fault(self, error: BaseException) -> None:
        fault = fault_in(error)
        assert fault is not None
        self.exit_code = HostLacks.exit_code
        self._show_trace(error)
        self.diagnose([diagnosed(fault)])

    def _show_trace(self, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        self.note(trace)
        if self.verbose:
            typer.echo(trace, err=True)

    def _open_log(self) -> None:
        if self._log_file is None:
            return
        file, mode = self._log_file, "w"
        if environment.started_for() is not None:  # beside its starter, and beside others
            rank = environment.process_rank()
            file, mode = (file, "a") if rank == 0 else (file.with_name(f"{file.name}.rank{rank}"), "w")
        handler = _LogFile(file, mode=mode, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._log.addHandler(handler)
        self._log.setLevel(logging.INFO)
        self._log.propagate = False

    def _close_log(self) -> None:
        for handler in self._log.handlers[:]:
            self._log.removeHandler(handler)
            with suppress(OSError):  # `_LogFile` keeps the first fault
                handler.close()
            if isinstance(handler, _LogFile) and handler.fault is not None:
                message = f"the log file `{self._log_file}` is not complete: {handler.fault.words}"
                self.diagnose([Diagnostic("U002", message, hint=handler.fault.remedy, severity="warning")])


class _LogFile(logging.FileHandler):
    """A log file that stops at the first fault of the machine: the command continues without it."""

    fault: MachineFault | None = None

    def _open(self) -> TextIOWrapper:
        """Open the file so that each line goes to its end: other processes may write to it too."""
        mode = "a" if self.mode == "a" else "w"
        return open(self.baseFilename, mode, encoding=self.encoding, opener=_appending)

    def emit(self, record: logging.LogRecord) -> None:
        if self.fault is None:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        self.fault = None if error is None else fault_in(error)
        if self.fault is None:
            super().handleError(record)


def _appending(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_APPEND, 0o666)


def _is_of_interrupt(error: BaseException) -> bool:
    """Return whether an interrupt led to an error: an import that it ended raises others, some without a context."""
    causes = list[BaseException]()
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(isinstance(one, KeyboardInterrupt | ImportError) for one in causes)


def _lacking(error: BaseException) -> Diagnostic | None:
    """Return the message for an error that means too little memory or too few threads (U115 to U117)."""
    try:
        from ktc.foundation.memory_faults import memory_fault

        return memory_fault(error)
    except MemoryError:  # not even for the numbers
        hint = "end other programs, or allow this process more memory (`ulimit -v`)"
        return Diagnostic("U115", "too little memory on the host: less than its numbers need", hint=hint)


def _open_standard_streams() -> None:
    """Open closed standard streams on the null device.

    A caller may have closed them (`>&-`). A file opened later must not get their file descriptors.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with suppress(OSError):
            os.fstat(number)
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is `number`
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(opened, "r" if number == 0 else "w", encoding="utf-8", closefd=False))
