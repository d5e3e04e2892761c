"""Python source as data: top-level bindings, their conditions, canonical statements, and one text per syntax tree.

A canonical statement has no docstrings, annotations, bounds, error messages or local names, since these change no output. Only the standard
library is used. A tree's text is the same under every Python version that can parse the source."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

# Fields that have no effect at run time: contexts of names, prefixes of strings, type comments.
SILENT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
# Arguments of Field that describe or bound a value. They are checked before a run, and the value itself is in the key.
FIELD = frozenset((
    "description", "title", "examples", "ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern", "json_schema_extra",
))  # fmt: skip
# Arguments of `stage` that take effect before it runs, or replace its code hash.
DECLARATION = frozenset(("needs", "version", "device"))
SEES_NAMES = frozenset(("locals", "vars", "eval", "exec", "dir"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's top-level statements, without the body of `if TYPE_CHECKING:`. Another `if`, or a `for`, is one statement."""
    for node in body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from statements(node.orelse)
        else:
            yield node


def bound(node: ast.stmt) -> set[str]:
    """Return the names that a top-level statement binds or changes, including `x` in `x.y = …` and names within an `if` or `for`."""
    nodes = within([node])
    parts = [n for n in nodes if isinstance(n, ast.Attribute | ast.Subscript) and isinstance(n.ctx, ast.Store | ast.Del)]
    changed = {name.id for part in parts for name in ast.walk(part) if isinstance(name, ast.Name)}
    return _fixed_names(nodes) | set(_bound(nodes)) | changed


def text(node: Any, reference: Callable[[ast.AST], str | None] = lambda node: None) -> str:
    """Return a tree's text, which is the same under every version of Python.

    `ast.dump` and `ast.unparse` differ between minor versions: in empty fields, new fields, and quotes.

    Args:
        node: a tree, a list of trees, or the value of a field.
        reference: called with each tree, outer ones first. A string replaces the tree's text; "" drops the tree from its list."""
    if isinstance(node, list):
        return "[" + ",".join(part for item in node if (part := text(item, reference))) + "]"
    if isinstance(node, ast.Constant):
        # `ascii`, because the characters that `repr` escapes depend on the interpreter's Unicode tables.
        return f"{type(node.value).__name__}:{node.value!a}"
    if not isinstance(node, ast.AST):
        return ascii(node)
    if (replaced := reference(node)) is not None:
        return replaced
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.JoinedStr):
        fields["values"] = _join_texts(node.values)
    texts = [
        f"{name}={text(value, reference)}" for name, value in fields.items() if name not in SILENT and value is not None and value != []
    ]
    return f"{type(node).__name__}({','.join(texts)})"


def _join_texts(values: list[ast.expr]) -> list[ast.expr]:
    """Return an f-string's pieces with adjacent texts joined, because parsers split them differently."""
    pieces: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and pieces and isinstance(pieces[-1], ast.Constant):
            pieces[-1] = ast.Constant(str(pieces[-1].value) + str(value.value))
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            pieces.append(value)
    return pieces


def canonical(node: ast.AST) -> tuple[ast.AST, list[ast.AST]]:
    """Return the canonical statement, and the annotations of its variables outside functions (such as class fields). Change it in place.

    An annotation's names are reached but not hashed, except for the arguments of `Annotated`."""
    worker = _Canonical()
    return worker.visit(node), worker.annotations


@dataclass
class Scope:
    """The names in a function, class or comprehension: name → number for renamed names, and the names that stay."""

    renamed: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    is_class: bool = False


class _Canonical(ast.NodeTransformer):
    def __init__(self) -> None:
        self.annotations: list[ast.AST] = []
        self.scopes: list[Scope] = []

    def _canonical_name(self, name: str) -> str:
        for index, scope in enumerate(reversed(self.scopes)):
            if scope.is_class and index:
                continue  # a class's names are not visible in its methods
            if name in scope.renamed or name in scope.kept:
                return scope.renamed.get(name, name)
        return name

    def _number_names(self, names: Iterator[str], kept: set[str], outer: Collection[str] = ()) -> Scope:
        scope = Scope(kept=kept)
        for name in names:
            if name not in kept and name not in outer and name not in scope.renamed:
                scope.renamed[name] = f"{len(self.scopes)}.{len(scope.renamed)}"
        return scope

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._canonical_name(node.id)
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        node.names = [self._canonical_name(name) for name in node.names]
        return node

    def _names_one(self, node: Any) -> ast.AST:
        node.name = node.name and self._canonical_name(node.name)
        return self.generic_visit(node)

    visit_ExceptHandler = visit_MatchAs = visit_MatchStar = _names_one

    def visit_MatchMapping(self, node: ast.MatchMapping) -> ast.AST:
        node.rest = node.rest and self._canonical_name(node.rest)
        return self.generic_visit(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.decorator_list = [self.visit(item) for item in node.decorator_list]
        # The return annotation of a signal's definition is the type of the signal's column.
        node.returns = node.returns if "signal" in map(_called, node.decorator_list) else None
        for argument in _arguments(node.args):
            argument.annotation = None
        node.args = self.visit(node.args)
        node.body = _without_docstring(node.body)
        inside = within(node.body)
        fixed = {argument.arg for argument in _arguments(node.args)} | _fixed_names(inside)
        outer = {name for item in inside if isinstance(item, ast.Nonlocal) for name in item.names}
        sees_names = any(isinstance(inner, ast.Name) and inner.id in SEES_NAMES for inner in inside)
        self.scopes.append(self._number_names(iter(()) if sees_names else _bound(inside), fixed, outer))
        return self._with_body(node)

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def _with_body(self, node: Any) -> ast.AST:
        """Visit the body of a function or class in the innermost scope, leave that scope, and return the function or class."""
        node.body = [new for item in node.body if (new := self.visit(item)) is not None] or [ast.Pass()]
        self.scopes.pop()
        return cast("ast.AST", node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.args = self.visit(node.args)
        self.scopes.append(self._number_names(_bound(within([node.body])), {argument.arg for argument in _arguments(node.args)}))
        node.body = self.visit(node.body)
        self.scopes.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [self.visit(item) for item in node.decorator_list]
        node.bases = [self.visit(item) for item in node.bases]
        node.keywords = [self.visit(item) for item in node.keywords]
        node.body = _without_docstring(node.body)
        inside = within(node.body)
        self.scopes.append(Scope(kept=_fixed_names(inside) | set(_bound(inside)), is_class=True))
        return self._with_body(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> ast.AST:
        first = self.visit(node.generators[0].iter)  # evaluated in the enclosing scope
        names = (name for generator in node.generators for name in _bound(within([generator.target])))
        self.scopes.append(self._number_names(names, set()))
        node.generators[0].iter = ast.Constant(None)
        new = self.generic_visit(node)
        self.scopes.pop()
        node.generators[0].iter = first
        return new

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        in_function = bool(self.scopes) and not self.scopes[-1].is_class
        if not in_function:
            self.annotations.append(node.annotation)
        marks = {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node.annotation) if isinstance(n, ast.Name | ast.Attribute)}
        # An annotation with one of these defines no normal dataclass field.
        special = sorted(marks & {"ClassVar", "InitVar", "KW_ONLY"})
        arguments = [] if in_function else [new for item in _annotations(node.annotation) if not _is_bare_field(new := self.visit(item))]
        word = ast.Constant(" ".join(special))
        node.annotation = ast.Tuple([word, *arguments], ast.Load()) if arguments else word
        node.target = self.visit(node.target)
        node.value = node.value and self.visit(node.value)
        if in_function:
            return ast.Assign([node.target], node.value) if node.value else ast.Pass()
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (name := _called(node)) == "Field":
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


def _called(node: ast.expr) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    extra = [item for item in (arguments.vararg, arguments.kwarg) if item is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]


def within(nodes: Sequence[ast.AST], comprehensions: bool = False) -> list[ast.AST]:
    """Return the nodes of a scope in order, without the contents of nested scopes. `comprehensions`: with comprehensions' contents."""
    result: list[ast.AST] = []
    todo = list(reversed(nodes))
    while todo:
        node = todo.pop()
        result.append(node)
        if not isinstance(node, SCOPES) and (comprehensions or not isinstance(node, COMPREHENSIONS)):
            todo.extend(reversed(list(ast.iter_child_nodes(node))))
    return result


def _bound(inside: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that the nodes of a scope bind in it. A walrus in a comprehension binds outside the comprehension."""
    for node in inside:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        elif isinstance(node, COMPREHENSIONS):
            for inner in within(list(ast.iter_child_nodes(node)), comprehensions=True):
                if isinstance(inner, ast.NamedExpr):
                    yield inner.target.id


def _fixed_names(inside: Iterable[ast.AST]) -> set[str]:
    """Return the names of a scope that are not renamed: imports, functions, classes, and names declared global."""
    names: set[str] = set()
    for node in inside:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Global):
            names |= set(node.names)
    return names


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return (body[1:] or [ast.Pass()]) if is_text else body


def _annotations(annotation: ast.expr) -> Iterator[ast.expr]:
    """Yield the arguments that `Annotated` adds to a type, anywhere in an annotation, including quoted annotations."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "Annotated" in node.value:
            with suppress(SyntaxError):
                yield from _annotations(ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            name = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            yield from node.slice.elts[1:] if name == "Annotated" else ()


def _is_bare_field(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Field" and not node.args and not node.keywords


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
