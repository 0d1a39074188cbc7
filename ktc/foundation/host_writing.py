"""A machine with its rates as the text of a host file, which `host_file` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import cast

from ktc.foundation.host import Host
from ktc.foundation.host_file import VERSION, Measurement
from ktc.foundation.rates_file import cpu_table, disk_table, gpu_table, links_table


def host_text(host: Host, measurement: Measurement) -> str:
    """Return the file of a measured machine. Its rates are `host.rates`."""
    rates = host.rates
    tables: list[tuple[str, Mapping[str, object]]] = [
        ("", {
            "version": VERSION, "isa": host.isas[0], "cores": host.cores, "threads": host.threads, "numa": host.numa,
            "memory": host.memory,
        }),
        ("[measured]", {"when": measurement.when, "busy": measurement.busy, "ktc": measurement.ktc}),
        ("[cpu]", {"name": host.processor, **cpu_table(rates.cpu)}),
        ("[disk]", disk_table(rates)),
    ]  # fmt: skip
    for gpu, of_gpu in zip(host.gpus, rates.gpus, strict=True):
        tables.append(("[[gpu]]", {"name": gpu.name, "memory": gpu.memory, **gpu_table(of_gpu)}))
    if links := links_table(rates):
        tables.append(("[links]", links))
    head = "# This machine, as `ktc doctor --measure` found it. docs/reference/hosts.md of ktc explains the keys.\n"
    return head + "\n".join("\n".join(_lines(header, table)) + "\n" for header, table in tables)


def _lines(header: str, table: Mapping[str, object]) -> Iterator[str]:
    """Yield a table. Tables of tables, such as products by format, are tables of their own behind it."""
    if header:
        yield header
    deep = {key: value for key, value in table.items() if _is_deep(value)}
    yield from (f"{key} = {_value(value)}" for key, value in table.items() if key not in deep)
    for key, value in deep.items():
        if header.startswith("[["):
            yield f"{key} = {_value(value)}"
        else:
            yield f"\n[{header.strip('[]')}.{key}]"
            yield from (f"{name} = {_value(inner)}" for name, inner in cast("dict[str, object]", value).items())


def _is_deep(value: object) -> bool:
    values = cast("dict[str, object]", value).values() if isinstance(value, dict) else ()
    return any(isinstance(inner, dict) for inner in values)


def _value(value: object) -> str:
    """Return a value in TOML: a number, a text, true or false, or an inline table."""
    if isinstance(value, dict):
        inside = (f"{key} = {_value(inner)}" for key, inner in cast("dict[str, object]", value).items())
        return f"{{ {', '.join(inside)} }}"
    return json.dumps(value, ensure_ascii=False)
