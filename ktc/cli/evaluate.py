"""`ktc eval`: score a model on a file, with and without the adapter.

In: the options. Out: a table on stdout with the definition of its numbers and the versions of the libraries; the
predictions in a file. Refused before the model is loaded: options that exclude each other (V804), invalid data, missing
libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    tell_random_weights,
)
from ktc.cli.options import (
    AdapterFolder,
    BatchSize,
    Raw,
    Reference,
    Seed,
    SystemPrompt,
    Temperature,
    TextOnly,
    Trust,
    Weights,
)
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused

if TYPE_CHECKING:
    from rich.table import Table

    from ktc.inference.evaluate.run import Evaluation
    from ktc.inference.generate.language_model import LanguageModel

Task = Literal["generation", "mcq"]
Metrics = Literal["kt", "lf", "std"]
By = Literal["text", "logprob"]
Format = Literal["auto", "alpaca", "sharegpt", "messages", "prompt"]


@in_session()
def command(
    session: Session,
    model: GivenModel,
    data: Annotated[
        Path,
        typer.Option(
            "--data", metavar="FILE", help="Rows with answers in a format of `ktc train`, or multiple-choice questions."
        ),
    ],
    adapter: AdapterFolder = None,
    task: Annotated[
        Task,
        typer.Option("--task", help="Compare generated text with references, or answer multiple-choice questions."),
    ] = "generation",
    form: Annotated[
        Format, typer.Option("--format", help="Format of the rows; auto reads it from the first row that fits one.")
    ] = "auto",
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="NAME=COLUMN",
            help="Take NAME of the format from this column of the data: prompt=question. It repeats.",
        ),
    ] = None,
    metrics: Annotated[
        Metrics | None,
        typer.Option(
            "--metrics",
            help="Definition of BLEU and ROUGE: of KTransformers (default), LLaMA-Factory or the literature.",
        ),
    ] = None,
    by: Annotated[
        By | None, typer.Option("--mcq-by", help="Score the generated letter (default) or the most probable one.")
    ] = None,
    token_accuracy: Annotated[
        bool,
        typer.Option("--token-accuracy", help="Also report the share of reference tokens that the model ranks first."),
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Use only this many rows, the first ones.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="F.jsonl", help="Write every prediction to this file.")
    ] = None,
    system: SystemPrompt = "",
    raw: Raw = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, help="Tokens per answer at most. Default: 256, for questions 32."),
    ] = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    batch_size: BatchSize = 8,
    reference: Reference = False,
    text_only: TextOnly = False,
    recompile: Recompile = False,
    weights: Weights = None,
    trust: Trust = False,
) -> None:
    """Score a model: BLEU and ROUGE of its answers, or the share of questions it answers correctly."""
    _check_combination(task, by, {
        "--metrics": metrics is not None, "--token-accuracy": token_accuracy, "--mcq-by": by is not None,
        "--format": form != "auto", "--column": bool(column), "--raw": raw,
        "--max-new-tokens": max_new_tokens is not None, "--temperature": temperature != 0,
    })  # fmt: skip
    require_given(model, (adapter,))
    require_writable(output)
    session.require_versions()
    from ktc.cli.bars import rows_bar
    from ktc.cli.generate import tell_template
    from ktc.inference.evaluate.data import read_items, read_questions
    from ktc.inference.evaluate.metrics import definition
    from ktc.inference.evaluate.run import Evaluator
    from ktc.inference.generate.batch import write_rows
    from ktc.inference.generate.language_model import open_language_model
    from ktc.inference.generate.sampling import Sampling

    scored = definition(metrics or "kt") if task == "generation" else None
    items = read_items(data, form, limit, column or ()) if task == "generation" else ()
    questions = read_questions(data, limit=limit) if task == "mcq" else ()

    writes_letters = task == "mcq" and by != "logprob"
    sampling = Sampling(max_new_tokens or (32 if writes_letters else None), temperature, seed=seed)
    total = (len(items) or len(questions)) * (2 if adapter else 1)

    def run(out: Path) -> tuple[LanguageModel, Evaluation]:
        tell_random_weights(session, out, (adapter,), weights)
        opened = open_language_model(
            out, adapter=adapter, reference=reference, weights=weights, trust_remote_code=trust,
            name=display_name(model),
        )  # fmt: skip
        session.raise_if_interrupted()
        tell_template(session, opened, raw or task == "mcq")
        with rows_bar(session, "evaluating", total) as done:
            half = {"tuned": total // 2}

            def progress(which: str, count: int) -> None:
                done(half.get(which, 0) + count)

            evaluator = Evaluator(opened, sampling, batch_size, progress)
            if scored is not None:
                return opened, evaluator.generation(items, scored, system=system, token_accuracy=token_accuracy)
            return opened, evaluator.choices(questions, by or "text", system=system, raw=raw)

    wish = Wish.of("generate", recompile=recompile, trust=trust, weights=weights, text_only=text_only)
    opened, evaluation = run_compiled(session, model, wish, run)
    if output is not None:
        write_rows(output, evaluation.predictions)
    session.result({**evaluation.to_json(), "model": opened.name, "adapter": opened.adapter or None})
    session.result({"sampling": asdict(sampling), "output": None if output is None else str(output)})
    session.show(_table(evaluation, opened.name))
    versions = ", ".join(f"{name} {version}" for name, version in evaluation.versions.items())
    session.show(f"{evaluation.definition}\n{versions}")
    if opened.streams:
        session.next(*serving(shown(model), adapter, weights=weights, trust=trust, text_only=text_only))


def _check_combination(task: Task, by: By | None, given: Mapping[str, bool]) -> None:
    """Refuse options that the task would ignore. Raises InputRefused (V804)."""
    foreign = (
        ("--mcq-by", "--raw") if task == "generation" else ("--metrics", "--token-accuracy", "--format", "--column")
    )
    ignored = [(name, f"`--task {task}`") for name in foreign]
    if task == "mcq" and by == "logprob":
        ignored += [
            (name, "`--mcq-by logprob`: nothing is generated") for name in ("--max-new-tokens", "--temperature")
        ]
    hints = {"--raw": "rows with `prompt` and `completion` use no template"}
    faults = [
        Diagnostic("V804", f"`{name}` has no meaning for {what}", hint=hints.get(name, "leave it out"))
        for name, what in ignored
        if given[name]
    ]
    if faults:
        raise InputRefused(*faults)


def _table(evaluation: Evaluation, name: str) -> Table:
    """Return one row per metric: of the model alone, or of base and tuned with the difference."""
    from ktc.cli.tables import plain_table

    both = evaluation.lines[0].tuned is not None
    heads = ("base", "tuned", "delta", "95 % of resamples") if both else ("model",)
    table = plain_table("%", *heads)
    table.title = f"{name}, {evaluation.samples} samples"
    for column in table.columns[1:]:
        column.justify = "right"
    for line in evaluation.lines:
        cells = [f"{line.base:.2f}"]
        if line.tuned is not None and line.delta is not None and line.interval is not None:
            low, high = line.interval
            cells += [f"{line.tuned:.2f}", f"{line.delta:+.2f}", f"{low:+.2f} to {high:+.2f}"]
        table.add_row(line.name, *cells)
    return table
