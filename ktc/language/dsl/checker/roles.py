"""Check `is ROLE`: whether a pattern binds the members that the role promises."""

from __future__ import annotations

from collections.abc import Mapping

from ktc.diagnostics import Related, listing, suggest
from ktc.language.dsl import syntax
from ktc.language.dsl.checker.bindings import Bound
from ktc.language.dsl.checker.report import Report
from ktc.language.dsl.schema import ROLES


def check_role(declaration: syntax.Pattern, name: syntax.Name, bound: Mapping[str, Bound], report: Report) -> None:
    """Report members that are missing, of the wrong kind, or optional although the role promises them."""
    role = ROLES.get(name.text)
    if role is None:
        hint = suggest(name.text, ROLES) or f"roles: {listing(ROLES)}"
        report.error("E021", f"unknown role `{name.text}`", name.span, hint=hint)
        return
    for member, kind in {**role.members, **role.optional}.items():
        binding = bound.get(member)
        if binding is None and member in role.members:
            message = f"pattern `{declaration.name.text}` is declared `{name.text}` but binds no `{member}`"
            label = f"`{name.text}` needs {listing(role.members)}"
            report.error("E034", message, name.span, label=label)
        elif binding is not None and kind not in (binding.capture.kind, binding.capture.role):
            message = (
                f"`{member}` must be {kind} in a pattern that is `{name.text}`, found {binding.capture.describe()}"
            )
            report.error("E034", message, binding.span, related=(Related(name.span, "declared here"),))
        elif binding is not None and member in role.members and binding.capture.optional:
            message = f"`{member}` may be absent, but `{name.text}` promises it"
            report.error("E034", message, binding.span, related=(Related(name.span, "promised here"),))
