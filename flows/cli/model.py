"""The commands `puna chat`, `puna generate` and `puna api`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from puna.flows.cli.inspect import ProjectOption, StoreOption
from puna.flows.cli.load_engine import load_engine, serving_options
from puna.flows.engine.console import json_text
from puna.flows.engine.defaults import DEFAULT_STORE
from puna.flows.server.client import end_with
from puna.models.memory import Work
from puna.models.serving import ServingSettings, Weights, guesses
from puna.stages.contract import parse
from puna.stages.conversations import as_text
from puna.stages.search import SearchConfig, Values
from puna.stages.search import search as searched
from puna.stages.verifiers.base import BoundedVerifier, Item, Question, attempt
from puna.stages.verifiers.registry import from_json, from_text
from puna.storage import PunaError, Store, errors_at

if TYPE_CHECKING:
    from puna.models.generation import Completion, Engine, SamplingParams
    from puna.models.generation.grammar import Mask
    from puna.models.tokens.tokenizer import Tokenizer

    Row = list[tuple[Completion, dict[str, float]]]
    Answers = list[Row]

app = typer.Typer()
SERVED_AT_ONCE = 128  # prompt tokens per engine step of `api` on a CPU: a 3,000-token prompt delays other answers by 1 s, not 12 s

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A model of the store (ID or NAME@VERSION), a folder, a GGUF file")]
TemperatureOption = Annotated[float | None, typer.Option(min=0, max=10, help="0: the likeliest token (default: the model's own, or 0.7)")]
TopOption = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this total probability (default: the model's)")]
SERVING = ServingSettings()
CHAT = {"temperature": 0.7, "top_p": 0.95}  # default sampling parameters of `chat`, for those that neither the model nor an option sets
TokensOption = Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer")]
SeedOption = Annotated[int, typer.Option(min=0, help="Random seed of sampling")]
DraftOption = Annotated[str | None, typer.Option(metavar="MODEL", help="Smaller draft model with the same tokenizer")]
DraftWeightsOption = Annotated[Weights, typer.Option(help="Weights of --draft; for one prompt, int8 of the same model helps")]


def parameters(engine: Engine, default: dict[str, float], **options: Any) -> SamplingParams:
    """Return sampling parameters: each from `options`; if None there, the model's, else from `default`. Raise PunaError for a wrong one."""
    from puna.models.generation import SamplingParams

    own = {} if engine.tokenizer is None else engine.tokenizer.sampling
    with errors_at("", ValueError):
        return SamplingParams(**{**default, **own, **{name: value for name, value in options.items() if value is not None}})


@app.command()
@serving_options
def chat(
    model: ModelArgument, system: Annotated[str | None, typer.Option(help="System message")] = None,
    temperature: TemperatureOption = None, top_p: TopOption = None, max_tokens: TokensOption = 512, seed: SeedOption = 0,
    draft: DraftOption = None, draft_weights: DraftWeightsOption = "same", serving: ServingSettings = SERVING,
    store: StoreOption = DEFAULT_STORE, project: ProjectOption = None,
) -> None:  # fmt: skip
    """Chat with a model. /new begins a new conversation. Ctrl-C ends an answer; at the prompt, Ctrl-C or Ctrl-D ends the chat."""

    def work(_: Tokenizer, context: int) -> Work:
        answer = min(max_tokens, context - 1)
        return Work(min(512, context - answer), answer, 1, min(context, 8192))

    engine = load_engine(model, partial(Store.existing, store, project), serving, draft, work, draft_weights)
    asked_of = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    params = parameters(engine, CHAT, **asked_of, speculate=guesses(serving.speculate, draft))
    start = [{"role": "system", "content": _unicode(system, "--system")}] if system else []
    messages = list(start)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return typer.echo()
        except UnicodeDecodeError as error:
            raise PunaError(f"standard input is not Unicode text: {error}") from error
        if line == "/new":
            messages = list(start)
        elif line:
            conversation = [*messages, {"role": "user", "content": _unicode(line, "standard input")}]
            try:
                messages = [*conversation, {"role": "assistant", "content": _answer(engine, conversation, params)}]
            except PunaError as error:
                if not sys.stdin.isatty():
                    raise
                typer.echo(f"error: {error}", err=True)  # a person may shorten the question or begin a new conversation


def _answer(engine: Engine, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print an answer while it is generated, and return its text. Ctrl-C ends the answer early. Raise PunaError if the context or the cache
    is full, or if the chat template refuses the messages."""
    from puna.models.tokens.tokenizer import TextStream

    assert engine.tokenizer is not None
    answer, text = "", TextStream(engine.tokenizer)
    events = None
    try:
        ids = engine.tokenizer.chat(messages)
        left = engine.room(len(ids), params.max_tokens)
        if not left:
            message = f"the conversation has {len(ids)} tokens, the model's context {engine.model.config.max_position_embeddings}"
            raise PunaError(f"{message}: start a new one with /new, or keep only the last tokens with --window")
        events = engine.stream(ids, replace(params, max_tokens=left))
        for event in events:
            new = text.add(event.token, event.completion is not None)
            answer += new
            print(new, end="", flush=True)
    except KeyboardInterrupt:
        if events is not None:
            events.close()
    except ValueError as error:  # too long for the cache, or refused by the chat template
        raise PunaError(str(error)) from error
    typer.echo()
    return answer


@app.command()
@serving_options
def generate(
    model: ModelArgument,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT…", help="Texts (default: JSON lines on standard input)")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers per prompt")] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the plain text, without the chat template")] = False,
    temperature: TemperatureOption = None, top_p: TopOption = None, max_tokens: TokensOption = 128, seed: SeedOption = 0,
    schema: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON schema of each answer", exists=True, dir_okay=False)] = None,
    search: Annotated[str | None, typer.Option(metavar="METHOD", help="Choose one of --n answers: best or majority")] = None,
    verifier: Annotated[str | None, typer.Option(metavar="JSON", help='Verifier for best: {"name": "json_schema", …}')] = None,
    draft: DraftOption = None, draft_weights: DraftWeightsOption = "same", serving: ServingSettings = SERVING,
    store: StoreOption = DEFAULT_STORE, project: ProjectOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per answer: text, tokens, logprobs, finished, cost")] = False,
) -> None:  # fmt: skip
    """Answer prompts in batches. A line of the input is a JSON string, a list of messages, or an object with `prompt` or `messages`."""
    requests: list[Any] = [_unicode(text, "PROMPT") for text in prompts or ()]
    requests = requests or [_parse_prompt(number, line) for number, line in enumerate(sys.stdin.buffer, 1) if line.strip()]
    if not requests:
        raise PunaError("there is no prompt: give one as an argument, or a line of standard input for each")
    searching = _searching(search, n, verifier, temperature)

    def work(tokenizer: Tokenizer, context: int) -> Work:
        return Work(max(len(ids) for ids in _ids(tokenizer, requests, raw)), max_tokens, len(requests) * n)

    engine = load_engine(model, partial(Store.existing, store, project), serving, draft, work, draft_weights)
    mask = None if schema is None else _mask(engine, schema)
    asked_of = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed, "n": n}
    ahead = guesses(serving.speculate, draft if mask is None else None)
    params = parameters(engine, {"temperature": 0.7}, **asked_of, mask=mask, speculate=ahead)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    with errors_at("", ValueError):
        ids = _ids(tokenizer, requests, raw)
        longest = max(map(len, ids))
        if engine.room(longest, max_tokens) < max_tokens:
            context = engine.model.config.max_position_embeddings
            message = f"{longest} tokens of a prompt and {max_tokens} of its answer exceed the model's context of {context}"
            raise PunaError(f"{message}: lower --max-tokens, or keep only the last tokens with --window")
        answers = _answers(engine, ids, params, searching, requests)
    _print_answers(tokenizer, list(zip(requests, ids, answers, strict=True)), as_json, searching is not None, raw)


def _answers(engine: Engine, ids: list[list[int]], params: SamplingParams, searching: SearchConfig | None, requests: list[Any]) -> Answers:
    """Return, for each prompt, pairs of an answer and its costs: all samples, or only the answer that the search chose."""
    if searching is None:
        return [[(answer, {"drawn": len(answer.tokens)}) for answer in row] for row in engine.generate(ids, params)]
    answers = searched(engine, ids, params, searching, _values(searching, requests))
    return [[(one.completion, {"drawn": one.tokens, "value": one.value, "tried": one.tried})] for one in answers]


def _print_answers(tokenizer: Tokenizer, rows: list[tuple[Any, list[int], Row]], as_json: bool, searched: bool, raw: bool) -> None:
    """Print answers; after a search, unless `as_json`, also print the number of generated tokens on standard error."""
    from puna.models.tokens.tokenizer import TextStream

    for prompt, ids, row in rows:
        for answer, cost in row:
            stream = TextStream(tokenizer, context=ids if raw else ())
            text = "".join(map(stream.add, answer.tokens)) + stream.rest
            whole = {"prompt": prompt, "text": text, "tokens": answer.tokens, "logprobs": answer.logprobs, "finished": answer.finished}
            typer.echo(json_text({**whole, "read": len(ids), **cost}, ascii=False) if as_json else text)
    if searched and not as_json:
        draws = sum(int(cost["drawn"]) for _, _, row in rows for _, cost in row)
        answered = sum(len(answer.tokens) for _, _, row in rows for answer, _ in row)
        typer.echo(f"{draws:,} tokens generated for answers of {answered:,} tokens", err=True)


def _ids(tokenizer: Tokenizer, prompts: list[Any], raw: bool) -> list[list[int]]:
    if raw and not all(isinstance(one, str) for one in prompts):
        raise PunaError("--raw continues texts; messages need the chat template")
    if raw:
        return [[*tokenizer.lead, *tokenizer.encode(one)] for one in prompts]
    if tokenizer.template is None:
        raise PunaError("the model has no chat template: continue plain text with --raw, or import it with --set chat_template=chatml")
    return [tokenizer.chat(_messages(one)) for one in prompts]


def _messages(prompt: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _searching(method: str | None, n: int, verifier: str | None, temperature: float | None) -> SearchConfig | None:
    """Return the configuration of the search; None without --search. Raise PunaError if options conflict or --verifier is not usable."""
    if method is None:
        if verifier is not None:
            raise PunaError("--verifier chooses among answers: add --search best")
        return None
    if temperature == 0:
        raise PunaError("--search chooses among answers, which are all equal at --temperature 0; set a temperature above 0")
    with errors_at("--verifier is not JSON", ValueError):
        spec = None if verifier is None else json.loads(verifier)
    if spec is not None and not isinstance(from_json(spec), BoundedVerifier):
        raise PunaError(f"--verifier {spec['name']} needs a model or its own process: use the stage evaluate (answers.search)")
    return parse(SearchConfig, {"method": method, "n": n, "verifier": spec}, "--search")


def _values(config: SearchConfig, requests: list[Any]) -> Values | None:
    """Return a function that scores answers with the verifier; None without verifier. Raise PunaError if it cannot judge a prompt."""
    if config.verifier is None:
        return None
    verifier = from_text(json.dumps(config.verifier))
    questions = [Question(f"prompt {i}", "", as_text(_messages(one)), None, tuple(_messages(one))) for i, one in enumerate(requests)]
    for question in questions:
        verifier.check(question)
    return lambda answers: [attempt(Item(verifier, questions[number], text)).value for number, text in answers]


def _mask(engine: Engine, file: Path) -> Mask:
    """Return a token mask that makes an answer follow the JSON schema in `file`. Raise PunaError if the schema cannot be used."""
    from puna.models.generation.grammar import Grammar
    from puna.models.untrusted.bounds import read_object

    assert engine.tokenizer is not None
    with errors_at(str(file), ValueError, OSError):
        return Grammar(engine.tokenizer, engine.model.config.vocab_size).schema(read_object(file))


def _parse_prompt(number: int, line: bytes) -> Any:
    """Return the prompt in a line of standard input: a text, or a list of messages. Raise PunaError for any other line."""
    with errors_at(f"standard input, line {number} is not JSON", ValueError):
        prompt = json.loads(line)
    _unicode(json.dumps(prompt, ensure_ascii=False), f"standard input, line {number}")
    if isinstance(prompt, dict):
        prompt = prompt.get("messages", prompt.get("prompt"))
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and all(isinstance(one, dict) for one in prompt)):
        raise PunaError(f"standard input, line {number}: give a text, a list of messages, or an object with prompt or messages")
    return prompt


def _unicode(text: str, where: str) -> str:
    """Return the text. Raise PunaError if it holds lone surrogates, which come from bytes that are not UTF-8 or from JSON escapes."""
    with errors_at(f"{where} is not Unicode text", UnicodeEncodeError):
        text.encode()
    return text


@app.command()
@serving_options
def api(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Address to listen on; if other machines can reach it, set --key")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on")] = 8000,
    key: Annotated[str | None, typer.Option(envvar="PUNA_API_KEY", help="Key that requests must send (default: no key)")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name in requests (default: MODEL)")] = None,
    queue: Annotated[int, typer.Option(min=1, help="Maximum number of waiting and running requests; further requests are refused")] = 256,
    seconds: Annotated[float, typer.Option(min=1, help="Maximum seconds for one request")] = 600,
    sequences: Annotated[int | None, typer.Option(min=1, help="Maximum answers computed at once (default: 64, on a GPU 256)")] = None,
    step_tokens: Annotated[int | None, typer.Option(min=1, help="Prompt tokens per step of the engine (default: 128; GPU 8192)")] = None,
    draft: DraftOption = None, draft_weights: DraftWeightsOption = "same", serving: ServingSettings = SERVING,
    store: StoreOption = DEFAULT_STORE, project: ProjectOption = None,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:  # fmt: skip
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics."""
    import uvicorn

    from puna.flows.cli.openai import Limits, application
    from puna.flows.server.guard import OwnSite, address, check_reach, configuration, listening
    from puna.stages.training.train import device

    check_reach(host, key, "set a key that requests must send: --key KEY, or PUNA_API_KEY")
    if supervised:
        end_with(sys.stdin.buffer)

    def work(_: Tokenizer, context: int) -> Work:
        return Work(min(512, context // 2), min(512, context // 2), sequences or 64, min(context, 8192))

    if step_tokens is None and serving.offload == "none" and device().type == "cpu":
        step_tokens = SERVED_AT_ONCE
    limits = {"sequences": sequences, "step_tokens": step_tokens}
    with listening(host, port) as listener:
        engine = load_engine(model, partial(Store.existing, store, project), serving, draft, work, draft_weights, **limits)
        server = application(engine, name or model, Limits(queue=queue, seconds=seconds), key, guesses(serving.speculate, draft))
        door = OwnSite(server, protected=bool(key), pages=None, asking=None)
        if not supervised:
            print(f"{name or model}: {address(host, listener)}/v1; Ctrl-C ends", flush=True)
        uvicorn.Server(configuration(door, 10)).run(sockets=[listener])
