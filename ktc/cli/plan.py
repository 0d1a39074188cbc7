"""`ktc plan`: the plans of a model that are possible on a machine, with their predicted speed and bytes.

In: a model, rules, machines, budgets and numbers of tokens. Out: a table of plans, the chosen one first, or one row per
case of `--what-if`; with `--plot` a picture of both. Nothing is compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ktc.cli.amounts import size
from ktc.cli.compiling import settings_of
from ktc.cli.early_checks import require_compiled, require_host, require_model, require_rules
from ktc.cli.following import loading
from ktc.cli.model_and_rules import model_and_rules
from ktc.cli.options import AUTO, Experts, ForUse, Model, OptionalRules, Settings, TextOnly, Trust
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, KtcError

if TYPE_CHECKING:
    from rich.table import Table

    from ktc.foundation.host import Host
    from ktc.language.dsl.ruleset import RuleSet
    from ktc.stages.capture import CapturedModel
    from ktc.stages.choose import Case, Chosen, Priced

Budgets = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """A case and the plan that is chosen for it, or why there is none.

    `chunks` are those that a GPU computes a layer's experts in, 0 where none does; `ring` are the bytes that weights
    pass through on their way to it, 0 where none are sent.
    """

    case: Case
    chosen: Chosen | KtcError
    chunks: int = 0
    ring: int = 0

    @classmethod
    def of(cls, case: Case, chosen: Chosen | KtcError, captured: CapturedModel) -> _Row:
        """Read the settings of the chosen plan."""
        if isinstance(chosen, KtcError):
            return cls(case, chosen)
        from ktc.stages.cost import work_of

        experts = [work.experts for work in work_of(captured, chosen.plan) if work.experts is not None and work.packed]
        actions = (action for rewrite in chosen.plan.rewrites for action in rewrite.actions)
        rings = (one.prefill.buffer for one in actions if one.prefill is not None and not one.prefill.resident)
        return cls(case, chosen, max((one.chunks for one in experts if one.devices), default=0), max(rings, default=0))


@in_session(writes=("plot",))
def plan_command(
    session: Session,
    model: Model,
    rules: OptionalRules = AUTO,
    use: ForUse = None,
    experts: Experts = False,
    settings: Settings = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="DEVICE=SIZE,...", help="Budgets to plan for: `cuda:0=12GB,24GB`."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N,...", help="Lengths of sequences to plan for.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Sequences per batch to plan for.")] = None,
    hosts: Annotated[
        str | None, typer.Option("--host", metavar="FILE,...", help="Machines to plan for: files, or bundled names.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the roofline of the plan and speed over memory: .png or .svg.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Run the steps of OUT, a compiled model, beside their prediction.")
    ] = False,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="With --calibrate: make random weights instead of reading them.")
    ] = False,
    text_only: TextOnly = False,
    trust: Trust = False,
) -> None:
    """Show the plans that are possible, their predicted speed and their bytes, the chosen one first."""
    if calibrate:
        if what_if or hosts or plot or settings or use or experts:
            raise InputRefused(
                Diagnostic("U004", "`--calibrate` measures OUT as it was compiled: it takes no other plan")
            )
        require_compiled(Path(model))
        session.require_versions()
        _calibrate(session, Path(model), _Size(batch, _lengths(tokens)[0], random_weights, trust))
        return
    if random_weights:
        raise InputRefused(Diagnostic("U004", "`--random-weights` is for `--calibrate`"))
    model, rules = model_and_rules(model, rules)
    chosen = settings_of(settings, rules, use, experts=experts)
    require_model(model)
    require_rules(rules, chosen)
    for described in (hosts or "").split(","):
        require_host(described.strip() or None)
    budgets, lengths = _budgets(what_if or ()), _lengths(tokens)
    session.require_versions()
    from ktc import compiler
    from ktc.stages.choose import Case
    from ktc.stages.choose import what_if as plan_cases
    from ktc.stages.plan import BatchShape

    if plot is not None:
        from ktc.tools.bench.plot import require_drawable

        require_drawable(plot, "a plan's picture")
    machines = _machines(hosts)
    _require_devices(budgets, machines)
    with session.console.status("capturing and planning"):
        program, captured, weights = compiler.read(model, rules, chosen, reading=compiler.Reading(trust, text_only))
        cases = (
            Case(name, host, budget, BatchShape(batch, length))
            for (name, host), budget, length in itertools.product(machines, _combined(budgets), lengths)
        )
        planned = plan_cases(captured, weights.sources, program, cases, partial(_in_format, rules, chosen))
        rows = [_Row.of(case, one, captured) for case, one in planned]
    session.sources = program.sources
    session.result({"model": model, "rules": rules, "cases": [_to_json(row) for row in rows]})
    several = len(rows) > 1
    session.show(_cases_table(rows) if several else _plans_table(rows[0]))
    if not several and not isinstance(rows[0].chosen, KtcError):
        best = rows[0].chosen.best
        for line in (*_towers(best), *_chunks(rows[0]), *_places(best), *_traffic(best), *_processes(rows[0].chosen)):
            session.show(line)
    refused = [row.chosen for row in rows if isinstance(row.chosen, KtcError)]
    if refused and len(refused) == len(rows):
        raise refused[0]
    if all(isinstance(row.chosen, KtcError) or row.chosen.plan.over_budget for row in rows):
        raise HostLacks(*next(row.chosen.plan.over_budget for row in rows if not isinstance(row.chosen, KtcError)))
    if plot is not None:
        from ktc.tools.bench.plan_picture import draw

        draw(plot, captured, [(row.case, row.chosen) for row in rows if not isinstance(row.chosen, KtcError)])
        session.show(f"{plot} shows them")
    pairs = (word for name, value in chosen.items() for word in ("--set", f"{name}={value}"))
    machine = ("--host", hosts) if hosts and len(machines) == 1 else ()
    session.next("ktc", "check", rules, model, *pairs, *machine, *loading(None, trust, text_only=text_only))


@dataclass(frozen=True, slots=True)
class _Size:
    """The size of input of a calibration, and where its weights are from."""

    batch: int | None
    length: int | None
    random_weights: bool
    trust: bool


def _calibrate(session: Session, out: Path, size_of: _Size) -> None:
    """Show predicted beside measured seconds of the compiled model `out`."""
    from ktc.cli.bench import watching
    from ktc.stages.plan import BatchShape
    from ktc.tools.bench.plans.calibrate import calibrated
    from ktc.tools.bench.report import tables

    shape = BatchShape(size_of.batch, size_of.length)
    seed = 0 if size_of.random_weights else None
    with watching(session) as sink:
        report = calibrated(out, shape, seed, sink, trust_remote_code=size_of.trust)
    session.result(report.to_json())
    session.show(tables(report))


def _in_format(rules: str, settings: Mapping[str, str], name: str) -> RuleSet:
    """Return the program with the routed experts in another format."""
    from ktc.language import dsl
    from ktc.stages.choose import FORMAT

    return dsl.load(rules, {**settings, FORMAT: name})


# Reading the options -------------------------------------------------------------------------------------------------
def _machines(named: str | None) -> list[tuple[str, Host]]:
    from ktc.foundation.host_file import read_host
    from ktc.foundation.measured_host import this_host

    if named is None:
        return [("this machine", this_host())]
    return [(Path(name).stem, read_host(name)) for name in named.split(",") if name]


def _budgets(options: Sequence[str]) -> Budgets:
    """Return sizes in bytes by device. Raises InputRefused (U004) with all faults."""
    from ktc.foundation.host_file import parse_bytes

    budgets, faults = list[tuple[str, tuple[int, ...]]](), list[Diagnostic]()
    for option in options:
        device, _, sizes = option.partition("=")
        parsed = [parse_bytes(text.strip()) for text in sizes.split(",")]
        number = device.removeprefix("cuda:")
        if (device != "cpu" and not (device.startswith("cuda:") and number.isdecimal())) or None in parsed:
            message = f"`--what-if` needs DEVICE=SIZE,SIZE as in `cuda:0=12GB,24GB`, found `{option}`"
            faults.append(Diagnostic("U004", message))
        if any(device == name for name, _ in budgets):
            hint = f"give all sizes at once: `--what-if {device}=SIZE,SIZE`"
            faults.append(Diagnostic("U004", f"two `--what-if` name `{device}`", hint=hint))
        budgets.append((device, tuple(nbytes for nbytes in parsed if nbytes is not None)))
    if faults:
        raise InputRefused(*faults)
    return tuple(budgets)


def _require_devices(budgets: Budgets, machines: Sequence[tuple[str, Host]]) -> None:
    """Raise InputRefused (U004) for budgets of GPUs that a machine lacks: they would change nothing."""
    lacking = [
        Diagnostic("U004", f"`--what-if` names `{device}`, and `{name}` has {len(host.gpus)} GPUs")
        for device, _ in budgets
        for name, host in machines
        if device != "cpu" and int(device.removeprefix("cuda:")) >= len(host.gpus)
    ]
    if lacking:
        raise InputRefused(*lacking)


def _combined(budgets: Budgets) -> list[dict[str, int]]:
    devices = [device for device, _ in budgets]
    return [dict(zip(devices, sizes, strict=True)) for sizes in itertools.product(*(sizes for _, sizes in budgets))]


def _lengths(text: str | None) -> list[int | None]:
    """Return the counts in an option. Raises InputRefused (U004)."""
    if text is None:
        return [None]
    words = [word.strip().replace("_", "") for word in text.split(",")]
    if any(not word.isdecimal() or not 0 < int(word) < 1 << 32 for word in words):
        raise InputRefused(Diagnostic("U004", f"`--tokens` needs counts above zero as in `512,8192`, found `{text}`"))
    return [int(word) for word in words]


_COLUMNS: Final = 3  # of devices; more are one column


# Showing plans -------------------------------------------------------------------------------------------------------
def _plans_table(row: _Row) -> Table:
    """Return one row per candidate, the chosen one first."""
    if isinstance(row.chosen, KtcError):
        raise row.chosen
    from ktc.cli.tables import plain_table

    priced = row.chosen.priced
    uses = [one.use for one in priced[0].predictions]
    devices = _devices(priced)
    columns = devices if len(devices) <= _COLUMNS else ["bytes"]
    table = plain_table("plan", *(f"token/s, {use}" for use in uses), "waits for", *columns, "")
    for number, one in enumerate(priced):
        table.add_row(
            one.candidate.name,
            *(f"{prediction.tokens_per_second:,.0f}" for prediction in one.predictions or ()),
            *[""] * (len(uses) - len(one.predictions)),
            ", ".join(dict.fromkeys(prediction.binds for prediction in one.predictions)),
            *([size(_bytes(one).get(device, 0)) for device in devices] if columns == devices else [_in_all(one)]),
            "chosen" if number == 0 and not one.lacks else one.lacks,
            style="bold" if number == 0 else None,
        )
    return table


def _in_all(priced: Priced) -> str:
    """Return the bytes on each device that has any; devices that have the same follow one another."""
    groups = itertools.groupby(((d, size(b)) for d, b in sorted(_bytes(priced).items()) if b), key=lambda item: item[1])
    return ", ".join(f"{_range([device for device, _ in same])} {amount}" for amount, same in groups)


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _devices(priced: Sequence[Priced]) -> list[str]:
    return sorted({device for one in priced for device in _bytes(one)}, key=lambda name: (name == "cpu", name))


def _bytes(priced: Priced) -> dict[str, int]:
    devices = priced.plan.devices if priced.plan else ()
    return {one.device: one.weights + one.adapter + one.streaming for one in devices}


def _cases_table(rows: Sequence[_Row]) -> Table:
    """Return one row per case: the machine, its budgets, the tokens, and the plan that is chosen."""
    from ktc.cli.tables import plain_table

    table = plain_table("machine", "budgets", "tokens", "plan", "token/s", "seconds", "bytes")
    for row in rows:
        case = row.case
        budgets = ", ".join(f"{device} {size(nbytes)}" for device, nbytes in case.budgets.items())
        about = (case.machine, budgets, f"{case.shape.length or ''}")
        if isinstance(row.chosen, KtcError):
            table.add_row(*about, row.chosen.diagnostics[0].message)
            continue
        best = row.chosen.best
        speeds = " / ".join(f"{one.tokens_per_second:,.0f}" for one in best.predictions)
        seconds = " / ".join(f"{one.seconds:,.3g}" for one in best.predictions)
        nbytes = ", ".join(f"{device} {size(count)}" for device, count in _bytes(best).items())
        table.add_row(*about, best.lacks or best.candidate.name, speeds, seconds, nbytes)
    return table


def _chunks(row: _Row) -> Iterator[str]:
    """Yield the settings of experts on a GPU that the prediction assumes."""
    if row.chunks:
        ring = f", and sent weights pass through a ring of {size(row.ring)} (`stream_buffer`)" if row.ring else ""
        parts = "one chunk" if row.chunks == 1 else f"{row.chunks} chunks"
        yield f"assumed: a GPU computes the experts of a layer in {parts} in calls of many tokens{ring}"


def _places(best: Priced) -> Iterator[str]:
    """Yield where the experts of decoding steps are read, if a GPU and the CPU share them."""
    from ktc.stages.plan.kept import places_of

    if best.plan is not None and (places := places_of(best.plan)) is not None:
        kept, total, share = places
        keeps = f"the GPU keeps {kept:,} of {total:,} routed experts, and " if kept else "the GPU "
        others = "the others" if kept else "the experts"
        yield f"decoding steps: {keeps}reads {share:.0%} of {others} over the bus at first, beside the CPU"


def _towers(best: Priced) -> Iterator[str]:
    """Yield the bytes of the towers for images and sound on each device, where a model has some."""
    devices = best.plan.devices if best.plan else ()
    parts = [f"{size(one.kinds['towers'])} on {one.device}" for one in devices if one.kinds.get("towers")]
    if parts and best.plan is not None:
        yield f"towers and projectors: {', '.join(parts)}; {best.plan.memory.tower_pass}"


def _traffic(best: Priced) -> Iterator[str]:
    """Yield what crosses each link in a call of each use, where anything does."""
    for one in best.predictions:
        amounts = sorted((size(round(nbytes)), a, b) for (a, b), nbytes in one.traffic.items())
        groups = [(amount, list(links)) for amount, links in itertools.groupby(amounts, key=lambda link: link[0])]
        parts = [
            f"{amount} between {links[0][1]} and {links[0][2]}" + f", and on {len(links) - 1} more" * (len(links) > 1)
            for amount, links in groups
        ]
        if parts:
            yield f"{one.use}: {'; '.join(parts)} in a step"


def _processes(chosen: Chosen) -> Iterator[str]:
    """Yield what one process on each GPU would do."""
    if (one := chosen.processes) is not None:
        is_chosen = chosen.plan.processes > 1
        starter = "`ktc train` starts them" if is_chosen else f"`ktc train --processes {one.count}`"
        started = f"{starter}, each with {one.candidate}"
        yield (
            f"one process on each GPU ({started}): {one.tokens_per_second:,.0f} token/s; "
            f"each sends {size(round(one.sent))} of gradients in a step, over the network between machines"
        )


def _to_json(row: _Row) -> dict[str, Any]:
    from ktc.diagnostics import to_json

    case = row.case
    about: dict[str, Any] = {
        "machine": case.machine, "budgets": dict(case.budgets),
        "batch": case.shape.batch, "length": case.shape.length,
    }  # fmt: skip
    if isinstance(row.chosen, KtcError):
        return about | {"diagnostics": [to_json(one) for one in row.chosen.diagnostics]}
    one = row.chosen.processes
    processes = None if one is None else asdict(one) | {"tokens_per_second": one.tokens_per_second}
    settings = {"chunks": row.chunks, "stream_buffer": row.ring}
    return about | {"plans": list(_plans_json(row.chosen)), "processes": processes, "settings": settings}


def _plans_json(chosen: Chosen) -> Iterator[dict[str, Any]]:
    from ktc.stages.plan.kept import places_of

    for number, one in enumerate(chosen.priced):
        yield {
            "name": one.candidate.name,
            "chosen": number == 0 and not one.lacks,
            "lacks": one.lacks,
            "seconds": one.seconds,
            "bytes": _bytes(one),
            "places": places[0] if one.plan is not None and (places := places_of(one.plan)) is not None else 0,
            "towers": {device.device: device.kinds.get("towers", 0) for device in one.plan.devices} if one.plan else {},
            "predictions": [
                {
                    "use": str(prediction.use),
                    "seconds": prediction.seconds,
                    "tokens_per_second": prediction.tokens_per_second,
                    "kinds": dict(prediction.kinds),
                    "engines": dict(prediction.engines),
                    "crossings": prediction.crossings,
                    "traffic": [
                        {"between": list(link), "bytes": nbytes} for link, nbytes in prediction.traffic.items()
                    ],
                    "waits_for": prediction.binds,
                }
                for prediction in one.predictions
            ],
        }
