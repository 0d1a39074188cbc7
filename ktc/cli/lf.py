"""`ktc lf train`: LLaMA-Factory on a compiled model, with KTrainer and the run report.

In: a LLaMA-Factory YAML and settings after it. Out: the files that LLaMA-Factory writes. Every check that does not
need LLaMA-Factory runs before it is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktc.cli.following import answering
from ktc.cli.help_pages import Command
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.foundation import environment

app = typer.Typer(help="Run LLaMA-Factory on a compiled model.")


@app.callback()
def lf() -> None:
    """Run LLaMA-Factory on a compiled model."""


@app.command("train", cls=Command)
@in_session()
def train_command(
    session: Session,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A LLaMA-Factory YAML.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that override those of FILE.")
    ] = None,
) -> None:
    """Run LLaMA-Factory's tuner with KTrainer as its trainer; under torchrun, in every process."""
    session.require_versions()
    from ktc.tools.llama_factory import settings as llama_factory

    request = llama_factory.read_request(file, words or ())
    session.diagnose(llama_factory.check_installed())
    from ktc.tools.llama_factory import run as llama_factory_run

    llama_factory_run.train(request)
    session.result({"output_dir": str(request.output), "stage": request.stage})
    if environment.process_rank() == 0:
        session.show(f"{request.output} holds what LLaMA-Factory wrote")
        if request.stage in ("sft", "dpo", "kto"):
            session.next(*answering(request.model, request.output))
