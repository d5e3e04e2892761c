"""Python source as data: top-level bindings, their conditions, and one text per tree.

Only the standard library: a tree's text is the same under every Python that parses the source.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Where a name is used or bound, the prefix of a string, and comments on types change nothing that runs.
SILENT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


@dataclass(frozen=True)
class Guard:
    """One condition around a top-level statement: the branch, and the trees that decide whether it is taken."""

    branch: str
    nodes: tuple[ast.AST, ...]


@dataclass(frozen=True)
class Binding:
    """A top-level statement with the conditions around it, outermost first."""

    node: ast.AST
    guards: tuple[Guard, ...] = ()

    @property
    def nodes(self) -> Iterator[ast.AST]:
        """Yield all trees that decide the statement's effect."""
        for guard in self.guards:
            yield from guard.nodes
        yield self.node



def statements(body: list[ast.stmt], guards: tuple[Guard, ...] = ()) -> Iterator[Binding]:
    """Yield the statements of a module; those inside top-level `if`, `try`, `for`, … come with their conditions.

    The head of a loop or a `with` is a statement of its own if it binds names; so is a test with `x := …`.
    `if TYPE_CHECKING:` never runs.
    """
    for node in body:
        if isinstance(node, ast.If | ast.While) and any(isinstance(n, ast.NamedExpr) for n in ast.walk(node.test)):
            yield Binding(ast.Expr(node.test), guards)
        if isinstance(node, ast.If):
            if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
                yield from statements(node.body, (*guards, Guard("if", (node.test,))))
            yield from statements(node.orelse, (*guards, Guard("if not", (node.test,))))
        elif isinstance(node, ast.Try | ast.TryStar):
            tried = tuple(node.body)
            yield from statements(node.body, (*guards, Guard("try", tuple(h.type for h in node.handlers if h.type))))
            for handler in node.handlers:
                yield from statements(handler.body, (*guards, Guard("except", (*tried, *([handler.type] if handler.type else [])))))
            yield from statements(node.orelse, (*guards, Guard("try else", tried)))
            yield from statements(node.finalbody, guards)
        elif isinstance(node, ast.For | ast.While):
            head = (node.target, node.iter) if isinstance(node, ast.For) else (node.test,)
            if isinstance(node, ast.For):
                yield Binding(node.target, (*guards, Guard("for", head)))
            yield from statements(node.body, (*guards, Guard("loop", head)))
            yield from statements(node.orelse, (*guards, Guard("loop else", (*head, *node.body))))
        elif isinstance(node, ast.With):
            inside = (*guards, Guard("with", tuple(node.items)))
            for item in node.items:
                if item.optional_vars is not None:
                    yield Binding(item.optional_vars, inside)
            yield from statements(node.body, inside)
        elif isinstance(node, ast.Match):
            for index, case in enumerate(node.cases):
                tests = [n for c in node.cases[: index + 1] for n in (c.pattern, c.guard) if n is not None]
                yield from statements(case.body, (*guards, Guard("match", (node.subject, *tests))))
        else:
            yield Binding(node, guards)


def bound(node: ast.AST) -> set[str]:
    """Return the names that a top-level statement (other than an import) binds or changes, including `x := …`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets: list[ast.AST] = [n.target for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
    if isinstance(node, ast.Assign):
        targets += node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets.append(node.target)
    elif isinstance(node, ast.Delete):
        targets += node.targets
    elif isinstance(node, ast.expr):  # the head of a loop or of a `with`
        targets.append(node)
    elif type(node).__name__ == "TypeAlias":  # Python 3.12
        targets.append(node.name)  # type: ignore[attr-defined]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def text(node: Any, reference: Callable[[ast.AST], str | None] = lambda node: None) -> str:
    """Return one text for a tree, without what only Python's version decides.

    `ast.dump` and `ast.unparse` differ between minor versions: in empty fields, fields that were added, and quotes.

    Args:
        node: a tree, a list of trees, or the value of a field.
        reference: called with each tree, outer ones first; what it returns stands in place of the tree's own text. A tree with the
            text "" is left out of its list.
    """
    if isinstance(node, list):
        return "[" + ",".join(shown for item in node if (shown := text(item, reference))) + "]"
    if isinstance(node, ast.Constant):
        # `ascii`: which characters `repr` shows as they are depends on the Unicode tables of the interpreter.
        return f"{type(node.value).__name__}:{node.value!a}"
    if not isinstance(node, ast.AST):
        return ascii(node)
    if (replaced := reference(node)) is not None:
        return replaced
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.JoinedStr):
        fields["values"] = _joined(node.values)
    texts = [
        f"{name}={text(value, reference)}" for name, value in fields.items() if name not in SILENT and value is not None and value != []
    ]
    return f"{type(node).__name__}({','.join(texts)})"


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """Return the pieces of an f-string with neighbouring texts joined: parsers cut them differently."""
    pieces: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and pieces and isinstance(pieces[-1], ast.Constant):
            pieces[-1] = ast.Constant(str(pieces[-1].value) + str(value.value))
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            pieces.append(value)
    return pieces
