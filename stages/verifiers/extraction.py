r"""The final answer of a longer text: in answer tags, in \boxed{}, after `####` or after "the answer is"."""

from __future__ import annotations

import re

TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
# Only bounded repeats are used, so matching takes linear time on any answer.
SAID = re.compile(r"\b(?:final |correct )?answer(?: is:?|:)(?![a-z])[ \t*]{0,8}(\S.*)", re.IGNORECASE)
QUOTES = {'"': '"', "'": "'", "`": "`", "“": "”", "‘": "’", "«": "»"}


def final_answer(text: str) -> str | None:
    r"""Return the last answer that the text marks as final, without the marks; None if no answer is marked.

    Precedence: answer tags, \boxed{}, `#### …` (as in GSM8K), "the answer is …" (to the end of its line, without a full stop)."""
    if tagged := TAG.findall(text):
        return str(tagged[-1]).strip()
    if (inside := boxed_text(text)) is not None:
        return inside.strip()
    if hashes := HASHES.findall(text):
        return str(hashes[-1]).strip()
    return _bare(str(answers[-1])) if (answers := SAID.findall(text)) else None


def boxed_text(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` with closed braces; None if there is none, or the last of over 100 is not closed."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for at in range(start + len("\\boxed"), len(text)):
            depth += (text[at] == "{") - (text[at] == "}")
            if depth == 0:
                return text[start + len("\\boxed{") : at]
        if text.count("\\boxed{") > 100:  # bounds the time, since each search for a closing brace reads to the end
            return None
        start = text.rfind("\\boxed{", 0, start)
    return None


def _bare(text: str) -> str:
    """Return the text without a final full stop, Markdown emphasis, LaTeX math delimiters and one pair of enclosing quotes."""
    text = text.strip().removesuffix(".").strip()
    for mark in ("**", "__", "*", "$$", "$", "\\(", "\\["):
        end = {"\\(": "\\)", "\\[": "\\]"}.get(mark, mark)
        if text.endswith(end) and not text.startswith(mark) and mark not in text[: -len(end)]:
            text = text.removesuffix(end)  # the opening mark was before "answer is"
        elif text.startswith(mark) and text.endswith(end) and len(text) > len(mark) + len(end):
            text = text[len(mark) : -len(end)]
    text = text.strip().removesuffix(".").strip()
    if len(text) > 2 and QUOTES.get(text[0]) == text[-1]:
        text = text[1:-1]
    return text.strip()
