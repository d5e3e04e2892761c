"""Tools that a model may call between its turns: a calculator, and Python in the sandbox.

A call is JSON with `name` and `arguments`, in `<tool_call>` tags (Hermes, Qwen, SmolLM) or as the whole turn (Llama 3.1, which writes
`parameters` instead). If a call fails, the model gets the error as the result."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from puna.stages.verifiers import sandbox
from puna.stages.verifiers.base import ScoringConfig
from puna.stages.verifiers.reasoning_gym import check_formula

ToolName = Literal["calculator", "python"]
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
LONGEST = 1000  # maximum characters of a tool's result that the model gets
FAILED = "Error"  # beginning of a tool's result that is an error message
MOST = 4  # maximum number of calls per turn; further calls get an error


class Tool(NamedTuple):
    """A tool that takes one text: its description, the argument's name and description, and the function that runs it."""

    about: str
    argument: str
    meaning: str
    run: Callable[[str, ScoringConfig], str]

    def definition(self, name: str) -> dict[str, Any]:
        """Return the tool's JSON schema for chat templates."""
        properties = {self.argument: {"type": "string", "description": self.meaning}}
        parameters = {"type": "object", "properties": properties, "required": [self.argument]}
        return {"type": "function", "function": {"name": name, "description": self.about, "parameters": parameters}}


def results(turn: str, names: Sequence[str], config: ScoringConfig) -> list[dict[str, Any]]:
    """Run the first `MOST` calls in a turn, refuse the rest; return a message with role `tool` per call, cut to `LONGEST` characters."""
    calls = CALL.findall(turn) or ([turn] if turn.lstrip().startswith("{") and '"name"' in turn else [])
    refused = f"Error: a turn has at most {MOST} calls"
    texts = (_result(call, names, config) if number < MOST else refused for number, call in enumerate(calls))
    return [{"role": "tool", "content": text[:LONGEST]} for text in texts]


def _result(call: str, names: Sequence[str], config: ScoringConfig) -> str:
    try:
        value = json.loads(call)
        name, arguments = value["name"], value["arguments"] if "arguments" in value else value["parameters"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 'Error: a call is JSON: {"name": ..., "arguments": {...}}'
    if name not in names:
        return f"Error: there is no tool {str(name)[:50]!r}, only {', '.join(names)}"
    tool = TOOLS[name]
    if not isinstance(arguments, dict) or set(arguments) != {tool.argument} or not isinstance(arguments[tool.argument], str):
        return f'Error: the arguments of {name} are {{"{tool.argument}": "..."}}'
    return tool.run(arguments[tool.argument], config)


def calculate(expression: str, config: ScoringConfig) -> str:
    """Return a formula's value as text (integers in full, other numbers to 12 significant digits), or an error message."""
    formula = expression.strip().replace("^", "**")
    try:
        check_formula(formula)  # leaves only operators on numbers and names, and no name is defined
        value = eval(formula, {"__builtins__": {}})
        return str(value) if isinstance(value, int) else f"{value:.12g}"
    except (ArithmeticError, ValueError, NameError, RecursionError, MemoryError) as error:
        return f"Error: {error}"


def run_python(code: str, config: ScoringConfig) -> str:
    """Run a program in the sandbox; return its error, if any, and the beginning of the text that it prints."""
    limits = sandbox.Limits(config.seconds, config.memory_mb, config.disk_mb, config.processes)
    outcome = sandbox.run(code, ["pass"], limits, sandbox.mode())
    fault = outcome.refused or outcome.ended or next(filter(None, outcome.results or []), "")
    return "\n".join(filter(None, [f"{FAILED}: {fault}" if fault else "", outcome.output[: LONGEST // 2]]))


TOOLS: dict[str, Tool] = {
    "calculator": Tool("Compute a formula", "expression", "numbers with + - * / ^ and brackets", calculate),
    "python": Tool("Run a Python program and return what it prints", "code", "the program", run_python),
}
