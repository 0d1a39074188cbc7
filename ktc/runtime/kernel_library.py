"""The shared library of built kernels: opened once per process, after its digest was checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """A built library: where it is, the sha256 of its bytes, and the entries it exposes (`KernelSpec.entry`)."""

    path: Path
    digest: str
    entries: tuple[str, ...]

    def kernel(self, entry: str) -> Kernel:
        """One entry, ready for `FusedMoe(kernel=...)`."""
        if entry not in self.entries:
            raise KeyError(f"the kernel library `{self.path.name}` has no entry `{entry}`; it has {', '.join(self.entries)}")
        return Kernel(self, entry)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry of a kernel library."""

    library: KernelLibrary
    entry: str
