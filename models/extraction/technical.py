"""Pages with code and maths: what their markup says is put where the extractor keeps it, before it reads the page.

Numbers of lines go; lines of code that are cells of a table, or elements of an editor, become one `pre`, as do formulas
that stand on lines of their own; and MathML that has no annotation in TeX gets one, because a fraction or a power in
plain text is another formula.
"""

from __future__ import annotations

from typing import Any

from puna.kernels.text.search import Words

# A page without any of these has nothing to prepare: most pages are without.
HINTS = Words("<math", "<MATH", "math/tex", "blob-code", "blob-num", "hljs-ln", "CodeMirror", "lineno", "line-number", "gutter")
NUMBERS = (
    "td.linenos, td.lineno, td.gutter, td.rouge-gutter, td.blob-num, td.hljs-ln-numbers, pre.lineno, pre.linenos, "
    "pre .lineno, pre .linenos, pre .line-numbers-rows, pre .line-number, .CodeMirror-linenumber, .CodeMirror-gutters"
)
LINES = "td.blob-code, td.hljs-ln-code"
EDITOR = ".CodeMirror-code"
DISPLAY = 'script[type="math/tex; mode=display"], script[type="math/tex;mode=display"]'
# MathML element → its number of children and how TeX writes it.
TEX = {
    "msqrt": (1, r"\sqrt{{{0}}}"), "mfrac": (2, r"\frac{{{0}}}{{{1}}}"), "mroot": (2, r"\sqrt[{1}]{{{0}}}"),
    "msup": (2, "{0}^{{{1}}}"), "msub": (2, "{0}_{{{1}}}"), "msubsup": (3, "{0}_{{{1}}}^{{{2}}}"),
    "mover": (2, r"\overset{{{1}}}{{{0}}}"), "munder": (2, "{0}_{{{1}}}"), "munderover": (3, "{0}_{{{1}}}^{{{2}}}"),
}  # fmt: skip
RELATIONS = "=<>≤≥≠≈≡∈⊂→⇒∼"
BETWEEN = {"mtr": " & ", "mtable": r" \\ "}
MAX_NESTING = 50  # of one formula
MAX_FORMULAS = 2000  # of a page, in time that stays short; what is beyond stays as it was
MAX_SIGNS = 50_000  # elements of a page's formulas, so too
MAX_STEPS = 3  # from a cell to its table: row, body, table


def hinted(html: bytes) -> bool:
    """True if a page in UTF-8 may have code or maths for `prepared`."""
    return HINTS.any_in(html)


def prepared(tree: Any, size: int) -> bool:
    """Rewrite code and maths of a page of `size` characters that Resiliparse has parsed, in place; returns whether there was any."""
    document = tree.document
    if document is None:
        return False
    changed = False
    for element in document.query_selector_all(NUMBERS)[:]:  # a slice is a list; the collection makes all elements anew for each
        element.parent.remove_child(element)  # not destroyed: what is in it may be among them as well
        changed = True
    nested, signs = set(document.query_selector_all("math math")[:]), 0
    for math in document.query_selector_all("math")[:MAX_FORMULAS]:
        signs += len(math.query_selector_all("*"))
        if signs > MAX_SIGNS:
            break
        if math not in nested and math.query_selector("annotation") is None and (text := tex(math)):
            _replaced(tree, math, "pre" if math.getattr("display") == "block" else "span", text)
            changed = True
    for script in document.query_selector_all(DISPLAY)[:]:
        _replaced(tree, script, "pre", script.text)
        changed = True
    for listings in (_tables, _editors):
        for node, lines in listings(document, size):
            _replaced(tree, node, "pre", "\n".join(lines))
            changed = True
    return changed


def _tables(document: Any, most: int) -> list[tuple[Any, list[str]]]:
    """Return tables in which each row is a line of code, with the lines; none where these are longer than the page, being nested in each
    other."""
    result: list[tuple[Any, list[str]]] = []
    for cell in document.query_selector_all(LINES)[:]:
        table = cell
        for _ in range(MAX_STEPS):
            table = table.parent if table is not None and table.tag != "table" else table
        if table is None or table.tag != "table":
            continue
        if not result or result[-1][0] != table:
            result.append((table, []))
        text = cell.text
        most -= len(text)
        if most < 0:
            return []
        result[-1][1].append(text.strip("\n"))
    return result


def _editors(document: Any, most: int) -> list[tuple[Any, list[str]]]:
    """Return editors with their lines of code; none where these are longer than the page, being nested in each other."""
    result = []
    for editor in document.query_selector_all(EDITOR)[:]:
        lines = [line.text for line in editor.query_selector_all("pre")[:]]
        most -= sum(map(len, lines)) + len("<pre>") * len(lines)
        if most < 0:
            return []
        if lines:
            result.append((editor, [line.replace("\u200b", "") for line in lines]))
    return result


def _replaced(tree: Any, node: Any, tag: str, text: str) -> None:
    element = tree.create_element(tag)
    element.text = text
    if node.parent is not None:
        node.parent.replace_child(element, node)


def tex(node: Any, depth: int = 0) -> str:
    """Return a MathML element as TeX; deeper nesting than any formula's is written as plain text."""
    if node.tag == "#text" or depth > MAX_NESTING:
        return " ".join((node.text or "").split())
    # A slice is a list, see above.
    children = [child for child in node.child_nodes[:] if child.tag != "#comment" and (child.tag != "#text" or child.text.strip())]
    parts = [tex(child, depth + 1) for child in children]
    if node.tag == "msqrt":
        parts = ["".join(parts)]  # the root of all its children, which are a row
    count, form = TEX.get(node.tag, (0, ""))
    if count and count == len(parts):
        return form.format(*parts)
    text = BETWEEN.get(node.tag, "").join(parts)
    return f" {text} " if node.tag == "mo" and text and text in RELATIONS else text
