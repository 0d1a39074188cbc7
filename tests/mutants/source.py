"""Thirty seeded bugs, over all rooms: which of them do the quick tests catch?

Each mutant is applied to a copy of the tracked files, and the quick tests of the rooms that it names run there until
one fails. `source.md` has the last table. A mutant whose text is not in its file exactly once is an error: the code has
moved, and the mutant has to follow it.

    python tests/mutants/source.py [--check] [--folder build/mutants] [NUMBER ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` becomes `new` in `file`; `tests` are the folders and files whose quick tests should notice."""

    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(
        "runtime/include/ktc/activation.hpp",
        "return {factor * s, upstream * (s * (Cap::slope(x) + scaled(factor) * (one - s)))};",
        "return {factor * s, upstream * (s * (Cap::slope(x) + scaled(factor) * s))};",
        "tests/model/experts",
    ),
    Mutant(
        "runtime/include/ktc/activation.hpp",
        "return {x * cdf, upstream * (cdf + x * density)};",
        "return {x * cdf, upstream * cdf};",
        "tests/model/experts",
    ),
    Mutant(
        "runtime/include/ktc/routing.hpp",
        "if (expert < 0 || expert >= num_experts) {",
        "if (expert < 0 || expert > num_experts) {",
        "tests/model/experts",
    ),
    Mutant(
        "runtime/include/ktc/weight_format/int8.hpp",
        "if (size <= kLargest) return;",
        "if (size <= 2 * kLargest) return;",
        "tests/model/experts",
    ),
    Mutant(
        "runtime/include/ktc/lora_backward.hpp",
        "Values v_down() const { return {v_down_packed_S_.data(), v_down_S_.data()}; }",
        "Values v_down() const { return {v_down_packed_S_.data(), v_first_S_.data()}; }",
        "tests/model/experts",
    ),
    Mutant(
        "ktc/model/experts/trained/lora.py",
        "return torch.nn.functional.linear(torch.nn.functional.linear(x, a), b) * self.scale",
        "return torch.nn.functional.linear(torch.nn.functional.linear(x, a), b)",
        "tests/model/experts",
    ),
    Mutant(
        "ktc/model/experts/references/quantised_reference.py",
        "zero = largest < 2.0**-100",
        "zero = largest < 2.0**-10",
        "tests/model/experts",
    ),
    Mutant(
        "ktc/model/linears/gemv.py",
        "        if torch.is_grad_enabled():\n            return False\n",
        "",
        "tests/model/linears",
    ),
    Mutant(
        "ktc/model/kernels/packed_size.py",
        "biases = 4 * (padded(inter) * (1 + spec.gated) + padded(hidden))",
        "biases = 4 * (padded(inter) * 2 + padded(hidden))",
        "tests/stages/plan tests/model/experts",
    ),
    Mutant(
        "ktc/stages/plan/memory.py",
        'adapter = device.adapter if mode == "train" else 0',
        "adapter = 0",
        "tests/stages/plan tests/end_to_end",
    ),
    Mutant("ktc/stages/plan/memory.py", "total - _idle(draft.captured)", "total", "tests/stages/plan"),
    Mutant(
        "ktc/stages/plan/claims.py",
        "if a.rule in by_rule[b.rule].overrides:",
        "if False:",
        "tests/stages/plan tests/stages/match",
    ),
    Mutant(
        "ktc/stages/proof/types.py",
        "within = all(error <= self.tolerance for error in (self.forward, *self.gradients.values()))",
        "within = self.forward <= self.tolerance",
        "tests/stages/proof tests/census",
    ),
    Mutant(
        "ktc/model/targets/kt_linear.py",
        'return action.kernel.entry if action.kernel else "torch"',
        "return 'torch'",
        "tests/stages/rewrite tests/model/linears tests/end_to_end/test_linear_kernels.py",
    ),
    Mutant(
        "ktc/stages/rewrite/own_rows.py",
        'joined = form.gated and kind in ("gate", "up")',
        'joined = kind in ("gate", "up")',
        "tests/stages/rewrite tests/stages/capture tests/end_to_end/test_remote_code.py",
    ),
    Mutant(
        "ktc/stages/match/select.py",
        "by_path = [m for m in candidates if _path_selected(rule, m.path)]",
        "by_path = list(candidates)",
        "tests/stages/match",
    ),
    Mutant(
        "ktc/stages/match/expectations.py",
        "if _value(require.condition, unit, rules, facts) is not True:",
        "if _value(require.condition, unit, rules, facts) is False:",
        "tests/stages/match tests/stages/plan",
    ),
    Mutant(
        "ktc/language/dsl/intervals.py",
        "return any(first <= layer <= last for first, last in self.intervals)",
        "return any(first <= layer < last for first, last in self.intervals)",
        "tests/language/dsl tests/stages/match",
    ),
    Mutant(
        "ktc/language/dsl/globs.py",
        "return self.first <= int(segment) and (self.last is None or int(segment) <= self.last)",
        "return self.first <= int(segment) and (self.last is None or int(segment) < self.last)",
        "tests/language/dsl",
    ),
    Mutant(
        "ktc/model/manifest/out_place.py",
        "if not out.name.isidentifier() or keyword.iskeyword(out.name):",
        "if not out.name.isidentifier():",
        "tests/stages/link tests/end_to_end/test_bad_input.py",
    ),
    Mutant(
        "ktc/model/packed_store/packed_store.py",
        "return path.name, status.st_size, status.st_mtime_ns",
        "return path.name, status.st_size, 0",
        "tests/model",
    ),
    Mutant(
        "ktc/stages/codegen/self_test.py",
        "if not torch.equal(packed, expected):",
        "if packed.shape != expected.shape:",
        "tests/stages/codegen tests/model/experts",
    ),
    Mutant(
        "ktc/adapters/factors.py",
        "return (b[rows].float() @ a.float()) * self.scaling",
        "return b[rows].float() @ a.float()",
        "tests/adapters",
    ),
    Mutant(
        "ktc/inference/generate/batch.py",
        'return "".join(line + "\\n" for line in written)',
        'return "\\n".join(written)',
        "tests/inference/generate tests/inference/evaluate",
    ),
    Mutant(
        "ktc/training/trainers/chunked_loss.py",
        "if trainer.label_smoother is not None or trainer.compute_loss_func is not None:",
        "if trainer.compute_loss_func is not None:",
        "tests/training/trainers",
    ),
    Mutant(
        "ktc/training/tune/data_files.py",
        'return _array(_whole(path)) if _begins_with(path, b"[") else _objects(path)',
        "return _objects(path)",
        "tests/training/tune",
    ),
    Mutant(
        "ktc/inference/evaluate/metrics.py",
        "return float(total[0]) / samples if samples else 0.0",
        "return float(total[0]) / (samples + 1)",
        "tests/inference/evaluate",
    ),
    Mutant(
        "ktc/tools/llama_factory/settings.py",
        "if versions.release(version) == TESTED:",
        "if True:",
        "tests/tools/llama_factory",
    ),
    Mutant(
        "ktc/foundation/host.py",
        "restricted = replace(host, isas=host.isas[host.isas.index(wanted) :])",
        "restricted = host",
        "tests/foundation/test_host.py",
    ),
    Mutant(
        "ktc/tools/kt_yaml/path_globs.py",
        "if layers == everywhere and len(layers) > 1:",
        "if len(layers) > 1:",
        "tests/tools/kt_yaml",
    ),
)


def problem_of(mutant: Mutant) -> str | None:
    """Why the mutant cannot be applied; `None` if it can."""
    path = ROOT / mutant.file
    count = path.read_text(encoding="utf-8").count(mutant.old) if path.is_file() else 0
    missing = [place for place in mutant.tests.split() if not (ROOT / place).exists()]
    if count != 1:
        return f"{mutant.file}: `{mutant.old}` is there {count} times, expected once"
    return f"{mutant.file}: no tests `{' '.join(missing)}`" if missing else None


def copy_tree(folder: Path) -> None:
    """Make `folder` a copy of the tracked files; what an earlier run built there stays."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def verdict(mutant: Mutant, folder: Path) -> str:
    """`caught`, with the test that failed first; `survived`; or how pytest ended otherwise."""
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    options = ("-x", "-q", "-m", "not slow and not full", "-p", "no:cacheprovider", "--tb=no")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
    }
    try:
        command = [sys.executable, "-m", "pytest", *options, *mutant.tests.split()]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    finally:
        path.write_text(text, encoding="utf-8")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode == 1 and failed:
        return f"caught by `{failed[0].split()[1]}`"
    return "survived" if done.returncode == 0 else f"pytest ended with {done.returncode}"


def main() -> int:
    """Run the mutants and print the table. Returns 1 if one cannot be applied or fewer than nine of ten are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="which mutants; default: all")
    parser.add_argument("--check", action="store_true", help="only check that every mutant can be applied")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants", help="where the copy is made")
    given = parser.parse_args()
    problems = [problem for mutant in MUTANTS if (problem := problem_of(mutant))]
    if problems or given.check:
        print("\n".join(problems) or f"{len(MUTANTS)} mutants can be applied")
        return 1 if problems else 0
    copy_tree(given.folder)
    chosen = given.numbers or range(1, len(MUTANTS) + 1)
    caught = 0
    print("| no | file | mutant | verdict |\n| --- | --- | --- | --- |")
    for number in chosen:
        mutant = MUTANTS[number - 1]
        found = verdict(mutant, given.folder)
        caught += found.startswith("caught")
        new = mutant.new.strip().replace("|", "\\|") or "(removed)"
        print(f"| {number} | {mutant.file} | `{new}` | {found} |", flush=True)
    print(f"\n{caught} of {len(chosen)} caught")
    return 0 if caught >= 0.9 * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
