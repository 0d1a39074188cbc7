"""One proof of equal rewrites in a run of the tests: it takes as long as the capture before it.

A proof follows from the model's config and from what the loader realises, with the code of its blocks. Both are the
name of a file in the run's folder, which all workers read. The rooms that share captures share proofs
(`shared_captures.py`); a test with the fixture `own_captures` has its own.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from filelock import FileLock
from shared_captures import content

if TYPE_CHECKING:
    from ktc.foundation.host import Host
    from ktc.stages.capture import CapturedModel
    from ktc.stages.proof import Proof
    from ktc.stages.rewrite import RewrittenBlock

PROVING: Final = "ktc.stages.proof.prove"


@dataclass(frozen=True, slots=True)
class SharedProofs:
    """Stands in for `ktc.stages.proof.prove`, which is called once for equal rewrites of an equal config."""

    prove: Callable[[CapturedModel, Sequence[RewrittenBlock], Host], tuple[Proof, ...]]
    folder: Path

    def __call__(self, captured: CapturedModel, blocks: Sequence[RewrittenBlock], host: Host) -> tuple[Proof, ...]:
        """The proofs of these rewrites. Those of a model's own code are made each time: its files may have changed."""
        if captured.source.own_code:
            return self.prove(captured, blocks, host)
        path = self.folder / digest(captured, blocks, host)
        with FileLock(path.with_suffix(".lock")):
            if not path.is_file():
                path.with_suffix(".draft").write_bytes(pickle.dumps(self.prove(captured, blocks, host)))
                path.with_suffix(".draft").rename(path)
        return pickle.loads(path.read_bytes())


def digest(captured: CapturedModel, blocks: Sequence[RewrittenBlock], host: Host) -> str:
    """What the proofs follow from. The span of a rule is where its file lies."""
    from ktc.stages.rewrite import block_files, recipe

    steps = [replace(step, span="") for step in recipe(blocks, host)]
    sites = [(block.rewrite.key, block.rewrite.block, block.rewrite.sites, block.graph.code) for block in blocks]
    names = type(captured.source.config), captured.source.folder is None, content(captured.source)
    facts = (names, sites, steps, dict(block_files(captured, blocks)))
    return hashlib.sha256(repr(facts).encode()).hexdigest()
