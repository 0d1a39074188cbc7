"""`ktc generate` and `ktc chat`: a compiled model answers one prompt, the rows of a file, or a conversation.

In: the options. Out: the answer on stdout token by token, JSONL in a file, or a conversation; the speed on stderr.
Refused before the model is loaded: options that exclude each other (G700) and files without prompts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktc.cli.early_checks import require_given, require_writable
from ktc.cli.following import serving
from ktc.cli.given_model import (
    GivenModel,
    Recompile,
    Wish,
    display_name,
    run_compiled,
    shown,
    shown_once,
    tell_random_weights,
)
from ktc.cli.options import (
    AdapterFolder,
    BatchSize,
    ExpertCounts,
    Raw,
    Reference,
    Seed,
    SystemPrompt,
    Temperature,
    TextOnly,
    Trust,
    Weights,
    answers_option,
)
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused

if TYPE_CHECKING:
    from ktc.inference.generate.answers import Pace
    from ktc.inference.generate.language_model import LanguageModel
    from ktc.inference.generate.prompts import Prompt, Row
    from ktc.inference.generate.sampling import Sampling

MaxNewTokens = Annotated[
    int | None,
    answers_option(
        "--max-new-tokens", min=1, help="Tokens per answer at most. Default: 256, or fewer at the model's length."
    ),
]
TopP = Annotated[
    float, answers_option("--top-p", help="Sample among the most probable tokens with this total probability.")
]
TopK = Annotated[int, answers_option("--top-k", min=0, help="Sample among this many most probable tokens; 0: all.")]
Stop = Annotated[list[str] | None, answers_option("--stop", help="Stop before this text; repeatable.")]
PrefillChunk = Annotated[
    int | None,
    answers_option(
        "--prefill-chunk", min=1, help="Read prompts in chunks of at most this many tokens. Default: one pass."
    ),
]
_PROMPT_SIGN = "> "


@in_session()
def command(
    session: Session,
    model: GivenModel,
    text: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Answer this prompt.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Answer this prompt.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="F.jsonl", help="Answer every row: JSON objects with `prompt` or `messages`."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image", metavar="FILE", help="An image before the prompt, for a model with towers; repeatable."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Start a conversation, as `ktc chat`; the default on a terminal without a prompt."),
    ] = False,
    adapter: AdapterFolder = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the rows of --file with their answers to this file.")
    ] = None,
    system: SystemPrompt = "",
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    stop: Stop = None,
    seed: Seed = 0,
    batch_size: BatchSize = 8,
    prefill_chunk: PrefillChunk = None,
    expert_counts: ExpertCounts = None,
    reference: Reference = False,
    text_only: TextOnly = False,
    recompile: Recompile = False,
    weights: Weights = None,
    trust: Trust = False,
) -> None:
    """Generate answers to one prompt or to the rows of a file; without either, on a terminal, in a conversation."""
    if text is not None and prompt is not None:
        raise InputRefused(Diagnostic("G700", "the prompt is given twice", hint="leave `--prompt` out"))
    prompt = prompt if text is None else text
    chat = chat or (prompt is None and file is None and output is None and session.is_conversation)
    _check_combination(prompt, file, chat, output, session.as_json, raw)
    images = _read_images(tuple(image or ()), prompt, prefill_chunk, text_only)
    from ktc.inference.generate.prompts import read_rows
    from ktc.inference.generate.sampling import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, tuple(stop or ()), seed)
    sampling.check()
    rows = () if file is None else read_rows(file)
    require_writable(output)
    require_writable(expert_counts)
    if prompt is not None and not prompt.strip():
        raise InputRefused(Diagnostic("G702", "the prompt is empty", hint="give a text to `--prompt`"))
    wish = Wish.of("generate", recompile=recompile, trust=trust, weights=weights, text_only=text_only)

    def answers(opened: LanguageModel) -> None:
        if prompt is not None:
            _answer_one(session, opened, _prompt(opened, prompt, images, system, raw), sampling)
        elif not chat:
            _answer_file(session, opened, rows, sampling, output, batch_size, system, raw)

    opened = _open(
        session, model, wish, sampling, answers,
        adapter=adapter, reference=reference, chunk=prefill_chunk, raw=raw, with_images=bool(images),
        expert_counts=expert_counts,
    )  # fmt: skip
    if chat:
        _converse(session, opened, sampling, system)
    if expert_counts is not None:
        from ktc.model.loading.kept import add_counts

        add_counts(opened.model, expert_counts)
    if opened.streams:
        session.next(*serving(shown(model), adapter, weights=weights, trust=trust, text_only=text_only))


@in_session("verbose", "quiet", "log_file")
def chat_command(
    session: Session,
    model: GivenModel,
    adapter: AdapterFolder = None,
    system: SystemPrompt = "",
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    stop: Stop = None,
    seed: Seed = 0,
    prefill_chunk: PrefillChunk = None,
    reference: Reference = False,
    text_only: TextOnly = False,
    recompile: Recompile = False,
    weights: Weights = None,
    trust: Trust = False,
) -> None:
    """Hold a conversation with a model: /reset clears it, /exit or Ctrl-D ends it, Ctrl-C stops an answer."""
    from ktc.inference.generate.sampling import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, tuple(stop or ()), seed)
    sampling.check()
    wish = Wish.of("generate", recompile=recompile, trust=trust, weights=weights, text_only=text_only)
    opened = _open(session, model, wish, sampling, None, adapter=adapter, reference=reference, chunk=prefill_chunk)
    _converse(session, opened, sampling, system)
    if opened.streams:
        session.next(*serving(shown(model), adapter, weights=weights, trust=trust, text_only=text_only))


def _open(
    session: Session, model: str, wish: Wish, sampling: Sampling, answers: Callable[[LanguageModel], None] | None, *,
    adapter: Path | None, reference: bool, chunk: int | None, raw: bool = False, with_images: bool = False,
    expert_counts: Path | None = None,
) -> LanguageModel:  # fmt: skip
    """Return the model, compiled first if it is not, after its `answers`. `chunk`: tokens of a prompt per pass.

    Where a GPU's memory ends before there are answers, they come from a smaller plan.
    """
    require_given(model, (adapter,))
    session.require_versions()
    from ktc.inference.generate.answers import read_in_chunks, set_seed
    from ktc.inference.generate.language_model import open_language_model
    from ktc.model.loading.kept import begin_with

    def load(out: Path) -> LanguageModel:
        tell_random_weights(session, out, (adapter,), wish.weights)
        opened = open_language_model(
            out, adapter=adapter, reference=reference, weights=wish.weights, trust_remote_code=wish.trust,
            name=display_name(model), with_images=with_images,
        )  # fmt: skip
        session.raise_if_interrupted()
        tell_template(session, opened, raw)
        if chunk is not None:
            read_in_chunks(opened, chunk)
        if expert_counts is not None:
            begin_with(opened.model, expert_counts)
        set_seed(sampling.seed)
        if answers is not None:
            answers(opened)
        return opened

    return run_compiled(session, model, wish, load)


def _check_combination(
    prompt: str | None, file: Path | None, chat: bool, output: Path | None, as_json: bool, raw: bool
) -> None:
    """Refuse options that exclude each other. Raises InputRefused (G700) with all of them."""
    faults: list[Diagnostic] = []
    if sum((prompt is not None, file is not None, chat)) != 1:
        hint = "`ktc generate MODEL PROMPT` answers one prompt, `--file F.jsonl` every row, `ktc chat MODEL` converses"
        faults.append(Diagnostic("G700", "exactly one of PROMPT, `--file` and `--chat` is needed", hint=hint))
    if output is not None and file is None:
        faults.append(Diagnostic("G700", "`--output` needs `--file`", hint="redirect stdout instead"))
    if chat and (as_json or raw):
        what = "--json" if as_json else "--raw"
        faults.append(Diagnostic("G700", f"`{what}` has no meaning in a conversation", hint="leave it out"))
    if faults:
        raise InputRefused(*faults)


def tell_template(session: Session, opened: LanguageModel, raw: bool) -> None:
    if not opened.has_template and not raw:
        message = "the tokenizer has no chat template: the prompt is used unchanged, turns are joined by line breaks"
        hint = "write the prompt in the format of the training data; `--raw` hides this note"
        session.diagnose([Diagnostic("G704", message, hint=hint, severity="note")])


def _read_images(files: tuple[Path, ...], prompt: str | None, chunk: int | None, text_only: bool) -> tuple[Any, ...]:
    """Return the images of `--image`. Raises InputRefused (G700, G731, G733) and HostLacks (H230)."""
    if not files:
        return ()
    if text_only:
        message = "`--text-only` leaves out the towers that read `--image`"
        raise InputRefused(Diagnostic("G731", message, hint="leave one of the two out"))
    if prompt is None:
        hint = "`ktc generate OUT PROMPT --image FILE`"
        raise InputRefused(Diagnostic("G700", "`--image` needs one prompt", hint=hint))
    if chunk is not None:
        message = "`--prefill-chunk` cannot split a prompt with images"
        raise InputRefused(Diagnostic("G700", message, hint="leave it out"))
    from ktc.model.loading.images import read_images

    return read_images(files)


def _prompt(opened: LanguageModel, text: str, images: tuple[Any, ...], system: str, raw: bool) -> Prompt:
    from ktc.inference.generate.images import render_with_images
    from ktc.inference.generate.prompts import render

    if images:
        return render_with_images(opened.processor, text, images, system=system, raw=raw)
    return render(opened, text, system=system, raw=raw)


def _answer_one(session: Session, opened: LanguageModel, prompt: Prompt, sampling: Sampling) -> None:
    from ktc.inference.generate.answers import answer

    with shown_once(session) as write:
        answered, pace = answer(opened, prompt, sampling, None if session.as_json else write)
    if not session.as_json:
        session.stream("\n")
    session.result({"text": answered.text, "finish": answered.finish, **_pace_json(pace), "sampling": asdict(sampling)})
    _tell_pace(session, pace)


def _answer_file(
    session: Session,
    opened: LanguageModel,
    rows: tuple[Row, ...],
    sampling: Sampling,
    output: Path | None,
    batch_size: int,
    system: str,
    raw: bool,
) -> None:
    from ktc.cli.bars import rows_bar
    from ktc.inference.generate.batch import answer_rows, jsonl, write_rows

    with rows_bar(session, "answering", len(rows)) as progress:
        answered, pace = answer_rows(
            opened, rows, sampling, system=system, raw=raw, batch_size=batch_size, progress=progress
        )
    session.result({"rows": len(answered), **_pace_json(pace), "sampling": asdict(sampling), "batch_size": batch_size})
    if output is not None:
        write_rows(output, answered)
        session.result({"output": str(output)})
        session.console.print(f"wrote {output}", markup=False)
    elif session.as_json:
        session.result({"answers": answered})
    else:
        session.stream(jsonl(answered))
    _tell_pace(session, pace)


def _converse(session: Session, opened: LanguageModel, sampling: Sampling, system: str) -> None:
    from ktc.inference.generate.chat import COMMANDS, converse

    def tell(what: str | Diagnostic) -> None:
        if isinstance(what, Diagnostic):
            session.diagnose([what])
        else:
            session.console.print(what, markup=False, style="dim")

    tell(COMMANDS)
    converse(opened, sampling, _typed_lines(session), session.stream, tell, system=system)


def _typed_lines(session: Session) -> Iterator[str]:
    """Yield the lines of standard input until it ends; a terminal shows a prompt sign for each."""
    while True:
        if sys.stdin.isatty():
            session.console.print(_PROMPT_SIGN, end="")
        line = sys.stdin.readline()
        if not line:
            if sys.stdin.isatty():
                session.console.print()
            return
        yield line


def _tell_pace(session: Session, pace: Pace) -> None:
    session.console.print(str(pace))
    if pace.sparse_attention is not None:
        session.console.print(str(pace.sparse_attention))


def _pace_json(pace: Pace) -> dict[str, object]:
    return {**asdict(pace), "tokens_per_second": pace.tokens_per_second}
