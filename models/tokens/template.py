"""Chat templates: Jinja programs that come with models and render conversations as text.

The environment is that of transformers' `apply_chat_template`: sandboxed, blocks trimmed, `raise_exception`, `strftime_now`, `tojson`
without HTML escapes, and the tag `generation`. Only the date is fixed, so that a conversation gives the same tokens on any day."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from puna.models.untrusted import bounded_process
from puna.models.untrusted.bounded_process import LimitError, Process

Tools = Sequence[Mapping[str, Any]] | None  # JSON schemas of functions
Message = Mapping[str, Any]  # one turn: `role`, `content`, and other keys that the template reads (`tool_calls`, `reasoning_content`, …)

TODAY = datetime(2024, 7, 26)  # the date of `strftime_now`: the default date in Llama 3.1's template
REASONING = ("reasoning_content", "thinking", "reasoning")  # the keys under which data sets keep an answer's reasoning


LLAMA3 = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{%- endif %}"
)

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)
TEMPLATES = {"llama3": LLAMA3, "chatml": CHATML}  # Puna's own templates by name


class TemplateError(ValueError):
    """An error: a template is missing, does not compile, or refuses a conversation; the message says why."""


class TemplateLimitError(TemplateError):
    """An error: a template exceeded a limit of time, memory or output size."""


class _GenerationTag(jinja2.ext.Extension):
    """The block tag `{% generation %}…{% endgeneration %}`, which renders its content unchanged."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, except that it refuses names that begin with an underscore: such names lead out of the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **values)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """The function `dict(…)` of templates, without the attributes of Python's type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}: names that begin with _ are forbidden")


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    strftime: Callable[[str], str] = TODAY.strftime
    environment.globals |= {"raise_exception": _raise, "strftime_now": strftime, "dict": _Dict(), "namespace": _Namespace}
    return environment


class Template:
    """A chat template. `source`: the template's text, or several templates by name. Puna's own templates run in this process. Any other
    template is untrusted: it is compiled and rendered in a separate process with limits on time and memory."""

    def __init__(self, source: str | Mapping[str, str], special: Mapping[str, str]) -> None:
        """Compile a template. `special`: special tokens that it may name (`bos_token`, …). Raise TemplateError if it does not compile."""
        self.source = source
        self._given = (source if isinstance(source, str) else dict(source), dict(special))
        self._key = hashlib.sha256(json.dumps(self._given, sort_keys=True).encode()).digest()
        self._programs = _Programs(source, special) if isinstance(source, str) and source in TEMPLATES.values() else None
        if self._programs is None:
            self._ask(None)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Tools = None, **options: Any) -> str:
        """Return the conversation as text; with `add_generation_prompt` up to where the model's answer begins.

        `tools`: JSON schemas. `options`: further variables of the template, such as `enable_thinking`. Arguments of tool calls may be
        objects or JSON text. Raise TemplateError if the template refuses the conversation, TemplateLimitError if it exceeds a limit."""
        variables = {**options, "add_generation_prompt": add_generation_prompt, "tools": tools}
        if self._programs is not None:
            return self._programs.render(messages, variables)
        return self._ask(([dict(message) for message in messages], variables))

    def _ask(self, request: tuple[list[dict[str, Any]], dict[str, Any]] | None) -> str:
        try:
            answer = _process.ask(request, self._key, self._given)
        except LimitError as error:
            raise TemplateLimitError(f"the chat template exceeds a limit: {error}") from error
        if (message := answer.get("error")) is not None:
            raise TemplateError(str(message))
        return str(answer["text"])


_process = Process(__name__)


def serve() -> None:
    """Answer requests on standard input: compile and render templates (`bounded_process.py`)."""
    compiled: dict[bytes, _Programs] = {}

    def answer(key: bytes, definition: Any, request: Any) -> dict[str, Any]:
        try:
            if key not in compiled:
                compiled[key] = _Programs(*definition)
            return {"text": "" if request is None else compiled[key].render(*request), "known": True}
        except TemplateError as error:
            return {"error": str(error), "known": key in compiled}

    bounded_process.serve(answer)


class _Programs:
    """A model's compiled chat templates, by name."""

    def __init__(self, source: str | Mapping[str, str], special: Mapping[str, str]) -> None:
        self._special = dict(special)
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if not sources:
            raise TemplateError("the model names no chat template")
        environment = _environment()
        try:
            self._programs = {name: environment.from_string(text) for name, text in sources.items()}
        except (jinja2.TemplateError, RecursionError, OverflowError) as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        if "default" not in self._programs and len(self._programs) > 1:
            raise TemplateError(f"none of the chat templates {', '.join(sorted(sources))} is named default")

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        name = "tool_use" if variables["tools"] and "tool_use" in self._programs else "default"
        program = self._programs.get(name) or next(iter(self._programs.values()))

        def write(turns: Sequence[Message]) -> str:
            return program.render(messages=turns, documents=None, **self._special, **variables)

        prepared = [_prepare(message) for message in messages]
        try:
            try:
                return write([_with_arguments(message, _as_object) for message in prepared])
            except TypeError:
                return write([_with_arguments(message, _as_text) for message in prepared])
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateError(str(error) or type(error).__name__) from error


def _prepare(message: Message) -> dict[str, Any]:
    """Return a message without null values, with its reasoning under both keys that templates read: `thinking`, `reasoning_content`."""
    prepared = {key: value for key, value in message.items() if value is not None}
    reasoning = next((prepared[key] for key in REASONING if key in prepared), None)
    return prepared if reasoning is None else {"thinking": reasoning, **prepared, "reasoning_content": reasoning}


def _with_arguments(message: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the message with `form` applied to the arguments of its tool calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": form(function["arguments"])}}
        elif isinstance(call, Mapping) and "arguments" in call:
            call = {**call, "arguments": form(call["arguments"])}
        changed.append(call)
    return {**message, "tool_calls": changed}


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def unescaped(arguments: Any) -> Any:
    """Return JSON text of a tool call's arguments without escapes, which may hide special tokens; return other values unchanged."""
    return _as_text(_as_object(arguments)) if isinstance(arguments, str) and "\\" in arguments else arguments
