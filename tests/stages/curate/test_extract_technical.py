"""Code and maths on pages: lines of code without line numbers, and formulas with their meaning intact."""

from __future__ import annotations

import random
import sys

import pytest

from puna.models.extraction import technical
from puna.stages.curate.extract import ExtractConfig, page_text

BEFORE = "<p>To sort a list in Python, call the function sorted, which returns a new list, in the order of its items.</p>"
AFTER = "<p>This works because the function compares the numbers of the list with each other, one after another.</p>"
LINES = "def f(x):\n    return 1\n\nf(2)"


def text(body, **config):
    page = f"<html><head><title>t</title></head><body><main>{BEFORE}{body}{AFTER}</main></body></html>"
    return page_text(page.encode(), "text/html", "utf-8", ExtractConfig(**config)).text


def cells(number, line):
    rows = "".join(f"<tr><td {number}>{n}</td><td {line}>{row}</td></tr>" for n, row in enumerate(LINES.split("\n"), 1))
    return f"<table>{rows}</table>"


CODE = {
    "gutter in a cell": '<table class="highlighttable"><tr><td class="linenos"><pre class="linenos">1\n2\n3\n4</pre></td>'
    f'<td class="code"><div><pre>{LINES}</pre></div></td></tr></table>',
    "numbers in the lines": "<pre>" + "\n".join(f'<span class="lineno">{n} </span>{row}' for n, row in enumerate(LINES.split("\n"))) + "</pre>",
    "a row for a line": cells('class="blob-num"', 'class="blob-code"'),
    "a row for a line of another highlighter": cells('class="hljs-ln-numbers"', 'class="hljs-ln-code"'),
    "an editor": '<div class="CodeMirror-gutters">9</div><div class="CodeMirror-code">'
    + "".join(f'<div><div class="CodeMirror-linenumber">{n}</div><pre>{row}</pre></div>' for n, row in enumerate(LINES.split("\n")))
    + "</div>",
}  # fmt: skip


def calls(work):
    """Return the number of function calls in `work`."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_table_of_code_takes_steps_in_proportion_to_its_rows():
    rows = "<tr><td class=blob-num>1</td><td class=blob-code><pre>f(1);</pre></td></tr>"
    one, two = (calls(lambda n=n: text(f"<table>{rows * n}</table>")) for n in (100, 200))
    assert two < 2.2 * one
    assert text(f"<table>{rows * 200}</table>").count("f(1);") == 200


@pytest.mark.parametrize("piece", ["<math>{}</math>", "{}"], ids=["the parts of a formula", "images of formulas"])
def test_formulas_take_steps_in_proportion_to_their_number(piece):
    one, two = (calls(lambda n=n: text(piece.format("<mi>x</mi><img class=math alt='y'>" * n))) for n in (150, 300))
    assert two < 2.2 * one


@pytest.mark.parametrize(
    "piece", ["<div><math><mi>x</mi>", "<table><tr><td class=blob-code>f(1);", "<div class=CodeMirror-code><pre>f(1);</pre>"],
    ids=["formulas", "tables of code", "editors"],
)  # fmt: skip
def test_what_is_nested_takes_steps_in_proportion_to_its_number(piece):
    one, two = (calls(lambda n=n: text(f"{piece * n}<p>The end of all of it, as it was written.")) for n in (60, 120))
    assert two < 2.2 * one
    assert "The end of all of it" in text(f"{piece * 60}<p>The end of all of it, as it was written.")


@pytest.mark.parametrize("name", CODE)
def test_code_keeps_its_lines_and_loses_their_numbers(name):
    found = text(CODE[name])
    assert f"\n\n{LINES}\n\n" in found
    assert text(CODE[name], code_and_maths=False) != found


FORMULAS = {
    "<mfrac><mrow><mi>a</mi><mo>+</mo><mn>1</mn></mrow><mi>b</mi></mfrac>": r"\frac{a+1}{b}",
    "<mi>E</mi><mo>=</mo><mi>m</mi><msup><mi>c</mi><mn>2</mn></msup>": "E = mc^{2}",
    "<msub><mi>x</mi><mn>1</mn></msub><mo>≤</mo><msubsup><mi>y</mi><mi>i</mi><mn>2</mn></msubsup>": "x_{1} ≤ y_{i}^{2}",
    "<msqrt><mi>x</mi><mo>+</mo><mn>1</mn></msqrt><mroot><mi>x</mi><mn>3</mn></mroot>": r"\sqrt{x+1}\sqrt[3]{x}",
    "<munderover><mo>∑</mo><mi>i</mi><mi>n</mi></munderover><mover><mi>x</mi><mo>¯</mo></mover>": r"∑_{i}^{n}\bar{x}",
    "<mover><mi>x</mi><mo>⏞</mo></mover>": r"\overset{⏞}{x}",
    "<mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr><mtr><mtd><mn>3</mn></mtd><mtd><mn>4</mn></mtd></mtr></mtable>": r"\begin{matrix} 1 & 2 \\ 3 & 4 \end{matrix}",
    "<msup><mrow><mo>(</mo><mi>a</mi><mo>+</mo><mi>b</mi><mo>)</mo></mrow><mn>2</mn></msup>": "(a+b)^{2}",
    "<msup><mrow><mi>a</mi><mi>b</mi></mrow><mn>2</mn></msup><msup><msup><mi>x</mi><mn>2</mn></msup><mn>3</mn></msup>": "{ab}^{2}{x^{2}}^{3}",
    "<mi>sin</mi><mo>&#8289;</mo><mi>x</mi><mo>+</mo><mn>2</mn><mo>&#8290;</mo><mi>f</mi><mo>&#8289;</mo><mfenced><mi>x</mi><mi>y</mi></mfenced>": "sin x+2f(x,y)",
    "<mmultiscripts><mi>C</mi><mn>6</mn><none/><mprescripts/><none/><mn>14</mn></mmultiscripts>": "{}^{14}C_{6}",
    "<mi>x</mi><mo>=</mo><mn>1</mn><mtext>if  y</mtext><mspace width='1em'/><mi>z</mi><mphantom><mo>+</mo></mphantom>": "x = 1 if y z",
    "<mfrac><mi>a</mi></mfrac>": "a",  # a fraction needs two children
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_without_an_annotation(formula):
    assert f"value of {FORMULAS[formula]} is" in text(f"<p>It was the Greeks who said that the value of <math>{formula}</math> is known to all.</p>")
    assert f"\n\n{FORMULAS[formula]}\n\n" in text(f'<math display="block">{formula}</math>')


SQUARE = "<semantics><msup><mi>x</mi><mn>2</mn></msup>{}</semantics>"
NOTES = {
    "another editor's": ("<annotation encoding='MathType-MTEF'>MathType@MTEF@5@5@+=feaa</annotation>", "x^{2}"),
    "content": ("<annotation-xml encoding='MathML-Content'><apply><power/><ci>x</ci><cn>2</cn></apply></annotation-xml>", "x^{2}"),
    "TeX by another name": ("<annotation encoding='StarMath 5.0'>x squared</annotation><annotation encoding='LaTeX'>x\\cdot x</annotation>", r"x\cdot x"),
    "TeX": ("<annotation encoding='StarMath 5.0'>x squared</annotation><annotation encoding='application/x-tex'>x\\cdot x</annotation>", r"x\cdot x"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_annotations_of_formulas_that_are_no_tex_are_not_text(name):
    note, expected = NOTES[name]
    assert f"value of {expected} is" in text(f"<p>It was the Greeks who said that the value of <math>{SQUARE.format(note)}</math> is known.</p>")


def test_the_tex_of_an_attribute_goes_before_the_elements():
    assert "\\tfrac12" in text('<p>It was the Greeks who said that <math alttext="\\tfrac12"><mfrac><mn>1</mn><mn>2</mn></mfrac></math> is known.</p>')


def test_formulas_on_lines_of_their_own_are_kept():
    assert "\n\n\\int_0^1 x dx\n\n" in text('<script type="math/tex; mode=display">\\int_0^1 x dx</script>')
    annotated = '<math><semantics><mi>x</mi><annotation encoding="application/x-tex">x^2</annotation></semantics></math>'
    found = text(f"<p>It was the Greeks who said that the value of {annotated} is known to all of us.</p>")
    assert "value of x^2 is" in found


def test_signs_of_formulas_beyond_a_bound_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(technical, "MAX_SIGNS", 20)
    one = "<p>A half of it is <math><mfrac><mi>a</mi><mi>b</mi></mfrac></math>, as has been shown before, and so it goes on and on.</p>"
    found = text(one * 12)
    assert (found.count(r"\frac{a}{b}"), found.count("A half of it")) == (20 // 3, 12)


def test_nested_and_broken_markup_is_read():
    pieces = [
        "<math>", "</math>", "<msup>", "</msup>", "<mi>x</mi>", "<table>", "</table>", "<tr>", '<td class="blob-code">a', '<td class="blob-num">1',
        '<td class="linenos"><pre class="lineno">1</pre>', "</td>", "<pre>", "</pre>", '<span class="lineno">2</span>', "<annotation>",
        '<div class="CodeMirror-code">', "</div>", '<script type="math/tex; mode=display">y</script>', '<math display="block">', "<mfrac>",
    ]  # fmt: skip
    generator = random.Random(0)
    for _ in range(300):
        body = "".join(generator.choice(pieces) for _ in range(generator.randrange(1, 60)))
        assert isinstance(text(body), str)
    deep = "<math><msup>" * 200 + "<mi>xyz</mi>"
    assert "xyz" in text(f"<p>It was the Greeks who said that the value is known to all of us, and they called it {deep}")
