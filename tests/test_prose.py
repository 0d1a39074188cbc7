"""Docstrings, comments, messages and pages use plain technical English: CONTRIBUTING.md, "Prose".

`HELD` names the paths that satisfy every check. A path that satisfies them is added there, until all of `TREE` is held.
`python tests/test_prose.py PATH...` prints the faults of any path.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREE = (
    "ktc",
    "rules",
    "grammar",
    "runtime",
    "templates",
    "benchmarks",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
)
HELD = (
    "CONTRIBUTING.md",
    "Makefile",
    "README.md",
    "benchmarks/attention_kernels.cpp",
    "benchmarks/check.py",
    "benchmarks/cpu_linears.py",
    "benchmarks/decode_attention.py",
    "benchmarks/few_rows.cpp",
    "benchmarks/format_consistency.py",
    "benchmarks/gguf_ranking.py",
    "benchmarks/kernel_threads.py",
    "benchmarks/learning/__init__.py",
    "benchmarks/learning/__main__.py",
    "benchmarks/learning/commands.py",
    "benchmarks/learning/corpus.py",
    "benchmarks/learning/data.py",
    "benchmarks/learning/experiment.py",
    "benchmarks/learning/modes.py",
    "benchmarks/learning/modes_page.py",
    "benchmarks/learning/page.py",
    "benchmarks/learning/pretrain.py",
    "benchmarks/learning/results.py",
    "benchmarks/linear_rows.cpp",
    "benchmarks/loading.py",
    "benchmarks/native_moe.cpp",
    "benchmarks/prefill_memory.py",
    "benchmarks/quantise_slice.py",
    "benchmarks/serving_engine.py",
    "benchmarks/serving_model.py",
    "docs",
    "grammar",
    "ktc/__init__.py",
    "ktc/__main__.py",
    "ktc/adapters",
    "ktc/stages/analysis.py",
    "ktc/tools/bench",
    "ktc/tools/measure",
    "ktc/foundation/assumed_rates.py",
    "ktc/foundation/host_writing.py",
    "ktc/foundation/measured_host.py",
    "ktc/foundation/rates.py",
    "ktc/foundation/rates_file.py",
    "ktc/foundation/toml_entries.py",
    "ktc/stages/capture",
    "ktc/model/checkpoint",
    "ktc/cli",
    "ktc/stages/codegen",
    "ktc/compiler.py",
    "ktc/foundation/decode.py",
    "ktc/diagnostics.py",
    "ktc/language/dsl",
    "ktc/foundation/environment.py",
    "ktc/inference/evaluate",
    "ktc/model/experts",
    "ktc/language/explain",
    "ktc/foundation/files.py",
    "ktc/foundation/formats.py",
    "ktc/inference/generate",
    "ktc/model/graph",
    "ktc/model/hf",
    "ktc/foundation/host.py",
    "ktc/foundation/host_file.py",
    "ktc/foundation/isa.py",
    "ktc/tools/kt_yaml",
    "ktc/model/linears",
    "ktc/stages/link",
    "ktc/tools/llama_factory",
    "ktc/stages/match",
    "ktc/model",
    "ktc/stages/pictures",
    "ktc/stages/plan",
    "ktc/stages/proof",
    "ktc/foundation/resources.py",
    "ktc/stages/rewrite",
    "ktc/inference/serving",
    "ktc/model/targets",
    "ktc/foundation/text_files.py",
    "ktc/training/trainers",
    "ktc/training/tune",
    "ktc/model/twin",
    "ktc/foundation/versions.py",
    "rules",
    "runtime",
    "templates",
)
WORDS_PER_SENTENCE = 45  # the goal is 25
MARKDOWN_COLUMNS = 100

# A phrase and the replacement. A space matches any run of spaces and line ends. Each phrase must be an idiom that is
# never the best wording: a phrase with false positives is narrowed or removed.
BANNED = {
    # negation
    r"(?<!there )\b(is|are|was|were|be) no(?! (longer|more|less|better|worse|different)\b) ": "not, invalid, missing",
    r"\b(that|which|who|what) (is|are|has|have) ((?-i:none)|nothing)\b|\bit is (?-i:none)\b": "not, missing, no X",
    r"\bnobody\b|\bno one\b": "not, unknown, or the passive",
    r"\bnothing but\b": "only",
    r"\band nothing else\b|\bnothing else (is|may|can|does)\b": "only",
    r"\blest\b": "so that ... not, to avoid",
    # clauses with what- and who-
    r"\b(whoever|whomever|whosever)\b": "the caller, the user, any process that",
    r"\bwho (does|is|has|sets|asks|reads|writes|uses|wants|types|says|needs)\b": "name them: users that, the caller",
    r"\bwhat (follows|comes|goes|remains|stays|lies|stands|is left|was left|is missing|is there|there is)\b": "name it",
    r"\bwhatever\b": "any X, every X",
    r"(?:^|(?<=[.;:] ))(?-i:What) [^?]*?(?:[.;:]|$)": "name it: no clause with What as a subject",
    r"(?:^|(?<=[.;:] ))(?-i:That) (a|an|the|it|no|every) [^?]*? (is|are|was|costs|needs) ": "the subject first",
    # things do not ask, want, stand, tell or know
    r"\bask(s|ed|ing)? for\b": "request, require, need",
    r"\bwants?\b|\bwanted\b": "need, require, expect",
    r"\b(stand|stands|stood|standing)\b(?! (for|in)\b)": "is, is stored, is written, precedes",
    r"\b(lie|lies|lying)\b(?! (down|to)\b)": "is in, is stored in, is located",
    r"\b(told|tells?)\b": "report, state, distinguish, determine",
    r"\b(spells?|spelt|spelled|misspelt)\b": "write, name, misspelled",
    r"\bis told\b|\bare told\b": "receives, is reported",
    r"\bleans? on\b": "depends on",
    # home-made words
    r"\b(go|goes|went|going) on\b": "continue",
    r"\banew\b|\bonce more\b": "again",
    r"[,;] (or )?else,? |\bwould else\b": "otherwise",
    r"\ball else\b": "everything else",
    r"\bso (many|much)(?! (that|as)\b)\b": "this many, at most N",
    r"\bas many as\b(?! \d)": "the same number as",
    r"\bto be had\b": "available",
    r"\bthe likeliest\b|\blikeliest\b": "most probable",
    r"\bmended?\b": "fix",
    r"\bdealt\b": "distributed",
    r"\bmay not be\b": "must not be, cannot be",
    r"\bshall\b": "must",
    r"\bgiv(e|es|en|ing) back\b|\bgave back\b": "return, release",
    r"\btak(e|es|en) for\b": "interpret as",
    r"\bin (its|their) place\b": "instead",
    r"\bis meant\b|\bare meant\b|\bwas meant\b|\bwere meant\b": "is intended, refers to",
    r"\b(a|of|from) strangers?\b": "untrusted",
    r"\blaid out so\b": "formatted",
    r"\bhowever (many|much|long|often|large)\b": "any number of",
    r"\bthe more .* the more\b": "grows with",
    r"\b(nor|neither) (is|are|does|do|has|have|can|may)\b": "and X is not",
    r"\bas (the|a) (file|checkpoint|model|config|program) (has|says|spells) (it|them|so)\b": "unchanged, as stored",
    r", for (it|they|there|nobody|nothing|no|this|that) ": "because",
}

# A function's docstring is an imperative summary.
NOT_IMPERATIVE = re.compile(
    r"(The|A|An|All|Every|Each|One|No|Its|This|These|Those|That|What|Whether|Where|How|Who|Which|Why|If|Both|True|False)\b"
    r"|(Returns|Raises|Yields|Reads|Writes|Makes|Gives|Checks|Takes|Loads|Runs|Builds|Sets|Finds|Computes|Creates)\b"
)

_PHRASES = [
    (re.compile(p.replace(" )", r"\s)").replace(" ", r"\s+"), re.IGNORECASE), instead) for p, instead in BANNED.items()
]
_CODE_SPAN = re.compile(r"`[^`]*`")
_SENTENCE = re.compile(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*(?=[*-] |\d+\. |Args:|Returns:|Raises:)")
_WORD = re.compile(r"[A-Za-z`]\S*")
_FENCE = re.compile(r"^( *)```.*?^\1```[^\n]*$", re.MULTILINE | re.DOTALL)
_MEASURED = re.compile(r"<!-- measured -->.*?<!-- end of what is measured -->", re.DOTALL)  # a program's output
_COMMENT = {
    ".py": re.compile(r"^(?P<before>[^\"'\n]*?)(?<!\S)#(?!!)(?P<text>.*)$", re.MULTILINE),
    "#": re.compile(r"^(?P<before>[^\"'\n]*?)(?<!\S)#(?P<text>.*)$", re.MULTILINE),
    "//": re.compile(r"^(?P<before>.*?)//+(?P<text>.*)$", re.MULTILINE),
    ".j2": re.compile(r"^(?P<before>.*?)(?://+|\{#-?)(?P<text>.*?)(?:-?#\})?$", re.MULTILINE),
}
_KIND = {".py": ".py", ".hpp": "//", ".cpp": "//", ".lark": "//", ".j2": ".j2", ".ktr": "#", "": "#"}


@dataclass(frozen=True, slots=True)
class Text:
    """A docstring, a message, a paragraph or a block of comment lines, with the number of its first line."""

    line: int
    text: str


def faults(path: Path) -> list[str]:
    """Return every fault of a file as `file:line: fault`."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        found = [*_wide_lines(source)]
        texts = [*_paragraphs(source)]
    else:
        tree = ast.parse(source) if path.suffix == ".py" else None
        found = [*_summaries(tree)] if tree else []
        texts = [*_comments(source, _COMMENT[_KIND[path.suffix]]), *(_literals(tree) if tree else ())]
    for text in texts:
        found += [*_phrases(text), *_long_sentences(text)]
    name = path.relative_to(ROOT)
    return [f"{name}:{line}: {fault}" for line, fault in sorted(found)]


def files(prefix: str) -> list[Path]:
    """Return the files with prose at or under a path of the repository."""
    path = ROOT / prefix
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in {*_KIND, ".md"} - {""})


def _phrases(text: Text) -> Iterator[tuple[int, str]]:
    plain = _CODE_SPAN.sub(lambda span: "`" + "_" * (len(span[0]) - 2) + "`", text.text)
    for phrase, instead in _PHRASES:
        for hit in phrase.finditer(plain):
            line = text.line + plain.count("\n", 0, hit.start())
            words = " ".join(hit[0].split())
            yield line, f'"{words[:40]}": write {instead}'


def _long_sentences(text: Text) -> Iterator[tuple[int, str]]:
    plain = _CODE_SPAN.sub(lambda span: "`" + "_" * (len(span[0]) - 2) + "`", text.text)
    start = 0
    for end in [*(hit.start() for hit in _SENTENCE.finditer(plain)), len(plain)]:
        words = len(_WORD.findall(plain[start:end]))
        if words > WORDS_PER_SENTENCE:
            yield text.line + plain.count("\n", 0, start), f"a sentence of {words} words: at most {WORDS_PER_SENTENCE}"
        start = end


def _summaries(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or "property" in ast.unparse(
            node.decorator_list
        ):
            continue
        docstring = ast.get_docstring(node)
        if docstring and (start := NOT_IMPERATIVE.match(docstring)):
            yield node.body[0].lineno, f'"{start[0]} ...": a function\'s docstring starts with a verb in the imperative'


def _literals(tree: ast.Module) -> Iterator[Text]:
    """Yield strings and f-strings that are sentences: docstrings, messages, hints, help texts."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else "`_`" for p in node.values]
            yield Text(node.lineno, "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield Text(node.lineno, node.value)


def _comments(source: str, pattern: re.Pattern[str]) -> Iterator[Text]:
    """Yield comments; lines of comments alone that follow each other are one text."""
    block: list[str] = []
    first = last = line = start = 0
    for hit in pattern.finditer(source):
        line += source.count("\n", start, hit.start())
        start = hit.start()
        alone = not hit["before"].strip()
        if block and alone and line == last + 1 and hit["text"].strip():
            block.append(hit["text"])
        else:
            if block:
                yield Text(first + 1, "\n".join(block))
            block, first = [hit["text"]], line
        last = line
    if block:
        yield Text(first + 1, "\n".join(block))


def _paragraphs(source: str) -> Iterator[Text]:
    prose = _MEASURED.sub(_blank, _FENCE.sub(_blank, source))
    line = 1
    for paragraph in re.split(r"\n(?=\s*\n|#|\||\s*[*-] |\s*\d+\. )", prose):
        if not paragraph.lstrip().startswith(("|", "<", "#")):
            yield Text(line, paragraph)
        line += paragraph.count("\n") + 1


def _blank(block: re.Match[str]) -> str:
    return "\n" * block[0].count("\n")


def _wide_lines(source: str) -> Iterator[tuple[int, str]]:
    prose = _MEASURED.sub(_blank, _FENCE.sub(_blank, source))
    for number, line in enumerate(prose.splitlines(), 1):
        if len(line) > MARKDOWN_COLUMNS and not line.startswith(("|", "<")) and " " in line[:MARKDOWN_COLUMNS].strip():
            yield number, f"{len(line)} columns: at most {MARKDOWN_COLUMNS}"


@pytest.mark.parametrize("prefix", HELD)
def test_prose_is_plain_technical_english(prefix: str) -> None:
    found = [fault for path in files(prefix) for fault in faults(path)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('"""A file that is no JSON."""', '"is no"'),
        ('"""Reads a file\n\nlest it be lost."""', '"lest"'),
        ("x = 1  # nobody reads it", '"nobody"'),
        ("# one line goes\n# on here", '"goes on"'),
        ('x = f"{1} stands here"', '"stands"'),
        ('def f():\n    """The value."""', "imperative"),
        ('"""' + "word " * 46 + '"""', "46 words"),
    ],
)
def test_a_fault_is_found(source: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(source)
    assert any(fault in line for line in faults(tmp_path / "module.py"))


@pytest.mark.parametrize(
    "source",
    [
        '"""Return the path. There is no limit, and `is no` is code."""',
        "x = 'it is None'",
        "# T stands for tokens",
        'class A:\n    @property\n    def f(self):\n        """The value."""',
    ],
)
def test_plain_prose_has_no_fault(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(source)
    assert faults(tmp_path / "module.py") == []


if __name__ == "__main__":
    for argument in sys.argv[1:] or TREE:
        print(*(fault for path in files(argument) for fault in faults(path)), sep="\n")
