"""`ktc fmt`: canonical, stable, and careful with the files of its user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktc.cli import app as cli
from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation import resources
from ktc.language.dsl.formatter import format_file, format_text

ROUGH = """# One line in, many lines out.

param a:int=1 # first
param  long_name  :  list[isa]  =  [ avx2 ]
pattern p(x)->y is mlp{gate=linear(x) # gated
 very_long_name,_=split(gate) down=linear(silu(gate)*very_long_name) y=(down)?}
rule r overrides lora.targets { match linear as l at "lm_head" where not (l has x) and not l.bias expect>=0
  => lora_linear(rank=8, # small
                 alpha = 32) on l.a, l
  # nothing more
  => place( cpu ) }

# The end.
"""
SMOOTH = """# One line in, many lines out.

param a         : int       = 1                   # first
param long_name : list[isa] = [avx2]

pattern p(x) -> y is mlp {
  gate = linear(x)                                # gated
  very_long_name, _ = split(gate)
  down = linear(silu(gate) * very_long_name)
  y    = down?
}

rule r overrides lora.targets {
  match linear as l at "lm_head"
  where not (l has x) and not l.bias
  expect >= 0
  => lora_linear(
       rank  = 8,                                 # small
       alpha = 32) on l.a, l
  # nothing more
  => place(cpu)
}

# The end.
"""


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    return code, *capfd.readouterr()


def test_the_layout_is_canonical_and_stable() -> None:
    assert format_text(ROUGH, "a.ktr") == SMOOTH
    assert format_text(SMOOTH, "a.ktr") == SMOOTH
    assert format_text("", "a.ktr") == ""


@pytest.mark.parametrize("path", sorted(resources.rules().rglob("*.ktr")), ids=lambda path: path.stem)
def test_shipped_files_are_laid_out_canonically(path: Path) -> None:
    assert format_text(path.read_text(), path.name) == path.read_text()


def test_a_file_is_replaced_with_its_mode_and_through_its_link(tmp_path: Path) -> None:
    path, link = tmp_path / "a.ktr", tmp_path / "link.ktr"
    path.write_bytes(b"\xef\xbb\xbf" + ROUGH.replace("\n", "\r\n").encode())
    path.chmod(0o640)
    link.symlink_to(path)
    assert format_file(link, write=False)
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert format_file(link, write=True)
    assert link.is_symlink()
    assert path.read_text() == SMOOTH
    assert path.stat().st_mode & 0o777 == 0o640
    assert not format_file(path, write=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.ktr", "link.ktr"]


def test_a_file_that_does_not_parse_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.ktr"
    path.write_text("rule r { match }")
    with pytest.raises(InputRefused) as refusal:
        format_file(path, write=True)
    assert refusal.value.sources == {str(path): "rule r { match }"}
    assert path.read_text() == "rule r { match }"


def test_the_command_says_and_checks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "a.ktr"
    path.write_text(ROUGH)
    assert run(capfd, "fmt", str(tmp_path), "--check")[0] == 1
    assert path.read_text() == ROUGH
    assert run(capfd, "fmt", str(tmp_path))[0] == 0
    assert path.read_text() == SMOOTH
    assert run(capfd, "fmt", str(path), "--check")[0] == 0
    code, _, err = run(capfd, "fmt", str(tmp_path / "none.ktr"))
    assert (code, "E011" in err) == (2, True)


def test_the_other_commands_for_people_who_write_rules(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "explain", "e040")
    assert (code, out.splitlines()[0]) == (0, "E040: two rewrites for one slot")
    assert run(capfd, "explain", "E999")[0] == 2
    path = tmp_path / "a.ktr"
    path.write_text("rule r { match linear => place(gpu) }")
    code, out, _ = run(capfd, "check", str(path), "--json")
    (found,) = json.loads(out)["diagnostics"]
    assert (code, found["lsp"]["range"]["start"]) == (2, {"line": 0, "character": 31})


def test_a_layout_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ktr"
    path.write_text(ROUGH)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.rename", refuse)
    with pytest.raises(HostLacks) as lacks:
        format_file(path, write=True)
    assert lacks.value.diagnostics[0].code == "E011"
    assert [file.name for file in tmp_path.iterdir()] == ["a.ktr"]
    assert path.read_text() == ROUGH
