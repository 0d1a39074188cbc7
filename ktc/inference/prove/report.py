"""The record of a comparison, `OUT/fidelity.json`: values, verdicts, and how they were obtained.

In: the rows of a run, or the text of the file. Out: the file, or the frozen `Report`. Refused (N606): a file that is
not such a record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.decode import Undecodable, decode, read_json
from ktc.foundation.files import file_digest, refusing, write_file
from ktc.foundation.regular_files import read_regular
from ktc.model.manifest.manifest import FILE as MANIFEST

FILE: Final = "fidelity.json"
SCHEMA: Final = 1

Kind = Literal["layer", "block", "experts", "logits", "input"]


@dataclass(frozen=True, slots=True)
class Worst:
    """A token, or an expert, with its own relative error; `piece` is the token's text."""

    index: int
    piece: str
    error: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. Errors are relative to the baseline; `None` is an error that is not a finite number.

    `what` is a module's path within its layer, "" for the layer. An `input` is what a layer gets of embeddings and
    towers. `ktc` and `stock` are the errors of the compiled model and of the stock model in its own dtype. `agreement`
    is the share of tokens for which the compiled model chose the same experts as the baseline (for logits: ranks the
    same token first), `stock_agreement` that of stock; `None` without a choice. `format_error` is what the weight
    format itself costs against unquantised weights.
    `red` says why the row fails; "" for a row that passes.
    """

    what: str
    kind: Kind
    rewritten: bool
    ktc: float | None
    stock: float | None
    agreement: float | None = None
    stock_agreement: float | None = None
    format_error: float | None = None
    worst: tuple[Worst, ...] = ()
    note: str = ""
    red: str = ""

    @property
    def ratio(self) -> float | None:
        """The compiled model's error as a multiple of stock's own; `None` where stock's is zero or not finite."""
        return self.ktc / self.stock if self.ktc is not None and self.stock else None


@dataclass(frozen=True, slots=True)
class Carried:
    """Errors of whole forward passes up to and with one layer, each fed its own results: never a reason for red.

    Choices of experts differ by rounding and add up, so both are of one size but neither bounds the other.
    """

    ktc: float | None
    stock: float | None


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The rows of one layer."""

    index: int
    fqn: str
    class_name: str
    rows: tuple[Row, ...]
    carried: Carried | None

    @property
    def red(self) -> bool:
        """Whether any row fails."""
        return any(row.red for row in self.rows)


@dataclass(frozen=True, slots=True)
class Whole:
    """Logits at the end of whole forward passes: errors, and the shares of tokens with fp32's next token."""

    errors: Carried
    next_token: float
    stock_next_token: float


@dataclass(frozen=True, slots=True)
class FinalReport:
    """Norm and head on the baseline's hidden states after the last layer, and whole passes if they were carried."""

    row: Row
    whole: Whole | None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `tokens` says where the tokens come from, `packed` where the compiled experts were read.

    `stock_read` is `transformers` where its own loading code filled the stock model, and `rows` where `weights.json`
    did (GGUF files). `manifest` is the sha256 of `ktc.json`: a record of another compilation is not used.
    """

    schema: int
    date: str
    versions: Mapping[str, str]
    manifest: str
    model: str
    dtype: str
    tokens: str
    num_tokens: int
    seed: int
    chosen: str
    packed: str
    stock_read: str
    twice: float
    floor: float
    seconds: float
    layers: tuple[LayerReport, ...]
    final: FinalReport | None

    @property
    def red(self) -> bool:
        """Whether any comparison fails."""
        return any(layer.red for layer in self.layers) or (self.final is not None and bool(self.final.row.red))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def manifest_digest(folder: Path) -> str:
    """Return what identifies the compilation in `folder`."""
    return file_digest(folder / MANIFEST)


def write_report(folder: Path, report: Report) -> Path:
    """Write `fidelity.json` into `folder`, whole or not at all. Raises InputRefused (N605)."""
    path = folder / FILE
    with refusing(path, "N605"):
        write_file(path, json.dumps(report.to_json(), indent=1) + "\n")
    return path


def read_report(folder: Path) -> Report | None:
    """Return the record in `folder`; `None` if there is none, or if it is of an earlier compilation.

    Raises InputRefused (N606) for a file that is not a record of this schema.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    hint = f"`ktc prove {folder}` writes it again"
    try:
        content: Any = read_json(read_regular(path))
        if isinstance(content, dict) and content.get("schema") != SCHEMA:  # pyright: ignore[reportUnknownMemberType]
            return None
        report = decode(content, Report)
    except (OSError, ValueError, Undecodable) as error:
        raise InputRefused(Diagnostic("N606", f"`{path}` is damaged: {error}", hint=hint)) from error
    return report if report.manifest == manifest_digest(folder) else None
