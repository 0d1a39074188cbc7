"""The tests that lean on them with the oldest and the newest supported torch, transformers and peft: `make versions`.

Each set gets an environment of its own below --folder, made once by pip and used again; the releases are those of
`ktc/foundation/versions.py`. Without a GPU, give --index the index of the small builds of torch, if it has them.

    python tests/version_matrix.py [oldest] [newest] [--folder build/versions] [--index URL]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ktc.foundation import versions  # noqa: E402 - the script runs without ktc installed

TESTS = (
    "tests/foundation/test_versions.py", "tests/test_private_names.py", "tests/model/experts/test_private_api.py",
    "tests/model/hf", "tests/stages/capture/test_private_api.py", "tests/inference/serving/test_private_api.py",
    "tests/stages/capture/test_capture.py",
    "tests/stages/match/test_match.py", "tests/stages/rewrite",
    "tests/stages/proof", "tests/model/loading/test_load.py", "tests/end_to_end/test_compiled_model.py",
    "tests/model/experts/trained/test_peft.py", "tests/model/linears/test_lora_linear.py", "tests/training",
    "tests/adapters",
    "tests/inference/generate", "tests/inference/evaluate", "tests/inference/serving/test_server.py",
    "tests/learning", "tests/tools/llama_factory/test_settings.py",
)  # fmt: skip
TOOLS = ("pytest>=8.3", "hypothesis>=6.130", "torchvision")  # old processors of images need the last
KTC = f"{ROOT}[train,eval,serve,gguf]"  # TRL, the metrics, the server and GGUF, in whatever releases fit the set
# It runs the stock DeepSeek-V2 in a process of its own, which the oldest transformers cannot (tests/conftest.py).
NOT_WITH_OLDEST = (
    "tests/end_to_end/test_compiled_model.py::"
    "test_in_reference_mode_losses_equal_and_the_adapter_works_in_the_stock_model[deepseek_v2]"
)
SHOW = "from ktc.foundation import versions as v; print(*(f'{n} {v.installed(n)}' for n in v.SUPPORTED), sep=', ')"


def requirements(end: str) -> list[str]:
    """What pip installs: the first patch of the oldest releases, the last patch of the newest."""
    pick, operator = (0, "==") if end == "oldest" else (1, "~=")
    return [f"{name}{operator}{versions.dotted(ends[pick])}.0" for name, ends in versions.SUPPORTED.items()]


def prepare(end: str, folder: Path, index: str) -> Path:
    """The environment's Python; made where a run with the same requirements has not made it."""
    packages = [*requirements(end), *TOOLS, "-e", KTC]
    home, wanted = folder / end, " ".join(packages)
    python, mark = home / "bin" / "python", home / "made-with"
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return python
    print(f"{end}: installing {wanted} into {home}", flush=True)
    venv.create(home, with_pip=True, clear=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    extra = ["--extra-index-url", index] if index else []
    subprocess.run([*pip, *extra, *packages], check=True)
    mark.write_text(wanted, encoding="utf-8")
    return python


def test(end: str, python: Path) -> int:
    """Runs the quick tests and returns pytest's exit code."""
    shown = subprocess.run([python, "-c", SHOW], capture_output=True, text=True, check=True)
    print(f"{end}: {shown.stdout.strip()}", flush=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [python, "-m", "pytest", "-m", "not slow and not full", "-p", "no:cacheprovider", *TESTS]
    command += ["--deselect", NOT_WITH_OLDEST] if end == "oldest" else []
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    """Prepares and tests each end that was asked for; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ends", nargs="*", metavar="oldest|newest", help="which set; default: both")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="where the environments lie")
    parser.add_argument("--index", default="", help="an extra package index, as for small builds of torch")
    options = parser.parse_args()
    ends = options.ends or ["oldest", "newest"]
    if wrong := sorted(set(ends) - {"oldest", "newest"}):
        parser.error(f"expected oldest or newest, found {', '.join(wrong)}")
    results = {end: test(end, prepare(end, options.folder.resolve(), options.index)) for end in ends}
    for end, code in results.items():
        print(f"{end}: {'passed' if code == 0 else 'FAILED'}")
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
