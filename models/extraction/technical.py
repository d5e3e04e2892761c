"""Preparation of pages with code and maths: information in the markup becomes text, so that the extractor keeps it.

Line numbers are removed. Lines of code that are cells of a table or elements of an editor become one `pre`. A formula on a line of its own
becomes a `pre`. MathML that holds no TeX is replaced by TeX: its plain text would turn a fraction into another formula."""

from __future__ import annotations

from typing import Any

from puna.kernels.text.search import Words

# A page without any of these has nothing for `rewrite_technical`: most pages have none.
HINTS = Words("<math", "<MATH", "math/tex", "blob-code", "blob-num", "hljs-ln", "CodeMirror", "lineno", "line-number", "gutter")
NUMBERS = ("td.linenos, td.lineno, td.gutter, td.rouge-gutter, td.blob-num, td.hljs-ln-numbers, pre.lineno, pre.linenos, "
    "pre .lineno, pre .linenos, pre .line-numbers-rows, pre .line-number, .CodeMirror-linenumber, .CodeMirror-gutters")  # fmt: skip
LINES = "td.blob-code, td.hljs-ln-code"
EDITOR = ".CodeMirror-code"
DISPLAY = 'script[type="math/tex; mode=display"], script[type="math/tex;mode=display"]'
# MathML element → its number of children and how TeX writes it.
TEX = {
    "msqrt": (1, r"\sqrt{{{0}}}"), "mfrac": (2, r"\frac{{{0}}}{{{1}}}"), "mroot": (2, r"\sqrt[{1}]{{{0}}}"),
    "msup": (2, "{0}^{{{1}}}"), "msub": (2, "{0}_{{{1}}}"), "msubsup": (3, "{0}_{{{1}}}^{{{2}}}"),
    "mover": (2, r"\overset{{{1}}}{{{0}}}"), "munder": (2, "{0}_{{{1}}}"), "munderover": (3, "{0}_{{{1}}}^{{{2}}}"),
    "accent": (2, "{1}{{{0}}}"),
}  # fmt: skip
ACCENTS = dict(zip("¯‾^ˆ~˜→˙¨", [r"\bar"] * 2 + [r"\hat"] * 2 + [r"\tilde"] * 2 + [r"\vec", r"\dot", r"\ddot"], strict=True))
INVISIBLE = dict.fromkeys(("annotation", "annotation-xml", "mphantom", "none", "mprescripts"), "") | {"mspace": " "}
OPERATORS = str.maketrans({"\u2061": "", "\u2062": "", "\u2063": ",", "\u2064": "+"})  # applied to, times, comma, plus: not drawn
RELATIONS = "=<>≤≥≠≈≡∈⊂→⇒∼"
BETWEEN = {"mtr": " & ", "mtable": r" \\ "}
ATOMS = ("#text", "mi", "mn", "mo", "mtext", "msub", "munder", "mover", "mfrac", "msqrt", "mroot", "mfenced")  # bases without braces
MAX_NESTING = 50  # maximum nesting of one formula
MAX_FORMULAS = 2000  # maximum formulas of a page, to bound the time; further ones stay as they are
MAX_SIGNS = 50_000  # maximum elements of a page's formulas, likewise
MAX_STEPS = 3  # from a cell to its table: row, body, table


def rewrite_technical(tree: Any, size: int) -> bool:
    """Rewrite in place the code and maths of a page (`size` characters) that Resiliparse has parsed; return True if the page changed."""
    document = tree.document
    if document is None:
        return False
    changed = False
    for element in document.query_selector_all(NUMBERS)[:]:  # a slice is a list; each iteration over a collection builds all elements anew
        element.parent.remove_child(element)  # not destroyed: elements inside it may be in the list, too
        changed = True
    nested, signs = set(document.query_selector_all("math math")[:]), 0
    for math in document.query_selector_all("math")[:MAX_FORMULAS]:
        signs += len(math.query_selector_all("*"))
        if signs > MAX_SIGNS:
            break
        if math not in nested and (text := _formula(math)):
            _replace(tree, math, "pre" if math.getattr("display") == "block" else "span", text)
            changed = True
    for script in document.query_selector_all(DISPLAY)[:]:
        _replace(tree, script, "pre", script.text)
        changed = True
    for listings in (_tables, _editors):
        for node, lines in listings(document, size):
            _replace(tree, node, "pre", "\n".join(lines))
            changed = True
    return changed


def _tables(document: Any, most: int) -> list[tuple[Any, list[str]]]:
    """Return tables in which each row is a line of code, with these lines; an empty list if nested tables give more text than the page."""
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
    """Return editors with their lines of code; an empty list if nested editors repeat more text than the page has."""
    result = []
    for editor in document.query_selector_all(EDITOR)[:]:
        lines = [line.text for line in editor.query_selector_all("pre")[:]]
        most -= sum(map(len, lines)) + len("<pre>") * len(lines)
        if most < 0:
            return []
        if lines:
            result.append((editor, [line.replace("\u200b", "") for line in lines]))
    return result


def _replace(tree: Any, node: Any, tag: str, text: str) -> None:
    element = tree.create_element(tag)
    element.text = text
    if node.parent is not None:
        node.parent.replace_child(element, node)


def _formula(math: Any) -> str:
    """Return the TeX of a formula; "" if its markup holds TeX that the extractor reads by itself (`alttext`, `x-tex`)."""
    names = {note.getattr("encoding", "").lower(): note for note in math.query_selector_all("annotation")[:]}
    if math.getattr("alttext", "").strip() or any("x-tex" in name for name in names):
        return ""
    return " ".join((next((note.text for name, note in names.items() if "tex" in name), "") or tex(math)).split())


def tex(node: Any, depth: int = 0) -> str:
    """Return a MathML element as TeX, or as plain text if it is nested deeper than `MAX_NESTING`."""
    tag = node.tag
    if tag == "#text" or depth > MAX_NESTING:
        return " ".join((node.text or "").translate(OPERATORS).split())
    if tag in INVISIBLE:
        return INVISIBLE[tag]
    children = [child for child in node.child_nodes[:] if child.tag != "#comment" and (child.tag != "#text" or child.text.strip())]
    parts = [tex(child, depth + 1) for child in children]
    if tag == "msqrt":
        parts = ["".join(parts)]  # the root of all its children, which are a row
    elif tag == "mover" and len(parts) == 2 and parts[1].strip() in ACCENTS:
        tag, parts[1] = "accent", ACCENTS[parts[1].strip()]
    elif tag == "mmultiscripts" and parts:
        cut = next((place for place, child in enumerate(children) if child.tag == "mprescripts"), len(parts))
        rows = (parts[cut + 1 :], parts[1:cut])
        before, behind = ("".join(f"{'_^'[at % 2]}{{{part}}}" for at, part in enumerate(row) if part) for row in rows)
        return f"{'{}' if before else ''}{before}{parts[0]}{behind}"
    elif tag == "mfenced":
        marks: list[str] = [node.getattr(name, mark) for name, mark in (("open", "("), ("separators", ","), ("close", ")"))]
        return marks[0] + marks[1][:1].join(parts) + marks[2]
    count, form = TEX.get(tag, (0, ""))
    if count and count == len(parts):
        parts = [part.strip() for part in parts]
        if form.startswith("{0}") and len(parts[0]) > 1 and children[0].tag not in ATOMS and parts[0][-1] not in ")]|":
            parts[0] = f"{{{parts[0]}}}"
        return form.format(*parts)
    text = BETWEEN.get(tag, "").join(parts)
    if tag == "mtable":
        return rf"\begin{{matrix}} {text} \end{{matrix}}"
    spaced = (tag == "mo" and text and text in RELATIONS) or tag == "mtext"
    return f" {text} " if spaced else f"{text} " if tag == "mi" and len(text) > 1 and text.isalpha() else text
