"""Canonical statements: without docstrings, annotations, bounds, error texts and local names, which change no output.

Only the standard library, as in `syntax`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

# What a field of a configuration takes is checked before a run; the value itself is in the key.
FIELD = frozenset((
    "description", "title", "examples", "ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern", "json_schema_extra",
))  # fmt: skip
# What a stage declares for the time before it runs, or in place of its code.
DECLARATION = frozenset(("needs", "version", "device"))
SEES_NAMES = frozenset(("locals", "vars", "eval", "exec", "dir"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)


def canonical(node: ast.AST) -> tuple[ast.AST, list[ast.AST]]:
    """Return the canonical statement, and the annotations of its classes' fields.

    An annotation's names are reached but not hashed, except for the arguments of `Annotated` (such as a rule of `select`).
    The tree is changed in place.
    """
    worker = _Canonical()
    return worker.visit(node), worker.annotations


@dataclass
class Scope:
    """The names of a function, a class or a comprehension: numbered ones, and ones that keep their name."""

    renamed: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    is_class: bool = False


class _Canonical(ast.NodeTransformer):
    def __init__(self) -> None:
        self.annotations: list[ast.AST] = []
        self.scopes: list[Scope] = []

    # --- scopes --------------------------------------------------------------------------------------

    def _named(self, name: str) -> str:
        for index, scope in enumerate(reversed(self.scopes)):
            if scope.is_class and index:
                continue  # a class's names are not seen in its methods
            if name in scope.renamed:
                return scope.renamed[name]
            if name in scope.kept:
                return name
        return name

    def _numbered(self, names: Iterator[str], kept: set[str], outer: Collection[str] = ()) -> Scope:
        scope = Scope(kept=kept)
        for name in names:
            if name not in kept and name not in outer and name not in scope.renamed:
                scope.renamed[name] = f"{len(self.scopes)}.{len(scope.renamed)}"
        return scope

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._named(node.id)
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        node.names = [self._named(name) for name in node.names]
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = node.name and self._named(node.name)
        return self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> ast.AST:
        node.name = node.name and self._named(node.name)
        return self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> ast.AST:
        node.name = node.name and self._named(node.name)
        return node

    def visit_MatchMapping(self, node: ast.MatchMapping) -> ast.AST:
        node.rest = node.rest and self._named(node.rest)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.decorator_list = [self.visit(item) for item in node.decorator_list]
        node.returns = None
        for argument in _arguments(node.args):
            argument.annotation = None
        node.args = self.visit(node.args)
        node.body = _without_docstring(node.body)
        inside = _inside(node.body)
        kept = {argument.arg for argument in _arguments(node.args)} | _fixed_names(inside)
        outer = {name for item in inside if isinstance(item, ast.Nonlocal) for name in item.names}
        self.scopes.append(self._numbered(iter(()) if _sees_names(inside) else _bound(inside), kept, outer))
        node.body = [made for item in node.body if (made := self.visit(item)) is not None] or [ast.Pass()]
        self.scopes.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.args = self.visit(node.args)
        self.scopes.append(self._numbered(_bound(_inside([node.body])), {argument.arg for argument in _arguments(node.args)}))
        node.body = self.visit(node.body)
        self.scopes.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [self.visit(item) for item in node.decorator_list]
        node.bases = [self.visit(item) for item in node.bases]
        node.keywords = [self.visit(item) for item in node.keywords]
        node.body = _without_docstring(node.body)
        inside = _inside(node.body)
        self.scopes.append(Scope(kept=_fixed_names(inside) | set(_bound(inside)), is_class=True))
        node.body = [made for item in node.body if (made := self.visit(item)) is not None] or [ast.Pass()]
        self.scopes.pop()
        return node

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> ast.AST:
        first = self.visit(node.generators[0].iter)  # evaluated outside
        names = (name for generator in node.generators for name in _bound(_inside([generator.target])))
        self.scopes.append(self._numbered(names, set()))
        node.generators[0].iter = ast.Constant(None)
        made = self.generic_visit(node)
        self.scopes.pop()
        node.generators[0].iter = first
        return made

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    # --- what does not count -------------------------------------------------------------------------

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        in_function = bool(self.scopes) and not self.scopes[-1].is_class
        if not in_function:
            self.annotations.append(node.annotation)
        marks = {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node.annotation) if isinstance(n, ast.Name | ast.Attribute)}
        # These make no field of a dataclass.
        special = sorted(marks & {"ClassVar", "InitVar", "KW_ONLY"})
        added = [] if in_function else [made for item in _added(node.annotation) if not _is_bare_field(made := self.visit(item))]
        word = ast.Constant(" ".join(special))
        node.annotation = ast.Tuple([word, *added], ast.Load()) if added else word
        node.target = self.visit(node.target)
        node.value = node.value and self.visit(node.value)
        if in_function:
            return ast.Assign([node.target], node.value) if node.value else ast.Pass()
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name == "Field":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in FIELD]
        elif name == "stage":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in DECLARATION]
        elif name.endswith(("Error", "Exception")):
            node.args = [item for item in node.args if not _is_text(item)]
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args = [item for item in node.exc.args if not _is_text(item)]
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.msg = None
        return self.generic_visit(node)


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    extra = [item for item in (arguments.vararg, arguments.kwarg) if item is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]


def _inside(nodes: Sequence[ast.AST], comprehensions: bool = False) -> list[ast.AST]:
    """Return the nodes of a scope in the order of the text, without nested scopes; a walrus leaves a comprehension."""
    found: list[ast.AST] = []
    todo = list(reversed(nodes))
    while todo:
        node = todo.pop()
        found.append(node)
        if not isinstance(node, SCOPES) and (comprehensions or not isinstance(node, COMPREHENSIONS)):
            todo.extend(reversed(list(ast.iter_child_nodes(node))))
    return found


def _bound(inside: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that the nodes of a scope bind in it."""
    for node in inside:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        elif isinstance(node, COMPREHENSIONS):
            for inner in _inside([node.elt if not isinstance(node, ast.DictComp) else node.value], comprehensions=True):
                if isinstance(inner, ast.NamedExpr):
                    yield inner.target.id


def _fixed_names(inside: Iterable[ast.AST]) -> set[str]:
    """Return the names of a scope that stay: imports, functions, classes, and names of other scopes."""
    found: set[str] = set()
    for node in inside:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Global):
            found |= set(node.names)
    return found


def _sees_names(inside: Iterable[ast.AST]) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id in SEES_NAMES for inner in inside)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return (body[1:] or [ast.Pass()]) if is_text else body


def _added(annotation: ast.expr) -> Iterator[ast.expr]:
    """Yield the arguments that `Annotated` adds to a type, anywhere in an annotation, also in quotes."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "Annotated" in node.value:
            with suppress(SyntaxError):
                yield from _added(ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            name = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            yield from node.slice.elts[1:] if name == "Annotated" else ()


def _is_bare_field(node: ast.AST) -> bool:
    """True for a `Field` that only bounds or describes."""
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Field" and not node.args and not node.keywords


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
