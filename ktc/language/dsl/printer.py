"""Print a syntax tree in the canonical layout: `parse(print_module(m)) == m` for every module that parses.

A comment keeps its position: before the same item, or at the end of the same line.
"""

from __future__ import annotations

from itertools import groupby

from ktc.language.dsl import syntax
from ktc.language.dsl.schema import INFIX
from ktc.language.dsl.trivia import Line, with_comments

_BINARY_LEVELS = {"or": 1, "and": 2, "+": 6, "-": 6, "*": 7, "/": 7, "%": 7}
_COMPARISON, _RANGE, _SUM, _NEGATIVE = 4, 5, 6, 8
_ALTERNATIVES, _TERM_SUM, _TERM_PRODUCT, _POSTFIX, _FACTOR = range(1, 6)
_TERM_LEVELS = {"add": _TERM_SUM, "sub": _TERM_SUM, "mul": _TERM_PRODUCT, "div": _TERM_PRODUCT}
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_INDENT = "  "
_ALIGNED = 12  # longer names do not affect the alignment
_ARGUMENT = " " * 7  # below the target's name


def print_module(module: syntax.Module) -> str:
    """Return the module's text, ending in a newline; empty for an empty module."""
    lines: list[Line] = []
    for _, run in groupby(module.declarations, key=_kind_of_line):
        group = tuple(run)
        if lines:
            lines.append(Line("", 0))
        lines += _params(group) if isinstance(group[0], syntax.Param) else _declarations(group)
    return "".join(f"{text}\n" for text in with_comments(lines, module.comments))


def print_expression(expression: syntax.Expression) -> str:
    """Return one expression, with the minimal parentheses."""
    return _expression(expression, 0)


def _kind_of_line(declaration: syntax.Declaration) -> object:
    """Return the key that groups consecutive one-line declarations; other declarations are separate."""
    one_line = isinstance(declaration, syntax.Import | syntax.Param | syntax.Require)
    return type(declaration) if one_line else id(declaration)


# Declarations --------------------------------------------------------------------------------------------------------
def _declarations(group: tuple[syntax.Declaration, ...]) -> list[Line]:
    return [line for declaration in group for line in _declaration(declaration)]


def _declaration(declaration: syntax.Declaration) -> list[Line]:
    match declaration:
        case syntax.Import():
            return [_line(declaration, _import(declaration))]
        case syntax.Param():
            return _params((declaration,))
        case syntax.Require():
            otherwise = f" else {_text(declaration.message)}" if declaration.message else ""
            return [_line(declaration, f"require {print_expression(declaration.condition)}{otherwise}")]
        case syntax.Pattern():
            return _pattern(declaration)
        case syntax.Rule():
            return _rule(declaration)
        case syntax.Block():
            return _block(declaration)


def _import(declaration: syntax.Import) -> str:
    alias = f" as {declaration.alias.text}" if declaration.alias else ""
    arguments = f" with {_arguments(declaration.arguments)}" if declaration.arguments else ""
    return f"import {_text(declaration.path)}{alias}{arguments}"


def _params(group: tuple[syntax.Declaration, ...]) -> list[Line]:
    """Return a group of parameters, their types and values aligned."""
    params = [declaration for declaration in group if isinstance(declaration, syntax.Param)]
    name = max(len(param.name.text) for param in params)
    type_ = max(len(_type(param.type)) for param in params)
    return [
        _line(param, f"param {param.name.text:<{name}} : {_type(param.type):<{type_}} = {_value(param)}")
        for param in params
    ]


def _type(type_: syntax.TypeName) -> str:
    return f"{type_.name.text}[{type_.element.text}]" if type_.element else type_.name.text


def _value(param: syntax.Param) -> str:
    domain = f" in {_expression(param.domain, _RANGE)}" if param.domain else ""
    return f"{_expression(param.default, _RANGE)}{domain}"


def _pattern(declaration: syntax.Pattern) -> list[Line]:
    role = f" is {declaration.role.text}" if declaration.role else ""
    head = f"pattern {declaration.name.text}({_names(declaration.inputs)}) -> {_names(declaration.outputs)}{role} {{"
    width = max((width for b in declaration.bindings if (width := len(_names(b.names))) <= _ALIGNED), default=0)
    body = [
        _line(binding, f"{_INDENT}{_names(binding.names).ljust(width)} = {_term(binding.term, 0)}")
        for binding in declaration.bindings
    ]
    return [_line(declaration, head), *body, _closing(declaration)]


def _rule(declaration: syntax.Rule) -> list[Line]:
    overrides = f" overrides {_list(declaration.overrides)}" if declaration.overrides else ""
    lines = [_line(declaration, f"rule {declaration.name.text}{overrides} {{")]
    lines.append(_line(declaration.root, f"{_INDENT}match {_selector(declaration)}"))
    if declaration.where is not None:
        lines.append(_line(declaration.where, f"{_INDENT}where {print_expression(declaration.where)}"))
    if declaration.expect is not None:
        operator = "" if declaration.expect.operator == "==" else f"{declaration.expect.operator} "
        count = _expression(declaration.expect.count, _RANGE)
        lines.append(_line(declaration.expect, f"{_INDENT}expect {operator}{count}"))
    lines += [line for action in declaration.actions for line in _action(action)]
    return [*lines, _closing(declaration)]


def _selector(rule: syntax.Rule) -> str:
    alias = f" as {rule.alias.text}" if rule.alias else ""
    at = f" at {', '.join(map(_text, rule.at))}" if rule.at else ""
    except_ = f" except {', '.join(map(_text, rule.except_))}" if rule.except_ else ""
    return f"{rule.root}{alias}{at}{except_}"


def _action(action: syntax.Action) -> list[Line]:
    """Return an action on one line, or with a line for each setting where the author has broken it."""
    on = f" on {_list(action.on)}" if action.on else ""
    if all(argument.span.line == action.span.line for argument in action.arguments):
        arguments = _arguments(action.arguments) if action.arguments else ""
        return [_line(action, f"{_INDENT}=> {action.target.text}{arguments}{on}")]
    width = max(len(argument.name or "") for argument in action.arguments)
    last = action.arguments[-1]
    lines = [_line(action, f"{_INDENT}=> {action.target.text}(")]
    for argument in action.arguments:
        name = f"{argument.name:<{width}} = " if argument.name else ""
        end = f"){on}" if argument is last else ","
        lines.append(_line(argument, f"{_ARGUMENT}{name}{print_expression(argument.value)}{end}"))
    return lines


def _block(declaration: syntax.Block) -> list[Line]:
    width = max((len(setting.key.text) for setting in declaration.settings), default=0)
    body = [
        _line(setting, f"{_INDENT}{setting.key.text.ljust(width)} = {print_expression(setting.value)}")
        for setting in declaration.settings
    ]
    return [_line(declaration, f"{declaration.kind} {{"), *body, _closing(declaration)]


# Terms of patterns ---------------------------------------------------------------------------------------------------
def _term(term: syntax.Term, level: int) -> str:
    """Return a term's text. `level` is the loosest binding that needs no parentheses here."""
    match term:
        case syntax.Use():
            return ".".join(term.parts)
        case syntax.Wildcard():
            return "_"
        case syntax.Maybe():
            return _enclose(f"{_term(term.term, _FACTOR)}?", _POSTFIX, level)
        case syntax.Alternatives():
            choices = " | ".join(_term(choice, _ALTERNATIVES + 1) for choice in term.choices)
            return _enclose(choices, _ALTERNATIVES, level)
        case syntax.Call(callee=(name,), operands=(left, right), attributes=()) if name in INFIX:
            binding = _TERM_LEVELS[name]
            return _enclose(f"{_term(left, binding)} {INFIX[name]} {_term(right, binding + 1)}", binding, level)
        case syntax.Call():
            operands = [_term(operand, 0) for operand in term.operands]
            attributes = [_argument(attribute) for attribute in term.attributes]
            return f"{'.'.join(term.callee)}({', '.join(operands + attributes)})"


# Expressions ---------------------------------------------------------------------------------------------------------
def _expression(expression: syntax.Expression, level: int) -> str:
    match expression:
        case syntax.Literal():
            return _literal(expression)
        case syntax.Reference():
            return ".".join(expression.parts)
        case syntax.ParamReference():
            return f"${expression.name}"
        case syntax.ListExpression():
            return f"[{', '.join(_expression(item, 0) for item in expression.items)}]"
        case syntax.RangeExpression():
            text = f"{_expression(expression.low, _SUM)}..{_expression(expression.high, _SUM)}"
            return _enclose(text, _RANGE, level)
        case syntax.Unary(operator="not"):
            return _enclose(f"not {_expression(expression.operand, _RANGE)}", 3, level)
        case syntax.Unary():
            return _enclose(f"-{_expression(expression.operand, _NEGATIVE)}", _NEGATIVE, level)
        case syntax.Has():
            return _enclose(f"{_expression(expression.subject, _RANGE)} has {expression.name}", _COMPARISON, level)
        case syntax.Binary():
            return _binary(expression, level)


def _binary(expression: syntax.Binary, level: int) -> str:
    binding = _BINARY_LEVELS.get(expression.operator, _COMPARISON)
    left_level = (
        binding + 1 if binding == _COMPARISON else binding
    )  # comparisons do not chain, other operators associate left
    left, right = _expression(expression.left, left_level), _expression(expression.right, binding + 1)
    return _enclose(f"{left} {expression.operator} {right}", binding, level)


def _literal(literal: syntax.Literal) -> str:
    match literal.value:
        case bool():
            return "true" if literal.value else "false"
        case int() if literal.type == "size":
            return _size(literal.value)
        case str() if literal.type == "string":
            return _quote(literal.value)
        case float():
            return repr(literal.value)
        case _:
            return str(literal.value)


def _size(size: int) -> str:
    unit, factor = next((unit, factor) for unit, factor in _UNITS if size % factor == 0 and (size or factor == 1))
    return f"{size // factor}{unit}"


# Small parts ---------------------------------------------------------------------------------------------------------
def _enclose(text: str, binding: int, level: int) -> str:
    return f"({text})" if binding < level else text


def _arguments(arguments: tuple[syntax.Argument, ...]) -> str:
    return f"({', '.join(map(_argument, arguments))})"


def _argument(argument: syntax.Argument) -> str:
    value = print_expression(argument.value)
    return f"{argument.name} = {value}" if argument.name else value


def _names(names: tuple[syntax.Name, ...]) -> str:
    return ", ".join(name.text for name in names)


def _list(names: tuple[syntax.QualifiedName, ...]) -> str:
    return ", ".join(map(str, names))


def _text(text: syntax.Text) -> str:
    return _quote(text.value)


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _line(node: syntax.Node, text: str) -> Line:
    return Line(text, node.span.line)


def _closing(declaration: syntax.Declaration) -> Line:
    return Line("}", declaration.span.end_line)
