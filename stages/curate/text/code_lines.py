"""Telling lines of code from lines of prose, in manuals and other pages that mix them.

This is one of two notions of a line of code. Here a line is judged alone and in doubt taken for code: a prompt, a call, a
keyword, the name of a parameter will do, because its readers protect it: `line_dedup` keeps repeated lines of code, `language`
takes its share of prose from the other lines. `technical` counts code as evidence about a page instead: there a line needs many
marks, whatever the language of the program, so that menus, headings, prices and lists of names do not make a page one of code.
"""

from __future__ import annotations

import re

CODE_START = re.compile(
    r">>>|\.\.\. |[$%#@] ?\w|//|/\*|</?\w|(?:def|class|import|return|raise|yield|elif|assert|await|async|lambda|public|private|static|"
    r"void|const|var|let|fn|func|struct|enum|#include) |from \S+ import |(?:if|for|while|with|except|try|else|switch)\b.*[:{]$|"
    r"(?:pass|break|continue|else:|try:|finally:)$|(?:SELECT|INSERT INTO|UPDATE|DELETE FROM|CREATE|DROP|ALTER|FROM|WHERE|JOIN|VALUES) "
)
CODE_ASSIGNMENT = re.compile(r"[\w.]+(?:\[.*\])?(?:: ?[\w.\[\], |]+)? ?[-+*/|&]?= ?\S")
CODE_CALL = re.compile(r"[\w.]+\(.*\)[,:;]?$")
# "name (string, required)", as references of programs introduce a parameter.
CODE_PARAMETER = re.compile(
    r"[A-Za-z_]\w*(?:\.\w+)* \((?:str|string|int|integer|long|float|double|number|bool|boolean|bytes|blob|list|tuple|dict|map|array|object|"
    r"structure|datetime|date|timestamp|callable|any)(?:, ?(?:required|optional))?\)$"
)
CODE_SIGNS = b"(){}[]<>=;_\"'`|&*/+\\@#%^~$"
CODE_MARKS = 0.15
STATEMENT_WORDS = 3


def looks_like_code(line: str) -> bool:
    """Whether a line (without the white space around it) is more likely code than prose or boilerplate."""
    if line.startswith(("•", "–")):
        return False
    if CODE_START.match(line) or line[-1] in "{}([\\" or not any(map(str.isalnum, line)):
        return True
    # A plain search spares most lines a pattern.
    if ("=" in line and CODE_ASSIGNMENT.match(line)) or (")" in line and (CODE_CALL.match(line) or CODE_PARAMETER.match(line))):
        return True
    if line[-1] == ";" and line.count(" ") < STATEMENT_WORDS:  # the items of a list in prose end so too
        return True
    encoded = line.encode("utf-8", "surrogatepass")
    return len(encoded) - len(encoded.translate(None, CODE_SIGNS)) > max(2, CODE_MARKS * len(line))
