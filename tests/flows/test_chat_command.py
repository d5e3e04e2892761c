"""`puna chat` and `puna generate`, with a model from a folder."""

import json
from types import SimpleNamespace

import pytest
import typer
from pydantic import Field
from typer.main import get_command
from typer.testing import CliRunner

from puna.flows.cli import load_engine
from puna.flows.cli.main import app
from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import save
from puna.models.formats.quantized import quantize
from puna.models.generation import Engine, SamplingParams
from puna.models.serving import ServingSettings
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.storage import PunaError

TOKENIZER = Tokenizer.train(["to be or not to be, that is the question"], 280)
SHAPE = ModelConfig(vocab_size=TOKENIZER.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.3)
MODEL = Transformer(SHAPE, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save(MODEL, path, TOKENIZER)
    return str(path)


def puna(*args, given=None):
    found = CliRunner().invoke(app, list(args), input=given, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def answers(messages, **params):
    (row,) = Engine(MODEL, TOKENIZER).generate([TOKENIZER.chat(messages)], SamplingParams(**params))
    return [TOKENIZER.decode(answer.tokens, skip_special_tokens=True) for answer in row]


def test_chat_keeps_the_conversation_until_a_new_one(folder):
    said = puna("chat", folder, "--temperature", "0", "--max-tokens", "9", "--system", "be", given="to be?\nor not?\n/new\nthat is\n")
    system = [{"role": "system", "content": "be"}]
    first = [*system, {"role": "user", "content": "to be?"}]
    (one,) = answers(first, temperature=0, max_tokens=9)
    (two,) = answers([*first, {"role": "assistant", "content": one}, {"role": "user", "content": "or not?"}], temperature=0, max_tokens=9)
    (three,) = answers([*system, {"role": "user", "content": "that is"}], temperature=0, max_tokens=9)
    assert said == "\n".join([one, two, three, "", ""])


def test_a_question_too_long_ends_no_talk_in_a_terminal(folder, monkeypatch):
    """A question that is too long is dropped, and the next one is answered like a first question. With piped input, the command ends with the
    error."""
    given = "to be " * 300 + "\nto be?\n"
    with pytest.raises(PunaError, match="the model's context 512: start a new one with /new"):
        puna("chat", folder, given=given)
    monkeypatch.setattr("puna.flows.cli.model.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    talk = CliRunner().invoke(app, ["chat", folder, "--temperature", "0", "--max-tokens", "9"], input=given, catch_exceptions=False)
    (one,) = answers([{"role": "user", "content": "to be?"}], temperature=0, max_tokens=9)
    assert talk.exit_code == 0 and one in talk.stdout and "error: the conversation has" in talk.stderr


def test_api_says_where_it_answers(folder, monkeypatch):
    opened = []
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: opened.extend(one.getsockname()[1] for one in sockets))
    assert puna("api", folder, "--port", "0", "--name", "mine") == f"mine: http://127.0.0.1:{opened[0]}/v1; Ctrl-C ends\n"


def test_what_a_terminal_gives_that_is_no_text_is_one_message(folder):
    for command, given in ((["chat", folder], b"\xff\xfe\n"), (["chat", folder, "--system", "\udcff"], b"a\n"), (["generate", folder, "\udcff"], b"")):
        with pytest.raises(PunaError, match="is not Unicode text"):
            CliRunner(charset="utf-8").invoke(app, command, input=given, catch_exceptions=False)


def test_generate_answers_prompts_and_lines_alike(folder):
    options = ["--n", "2", "--max-tokens", "8", "--seed", "5", "--json"]
    rows = [json.loads(line) for line in puna("generate", folder, "to be", "the question", *options).splitlines()]
    expected = [text for prompt in ("to be", "the question") for text in answers([{"role": "user", "content": prompt}], n=2, max_tokens=8, seed=5, temperature=0.7)]
    assert [row["text"] for row in rows] == expected
    assert all(len(row["tokens"]) == len(row["logprobs"]) for row in rows)
    given = '"to be"\n\n{"messages": [{"role": "user", "content": "the question"}]}\n'
    assert [json.loads(line)["text"] for line in puna("generate", folder, *options, given=given).splitlines()] == expected
    (raw,) = Engine(MODEL, TOKENIZER).generate(["to be"], SamplingParams(max_tokens=8, temperature=0))
    assert puna("generate", folder, "to be", "--raw", "--temperature", "0", "--max-tokens", "8") == TOKENIZER.decode(raw[0].tokens, skip_special_tokens=True) + "\n"


def test_a_model_is_sampled_in_its_own_way_unless_told(folder, tmp_path):
    own = Tokenizer(TOKENIZER.backend, TOKENIZER.named, TOKENIZER.template.source, generation={"do_sample": True, "temperature": 2.0, "top_k": 3})
    save(MODEL, tmp_path / "own", own)
    (drawn,) = answers([{"role": "user", "content": "to be"}], temperature=2.0, top_k=3, max_tokens=6)
    assert puna("generate", str(tmp_path / "own"), "to be", "--max-tokens", "6") == drawn + "\n"
    (told,) = answers([{"role": "user", "content": "to be"}], temperature=0, max_tokens=6)
    assert puna("generate", str(tmp_path / "own"), "to be", "--max-tokens", "6", "--temperature", "0") == told + "\n"


def test_a_model_without_a_chat_template_continues_plain_text_only(folder, tmp_path):
    save(MODEL, tmp_path / "base", Tokenizer(TOKENIZER.backend, TOKENIZER.named, None))
    with pytest.raises(PunaError, match=r"no chat template: continue plain text with --raw, or import it with --set chat_template=chatml"):
        puna("generate", str(tmp_path / "base"), "to be")
    assert puna("generate", str(tmp_path / "base"), "to be", "--raw", "--max-tokens", "4")


@pytest.mark.parametrize(
    ("args", "given", "message"),
    [
        (["nowhere/model", "a"], "", "nowhere"),
        (["FOLDER"], "\n", "there is no prompt: give one as an argument, or a line of standard input for each"),
        (["FOLDER"], "{\n", "line 1 is not JSON"),
        (["FOLDER"], '"a"\n7\n', "line 2: give a text"),
        (["FOLDER", "a", "--top-p", "0"], "", "top_p must lie in"),
        (["FOLDER", "--raw"], '[{"role": "user", "content": "a"}]\n', "--raw continues texts"),
        (["LONG", "a", "--memory", "0.01", "--max-tokens", "999999"], "", "give the engine more memory"),
        (["FOLDER", "a", "--max-tokens", "512"], "", "of its answer exceed the model's context of 512: lower --max-tokens"),
        (["FOLDER"], '"\\ud800"\n', "standard input, line 1 is not Unicode text"),
    ],
)
def test_what_is_wrong_is_one_message(folder, tmp_path, args, given, message):
    args = [folder if arg == "FOLDER" else arg for arg in args]
    if args[0] == "LONG":
        args[0] = str(tmp_path / "long")
        save(Transformer(SHAPE.replace(max_position_embeddings=1 << 20)), tmp_path / "long", TOKENIZER)
    with pytest.raises(PunaError, match=message):
        CliRunner().invoke(app, ["generate", *args, "--store", str(tmp_path / "none")], input=given, catch_exceptions=False)


def test_generate_holds_answers_to_a_schema_and_guesses_change_nothing(folder, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "array", "items": {"enum": ["to", "be"]}, "maxItems": 3}')
    options = ["--n", "3", "--max-tokens", "60"]
    for line in puna("generate", folder, "to be", *options, "--schema", str(file)).splitlines():
        assert set(json.loads(line)) <= {"to", "be"}
    plain = puna("generate", folder, "to be", *options)
    assert puna("generate", folder, "to be", *options, "--speculate", "4") == plain
    file.write_text('{"not": {}}')
    with pytest.raises(PunaError, match=r"schema.json: the JSON schema cannot be enforced"):
        puna("generate", folder, "to be", "--schema", str(file))
    with pytest.raises(PunaError, match="set only one of the two"):
        file.write_text("{}")
        puna("generate", folder, "to be", "--schema", str(file), "--speculate", "4")


def test_generate_searches_for_an_answer_and_tells_its_cost(folder):
    tries = ["--max-tokens", "8", "--seed", "5"]
    rows = [json.loads(line) for line in puna("generate", folder, "to be", *tries, "--n", "6", "--json").splitlines()]
    (best,) = [json.loads(line) for line in puna("generate", folder, "to be", *tries, "--n", "6", "--search", "best", "--json").splitlines()]
    mean = [sum(row["logprobs"]) / len(row["logprobs"]) for row in rows]
    assert best["text"] == rows[mean.index(max(mean))]["text"] and best["value"] == pytest.approx(max(mean))
    assert best["drawn"] == sum(len(row["tokens"]) for row in rows) and best["tried"] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verifier", "{}"], "add --search best"),
        (["--search", "best", "--temperature", "0"], "which are all equal at --temperature 0"),
        (["--search", "best", "--n", "4", "--verifier", "{"], "--verifier is not JSON"),
        (["--search", "best", "--n", "4", "--verifier", '{"name": "judge", "rubric": "?"}'], "use the stage evaluate"),
        (["--search", "best"], "n"),
        (["--search", "guess", "--n", "4"], "method"),
    ],
)
def test_searches_that_cannot_be_are_refused(folder, options, message):
    with pytest.raises(PunaError, match=message):
        CliRunner().invoke(app, ["generate", folder, "to be", *options], catch_exceptions=False)


def test_weights_in_8_bits_and_a_draft_are_a_matter_of_options(folder, tmp_path):
    """At temperature 0 a draft changes no answer; with 8-bit weights the answers equal those of a model quantized in code."""
    smaller = tmp_path / "draft"
    save(Transformer(SHAPE, seed=1), smaller, TOKENIZER)
    options = ["to be", "--n", "2", "--max-tokens", "30", "--json"]
    plain = puna("generate", folder, *options)
    greedy = [*options, "--temperature", "0"]
    assert puna("generate", folder, *greedy, "--draft", str(smaller)) == puna("generate", folder, *greedy)
    assert puna("generate", folder, *options, "--draft", str(smaller)) != plain  # drawn with other random numbers
    rows = [json.loads(line) for line in puna("generate", folder, *options, "--weights", "int8").splitlines()]
    engine = Engine(quantize(Transformer(SHAPE, seed=0), "int8"), TOKENIZER)
    (expected,) = engine.generate([TOKENIZER.chat([{"role": "user", "content": "to be"}])], SamplingParams(n=2, max_tokens=30, temperature=0.7))
    assert [row["logprobs"] for row in rows] == [answer.logprobs for answer in expected] and puna("generate", folder, *options, "--weights", "int8") != plain
    own = ["--draft", folder, "--draft-weights", "int8"]
    assert puna("generate", folder, *greedy, *own) == puna("generate", folder, *greedy)
    assert puna("generate", folder, *options, *own) != puna("generate", folder, *options, *own[:2])  # guesses come from another distribution
    with pytest.raises(PunaError, match="--draft-weights: there is no draft model; name one with --draft"):
        puna("generate", folder, "to be", *own[2:])
    other = Tokenizer.train(["something else is said here, of other words"], 280)
    assert other.vocab_size == TOKENIZER.vocab_size
    save(MODEL, smaller, other)
    with pytest.raises(PunaError, match="the draft has a different tokenizer from the model"):
        puna("generate", folder, "x", "--draft", str(smaller))


def test_a_window_lets_talks_leave_the_context(folder):
    """The context is 512 tokens. A conversation and an answer exceed it, and the tokens equal the engine's own."""
    asked = [{"role": "user", "content": "to be " * 300}]
    assert len(TOKENIZER.chat(asked)) > 512
    with pytest.raises(PunaError, match="keep only the last tokens with --window"):
        puna("chat", folder, given="to be " * 300 + "\n")
    options, how = ["--temperature", "0", "--max-tokens", "300"], SamplingParams(temperature=0, max_tokens=300)
    ((expected,),) = Engine(MODEL, TOKENIZER, sinks=16, window=64).generate([TOKENIZER.chat([{**asked[0], "content": "to be " * 299 + "to be"}])], how)
    text = TOKENIZER.decode(expected.tokens, skip_special_tokens=True)
    window = ["--sinks", "16", "--window", "64"]
    assert puna("chat", folder, *options, *window, given="to be " * 300 + "\n").rstrip("\n").removeprefix("> ") == text.rstrip("\n")
    assert puna("generate", folder, "to be " * 299 + "to be", *options, *window) == text + "\n"
    for more, told in ((["--sinks", "16"], "only with a window"), (["--window", "20"], "multiple of 16"), ([*window, "--draft", folder], "a draft"), (["--window", "4096"], "context has only 512")):
        with pytest.raises(PunaError, match=told):
            puna("generate", folder, "to be", *more)


def test_an_offloaded_models_plan_is_told_beside_the_same_answers(folder, tmp_path):
    options = ["--n", "2", "--max-tokens", "8", "--seed", "5"]
    wanted = puna("generate", folder, "to be", *options)
    found = CliRunner().invoke(app, ["generate", folder, "to be", *options, "--offload", "disk", "--memory", "0.5"], catch_exceptions=False)
    assert found.exit_code == 0 and found.stdout == wanted
    assert found.stderr.startswith("all 1 layers fit into memory; 2 answers at once, ") and "tokens/s expected" in found.stderr
    said = puna("chat", folder, "--temperature", "0", "--max-tokens", "9", "--offload", "disk", "--memory", "0.5", given="to be?\n")
    (one,) = answers([{"role": "user", "content": "to be?"}], temperature=0, max_tokens=9)
    assert one in said
    for more, told in ((["--offload", "host"], "set offload to disk"), (["--offload", "disk", "--weights", "int8"], "weights same")):
        with pytest.raises(PunaError, match=told):
            puna("generate", folder, "to be", *more)
    save(MODEL, tmp_path)
    with pytest.raises(PunaError, match=r"tokenizer\.json does not exist"):
        puna("generate", str(tmp_path), "to be", "--offload", "disk")


def test_commands_have_the_serving_settings_of_stages():
    fields = {name: field for name, field in ServingSettings.model_fields.items() if name not in ("engine", "gpu_memory", "layout")}
    for command in ("chat", "generate", "api"):
        options = {option.name: option for option in get_command(app).commands[command].params}
        assert {name: (options[name].help, options[name].default) for name in fields} == {n: (f.description, f.default) for n, f in fields.items()}
        assert "serving" not in options and "draft" in options


def test_one_field_of_the_serving_settings_adds_an_option(monkeypatch):
    class Settings(ServingSettings):
        """Serving settings with one more field."""

        shelves: int = Field(3, ge=1, description="Number of shelves")

    monkeypatch.setattr(load_engine, "ServingSettings", Settings)
    given = []

    def lend(name: str, serving: Settings) -> None:
        given.append((name, serving.shelves, serving.weights))

    library = typer.Typer()
    library.command()(load_engine.serving_options(lend))
    run = CliRunner().invoke
    assert [run(library, ["a"]).exit_code, run(library, ["b", "--shelves", "5", "--weights", "int8"]).exit_code] == [0, 0]
    assert given == [("a", 3, "same"), ("b", 5, "int8")]
    assert "shelves: Input should be greater than or equal to 1" in str(run(library, ["c", "--shelves", "0"]).exception)
