"""The whole model at a glance: its parts in order, equal layers together, and the bytes on each device.

In: the modules of a `ModelDump`. Out: a frozen `Overview`. A part is a layer, by the first number in its FQN, or a
module outside of the layers that has tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ktc.foundation.module_paths import is_inside
from ktc.stages.pictures.dump import ModelDump, ModuleDump
from ktc.stages.pictures.labels import collapse, printable, quantity

NOT_PLACED = "not placed"


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Bytes on one device; `number` is its place among the devices of the model, `share` of the bytes beside it."""

    device: str
    number: int
    bytes: int
    share: float

    @property
    def size(self) -> str:
        return quantity(self.bytes, "B")


@dataclass(frozen=True, slots=True)
class Part:
    """Equal layers, or one module outside of them; the sums are of all `copies`."""

    name: str
    class_name: str
    copies: int
    parameters: str
    size: str
    share: float
    """Of the bytes of the largest part."""
    devices: tuple[DeviceShare, ...]
    blocks: tuple[int, ...]
    """The positions of the blocks inside."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The parts in the order of the model, and the devices in the order in which they first appear."""

    parts: tuple[Part, ...]
    devices: tuple[DeviceShare, ...]


@dataclass(slots=True)
class _Layer:
    """The tensors of one layer or module, while they are summed."""

    fqn: str
    class_name: str
    parameters: int
    devices: dict[str, int]

    @property
    def likeness(self) -> tuple[object, ...]:
        """A key that is equal for layers of one part."""
        head, _, last = self.fqn.rpartition(".")
        return head if last.isdecimal() else self.fqn, self.class_name, self.parameters, tuple(self.devices.items())


def overview(dump: ModelDump, layer: int | None = None) -> Overview:
    """Return the overview of one stage. Blocks are numbered as `of_layer(layer)` has them."""
    groups: dict[tuple[object, ...], list[_Layer]] = {}
    for one in _layers(dump.modules):
        groups.setdefault(one.likeness, []).append(one)
    sums: dict[str, int] = {}
    for alike in groups.values():
        for device, size in alike[0].devices.items():
            sums[device] = sums.get(device, 0) + size * len(alike)
    numbers = {device: number for number, device in enumerate(sums)}
    largest = max((sum(alike[0].devices.values()) * len(alike) for alike in groups.values()), default=0)
    blocks = [block.sites for block in dump.of_layer(layer)]
    parts = tuple(_part(alike, numbers, largest, blocks) for alike in groups.values())
    return Overview(parts, _shares(sums, numbers))


def _layers(modules: Sequence[ModuleDump]) -> list[_Layer]:
    layers: dict[str, _Layer] = {}
    for module in modules:
        path = module.fqn.split(".")
        number = next((at for at, part in enumerate(path) if part.isdecimal()), None)
        fqn = module.fqn if number is None else ".".join(path[: number + 1])
        one = layers.setdefault(fqn, _Layer(fqn, "", 0, {}))
        if module.fqn == fqn:
            one.class_name = module.class_name
        one.parameters += module.parameters
        if module.bytes:
            device = module.device or NOT_PLACED
            one.devices[device] = one.devices.get(device, 0) + module.bytes
    return [one for one in layers.values() if one.devices]


def _part(
    alike: Sequence[_Layer], numbers: dict[str, int], largest: int, blocks: Sequence[Sequence[str]]
) -> Part:  # fmt: skip
    first, copies = alike[0], len(alike)
    sizes = {device: size * copies for device, size in first.devices.items()}
    inside = tuple(
        at
        for at, sites in enumerate(blocks)
        if any(site != "" and is_inside(site, one.fqn) for one in alike for site in sites)
    )
    whole = sum(sizes.values())
    return Part(
        name=", ".join(collapse([one.fqn for one in alike])) or "the model itself",
        class_name=printable(first.class_name, 80),
        copies=copies,
        parameters=quantity(first.parameters * copies),
        size=quantity(whole, "B"),
        share=round(whole / largest, 4),
        devices=_shares(sizes, numbers),
        blocks=inside,
    )


def _shares(sizes: dict[str, int], numbers: dict[str, int]) -> tuple[DeviceShare, ...]:
    whole = sum(sizes.values()) or 1
    return tuple(
        DeviceShare(printable(device, 40), numbers[device], size, round(size / whole, 4))
        for device, size in sizes.items()
    )
