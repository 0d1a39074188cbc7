"""The text of a `.ktr` file to a `syntax.Module`, or all of its syntax errors at once.

After an error parsing resumes at the next line that begins a declaration, so one slip does not hide another. Refused
besides bad syntax: a file, nesting, expressions or a number of declarations over the limits below.
"""

from __future__ import annotations

from functools import cache

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput

from ktc import resources
from ktc.diagnostics import Diagnostic, InputRefused, Span
from ktc.dsl import syntax
from ktc.dsl.source_text import SourceText, count_words
from ktc.dsl.syntax_errors import explain
from ktc.dsl.tree_builder import TreeBuilder

MAX_BYTES = 2**20
MAX_WORDS = 30_000  # of a program: about 1,500 rules, which are checked within a second
MAX_DECLARATIONS = 2000
MAX_NESTING = 64  # of brackets
MAX_DEPTH = 192  # of the tree: chains such as `a and b and ...` count, parentheses alone do not
MAX_ERRORS = 20  # syntax errors reported per file


def parse(text: str, file: str) -> syntax.Module:
    """The file's declarations and comments. `file` is the name that spans carry. Raises InputRefused."""
    source = SourceText(text, file)
    if refusal := _over_limits(source):
        raise InputRefused(refusal)
    trees, diagnostics = _parse_declarations(source)
    builder = TreeBuilder(file)
    declarations = tuple(builder.declaration(tree) for tree in trees)
    diagnostics += builder.diagnostics
    if diagnostics:
        raise InputRefused(*sorted(diagnostics, key=_position))
    return syntax.Module(file, declarations, source.comments(), span=source.span(0, len(text)))


def parse_value(text: str, file: str) -> syntax.Expression:
    """One expression as it may stand after `param x : T =`. Raises InputRefused."""
    source = SourceText(text, file)
    if refusal := _over_limits(source):
        raise InputRefused(refusal)
    try:
        branch = _lark().parse(text, start="range")
    except UnexpectedInput as error:
        raise InputRefused(explain(error, source)) from error
    if refusal := _too_deep(branch, file):
        raise InputRefused(refusal)
    builder = TreeBuilder(file)
    expression = builder.expression(branch)
    if builder.diagnostics:
        raise InputRefused(*builder.diagnostics)
    return expression


@cache
def _lark() -> Lark:
    grammar = (resources.grammar() / "ktr.lark").read_text(encoding="utf-8")
    return Lark(
        grammar,
        parser="lalr",
        lexer="contextual",
        start=["start", "range"],
        propagate_positions=True,
        maybe_placeholders=True,
    )


def _parse_declarations(source: SourceText) -> tuple[list[Tree[Token]], list[Diagnostic]]:
    """The declarations of an error-free file, or its errors: after one, what follows is parsed on its own."""
    diagnostics: list[Diagnostic] = []
    text: str = source.text
    while len(diagnostics) < MAX_ERRORS:
        try:
            root = _lark().parse(text, start="start")
        except UnexpectedInput as error:
            diagnostics.append(explain(error, source))
            resume = source.next_declaration(_resume_after(error, source))
            if resume is None:
                return [], diagnostics
            text = source.from_declaration(resume)
            continue
        if not diagnostics:
            return _declarations(root, source)
        return [], diagnostics
    return [], diagnostics


def _resume_after(error: UnexpectedInput, source: SourceText) -> int:
    """Where to look for the next declaration: at the offending word, which may itself begin one."""
    if error.line < 1:  # the end of the file has no position
        return len(source.text)
    return source.offset(error.line, error.column)


def _declarations(root: Tree[Token], source: SourceText) -> tuple[list[Tree[Token]], list[Diagnostic]]:
    trees = [child for child in root.children if isinstance(child, Tree)]
    if len(trees) > MAX_DECLARATIONS:
        excess = trees[MAX_DECLARATIONS].meta
        span = Span(source.file, excess.line, excess.column, excess.end_line, excess.end_column)
        return [], [Diagnostic("E013", f"a file has at most {MAX_DECLARATIONS} declarations", span)]
    deep = [refusal for tree in trees if (refusal := _too_deep(tree, source.file))]
    return ([], deep) if deep else (trees, [])


def _over_limits(source: SourceText) -> Diagnostic | None:
    if len(source.text.encode()) > MAX_BYTES:
        return Diagnostic("E013", f"a file has at most {MAX_BYTES} bytes", Span(source.file, 1, 1, 1, 1))
    if count_words(source.text) > MAX_WORDS:
        return Diagnostic("E013", f"a program has at most {MAX_WORDS} words", Span(source.file, 1, 1, 1, 1))
    if span := source.too_deep(MAX_NESTING):
        return Diagnostic("E013", f"brackets are nested deeper than {MAX_NESTING}", span)
    return None


def _too_deep(branch: Tree[Token] | Token, file: str) -> Diagnostic | None:
    """Checked with a stack of our own before anything recurses over the tree."""
    todo = [(branch, 1)]
    while todo:
        node, depth = todo.pop()
        if not isinstance(node, Tree):
            continue
        if depth > MAX_DEPTH:
            span = Span(file, node.meta.line, node.meta.column, node.meta.end_line, node.meta.end_column)
            return Diagnostic(
                "E013", f"an expression has at most {MAX_DEPTH} levels", span, hint="split it, or use `in [...]`"
            )
        todo += [(child, depth + 1) for child in node.children]
    return None


def _position(diagnostic: Diagnostic) -> tuple[int, int]:
    return (diagnostic.span.line, diagnostic.span.column) if diagnostic.span else (0, 0)
