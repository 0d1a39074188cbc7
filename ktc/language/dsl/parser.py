"""Parse the text of a `.ktr` file into a `syntax.Module`, or report all of its syntax errors together.

After an error, parsing resumes at the next line that begins a declaration, so one error does not hide another. The
declarations without errors can still be checked. Refused besides invalid syntax: input beyond the limits below.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput

from ktc.diagnostics import Diagnostic, InputRefused, Span
from ktc.foundation import resources
from ktc.language.dsl import syntax
from ktc.language.dsl.source_text import SourceText, count_words
from ktc.language.dsl.syntax_errors import explain
from ktc.language.dsl.tree_builder import TreeBuilder

MAX_BYTES = 2**20
MAX_WORDS = 30_000  # of a program: about 1,500 rules, which are checked within a second
MAX_DECLARATIONS = 2000
MAX_NESTING = 64  # of brackets
MAX_DEPTH = 192  # of the tree: chains such as `a and b and ...` count, parentheses alone do not
MAX_ERRORS = 20  # syntax errors reported per file
_REMEMBERED, _MOST_REMEMBERED = 64, 1 << 16  # texts, and characters of one: programs import the same few libraries


def parse(text: str, file: str) -> syntax.Module:
    """Return the file's declarations and comments. `file` is the name that spans carry. Raises InputRefused."""
    module, diagnostics = parse_recovering(text, file)
    if diagnostics:
        raise InputRefused(*diagnostics)
    return module


def parse_recovering(text: str, file: str) -> tuple[syntax.Module, list[Diagnostic]]:
    """Return the declarations without errors, and the errors of the others.

    Raises InputRefused for a file beyond a limit.
    """
    parsed = _parsed if len(text) <= _MOST_REMEMBERED else _parsed.__wrapped__
    module, diagnostics = parsed(text, file)
    return module, list(diagnostics)


@lru_cache(_REMEMBERED)
def _parsed(text: str, file: str) -> tuple[syntax.Module, tuple[Diagnostic, ...]]:
    source = SourceText(text, file)
    if refusal := _over_limits(source):
        raise InputRefused(refusal)
    trees, diagnostics = _parse_declarations(source)
    declarations: list[syntax.Declaration] = []
    for tree in trees:
        builder = TreeBuilder(file)
        declaration: syntax.Declaration = builder.build(tree)
        diagnostics += builder.diagnostics
        declarations += [] if builder.diagnostics else [declaration]
    module = syntax.Module(file, tuple(declarations), source.comments(), span=source.span(0, len(text)))
    return module, tuple(sorted(diagnostics, key=_position))


def parse_value(text: str, file: str) -> syntax.Expression:
    """Return one expression with the syntax of a parameter's default value. Raises InputRefused."""
    source = SourceText(text, file)
    if refusal := _over_limits(source):
        raise InputRefused(refusal)
    try:
        tree = _lark().parse(text, start="range")
    except UnexpectedInput as error:
        raise InputRefused(explain(error, source)) from error
    if refusal := _too_deep(tree, file):
        raise InputRefused(refusal)
    builder = TreeBuilder(file)
    expression: syntax.Expression = builder.build(tree)
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
    """Return the declarations that parse, and the errors. After an error, the remaining text is parsed separately."""
    diagnostics: list[Diagnostic] = []
    text: str | None = source.text
    while text is not None and len(diagnostics) < MAX_ERRORS:
        try:
            root = _lark().parse(text, start="start")
        except UnexpectedInput as error:
            diagnostics.append(explain(error, source))
            resume = source.next_declaration(_resume_after(error, source))
            text = source.from_declaration(resume) if resume is not None else None
        else:
            if not diagnostics:
                return _declarations(root.children, source)
            break
    return [tree for text in source.declarations() for tree in _parse_one(text)], diagnostics


def _parse_one(text: str) -> list[Tree[Token]]:
    """Return the declaration of a text as a list of one; empty if it does not parse or is nested too deeply."""
    try:
        root = _lark().parse(text, start="start")
    except UnexpectedInput:
        return []
    return [tree for tree in root.children if isinstance(tree, Tree) and not _too_deep(tree, "")]


def _resume_after(error: UnexpectedInput, source: SourceText) -> int:
    """Return where to resume: at the offending word, which may itself begin a declaration."""
    if error.line < 1:  # the end of the file has no position
        return len(source.text)
    return source.offset(error.line, error.column)


def _declarations(
    children: Sequence[Tree[Token] | Token], source: SourceText
) -> tuple[list[Tree[Token]], list[Diagnostic]]:
    trees = [child for child in children if isinstance(child, Tree)]
    if len(trees) > MAX_DECLARATIONS:
        excess = trees[MAX_DECLARATIONS].meta
        span = Span(source.file, excess.line, excess.column, excess.end_line, excess.end_column)
        return [], [Diagnostic("E013", f"a file has at most {MAX_DECLARATIONS} declarations", span)]
    deep = {index: refusal for index, tree in enumerate(trees) if (refusal := _too_deep(tree, source.file))}
    return [tree for index, tree in enumerate(trees) if index not in deep], [*deep.values()]


def _over_limits(source: SourceText) -> Diagnostic | None:
    if len(source.text.encode()) > MAX_BYTES:
        return Diagnostic("E013", f"a file has at most {MAX_BYTES} bytes", Span(source.file, 1, 1, 1, 1))
    if count_words(source.text) > MAX_WORDS:
        return Diagnostic("E013", f"a program has at most {MAX_WORDS} words", Span(source.file, 1, 1, 1, 1))
    if span := source.too_deep(MAX_NESTING):
        return Diagnostic("E013", f"brackets are nested deeper than {MAX_NESTING}", span)
    return None


def _too_deep(tree: Tree[Token], file: str) -> Diagnostic | None:
    """Check the depth with an explicit stack, before any recursion over the tree."""
    todo: list[tuple[Tree[Token] | Token, int]] = [(tree, 1)]
    while todo:
        node, depth = todo.pop()
        if not isinstance(node, Tree) or node.data == "literal":
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
