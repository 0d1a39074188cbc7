"""`ktc init`: a rule file and a file of training settings for a model, commented, to be changed.

In: MODEL, and the bundled program to begin with. Out: `NAME.ktr` and `train.yaml` in a folder. Refused: files that
exist (U009), without `--force`.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer
import yaml

from ktc.cli.early_checks import require_model
from ktc.cli.following import DATA, default_out
from ktc.cli.options import AUTO, Model
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.training.tune.settings import TrainSettings

_SETTINGS: Final = "train.yaml"
_HEAD: Final = """\
# Rules for {model}: the bundled program `{program}`, to be changed. `#` begins a comment.
#   {check}
#     shows which rule changes which part of the model, and whether the result fits this machine
#   {compile}
#     compiles the model by these rules
# Rules to add; a rule may have `at "PATH"` with `*`, and `where` with a condition:
#   rule exact  { match linear at "lm_head" => keep(quant) }
#   rule low    { match module as m at "model.layers.*" where m.layer < 2 => place(cpu) }
"""
_REQUIRE: Final = '\nrequire model.type == "{kind}" else "written for {kind}"\n'


@in_session("as_json", "verbose", "quiet")
def init_command(
    session: Session,
    model: Model,
    program: Annotated[
        str, typer.Option("--from", metavar="PROGRAM", help="The bundled program that the rules begin with.")
    ] = AUTO,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write the two files into.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace the two files.")] = False,
) -> None:
    """Write a commented rule file and train.yaml for MODEL, to be changed."""
    from ktc.foundation.files import refusing, write_file

    require_model(model)
    rules, settings = output / f"{default_out(model).removesuffix('_ktc')}.ktr", output / _SETTINGS
    texts = {rules: rules_text(model, program, rules), settings: settings_text(model)}
    if not force:
        hint = "`--force` replaces it, `-o FOLDER` names another place"
        faults = [Diagnostic("U009", f"`{path}` exists already", hint=hint) for path in texts if path.exists()]
        if faults:
            raise InputRefused(*faults)
    for path, text in texts.items():
        with refusing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, text)
    session.result({"rules": rules, "settings": settings})
    session.show(f"wrote {rules} and {settings}")
    session.next("ktc", "check", rules, model)


def rules_text(model: str, program: str, path: Path) -> str:
    """Return the bundled `program` with a head for `model`. Raises InputRefused (E011) for another program."""
    from ktc.foundation import resources
    from ktc.language import dsl

    dsl.load(program, {})
    text = (resources.rules() / f"{program}.ktr").read_text(encoding="utf-8")
    check, compiling = (shlex.join(words) for words in (
        ("ktc", "check", str(path), model), ("ktc", "compile", model, str(path)),
    ))  # fmt: skip
    facts = {"{model}": model, "{program}": program, "{check}": check, "{compile}": compiling}
    head = _HEAD
    for name, value in facts.items():
        head = head.replace(name, value)
    kind = _model_type(model)
    lines = text.split("\n")
    last = max(number for number, line in enumerate(lines) if line.startswith("import "))
    if kind and not any(line.startswith("require model.type") for line in lines):
        lines.insert(last + 1, _REQUIRE.format(kind=kind).rstrip("\n"))
    return head + "\n" + "\n".join(lines)


def settings_text(model: str) -> str:
    """Return every setting of `ktc train` as a comment with its default, and the data as the only one that is set."""
    lines = [f"# Settings of `{shlex.join(('ktc', 'train', model, '--config', _SETTINGS))}`; options override them."]
    for setting in fields(TrainSettings):
        value: object = setting.default
        default = list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
        line = yaml.safe_dump({setting.name: default}).strip()
        lines += ["", f"# {setting.metadata['help']}", f"data: {DATA}" if setting.name == "data" else f"#{line}"]
    return "\n".join(lines) + "\n"


def _model_type(model: str) -> str:
    """Return the type of a small model or of a folder, an empty text if it cannot be read here."""
    from ktc.foundation.decode import read_json
    from ktc.foundation.regular_files import read_regular
    from ktc.model.hf.model_names import TINY

    if model.startswith(TINY):
        return model.removeprefix(TINY)
    try:
        content: object = read_json(read_regular(Path(model) / "config.json"))
    except (OSError, ValueError):
        return ""
    kind: object = cast("dict[str, Any]", content).get("model_type") if isinstance(content, dict) else None
    return kind if isinstance(kind, str) and re.fullmatch(r"[\w.-]+", kind) else ""
