"""Chat templates: token ids equal to transformers' apply_chat_template, and loss masks compared with masks written by hand."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from puna.models.tokens.template import Template, TemplateError
from puna.models.tokens.tokenizer import CHATML, ChatError, Row, Tokenizer
from puna.models.tokens.tokenizer_files import TokenizerError
from tests.models.dialogues import conversation, families, made

NAMES = ("llama2", "mistral", "llama3", "llama3_1", "qwen2_5", "qwen3", "gemma", "phi3")


def family(name: str) -> Tokenizer:
    if name not in families():
        pytest.skip("the template comes with TRL, which is not installed")
    return made(name)


def chatml(template: str = CHATML, base: str = "qwen2_5") -> Tokenizer:
    return family(base).with_template(template)


def say(*turns: str | dict[str, Any], system: str | None = None) -> list[dict[str, Any]]:
    """Return messages of user and assistant in turn."""
    roles = itertools.cycle(["user", "assistant"])
    made_ = [turn if isinstance(turn, dict) else {"role": next(roles), "content": turn} for turn in turns]
    return made_ if system is None else [{"role": "system", "content": system}, *made_]


def segments(tokenizer: Tokenizer, row: Row) -> list[tuple[bool, str]]:
    """Return the row as text segments, each with a flag that is True if it is trained."""
    found, start = [], 0
    for trained, group in itertools.groupby(row.trained):
        stop = start + len(list(group))
        before = tokenizer.decode(row.ids[:start])
        found.append((trained, tokenizer.decode(row.ids[:stop])[len(before) :]))
        start = stop
    return found


# --- ids ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_apply_chat_template(name: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    own, rng = family(name), random.Random(7)
    own.save(tmp_path)
    twin = transformers.AutoTokenizer.from_pretrained(tmp_path)
    again = Tokenizer.load(tmp_path)
    for _ in range(25):
        messages = conversation(rng, families()[name].system)
        for given, asked in ((messages[:-1], True), (messages, False)):
            expected = twin.apply_chat_template(given, add_generation_prompt=asked, return_dict=False, date_string="26 Jul 2024")
            assert own.chat(given, add_generation_prompt=asked) == expected
            assert again.chat(given, add_generation_prompt=asked) == expected


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_in_a_prompt_are_text(name: str):
    own = family(name)
    stop = own.decode([own.stop_ids[-1]])
    plain = own.chat(say("a b"))
    for content in (f"a{stop}b", f"{stop}", f"a {stop}\n{stop} b \ufdd0"):
        ids = own.chat(say(content))
        assert [id_ for id_ in ids if id_ in own.special] == [id_ for id_ in plain if id_ in own.special]
        assert content.strip() in own.decode(ids)
        with pytest.raises(ChatError, match=r"turn 0: it writes out the control token"):
            own.render(say(content, "yes"))


CALLING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}<|eot_id|>"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
)
HIDDEN = [
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": "\\u003c|eot_id|>"}'}}]},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a\\n": "<|eot\\u005fid|\\u003E"}'}}]},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"<|eot_id|>": 1}}}]},
]


@pytest.mark.parametrize("turn", HIDDEN)
def test_control_tokens_that_json_hides_are_text(turn):
    """Arguments reach a template as an object: an escape is then a character, and a key is written like a value."""
    own = family("llama3").with_template(CALLING)
    ids = own.chat([*say("a"), turn])
    assert [own.token(id_) for id_ in ids if id_ in own.special] == ["<|eot_id|>"] * 2
    assert "<|eot_id|>" in own.decode(ids, skip_special_tokens=True) and own.decode(ids).count("<|eot_id|>") == 3
    with pytest.raises(ChatError, match=r"turn 1: it writes out the control token <\|eot_id\|>"):
        own.render([*say("a"), turn])


def test_names_in_tools_are_text_and_calls_without_control_tokens_stay_as_they_are():
    own, call = family("llama3").with_template(CALLING), {"function": {"name": "f", "arguments": '{"a":"\\u00e9", "b":1}'}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"<|eot_id|>": {}}}}}]
    ids = own.chat(say("a"), tools=tools)
    assert [own.token(id_) for id_ in ids if id_ in own.special] == ["<|eot_id|>"]
    assert own.guard([call]) == ([call], None)
    with pytest.raises(ValueError, match="all of the noncharacters"):
        own.chat(say("<|eot_id|>" + "".join(map(chr, range(0xFDD0, 0xFDF0)))))


def test_tools_and_calls_as_transformers(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    own = family("qwen3")
    own.save(tmp_path)
    twin = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "area", "parameters": {"type": "object", "properties": {"r": {"type": "number"}}}}}]
    call = {"type": "function", "function": {"name": "area", "arguments": {"r": 2}}}
    messages = say("How large?", {"role": "assistant", "content": None, "reasoning": "a circle", "tool_calls": [call]},
                   {"role": "tool", "name": "area", "content": "12.57"})  # fmt: skip
    assert own.chat(messages, tools=tools) == twin.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    # Arguments as JSON text, as data sets store them, are the same call.
    call["function"]["arguments"] = '{"r": 2}'
    assert own.chat(messages, tools=tools) == twin.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    (row,) = own.render([*messages, {"role": "assistant", "content": "12.57 square metres"}], tools)
    trained = "".join(text for flag, text in segments(own, row) if flag)
    assert '{"name": "area", "arguments": {"r": 2}}' in trained and "12.57 square metres<|im_end|>" in trained
    assert trained.count("12.57") == 1


# --- rows and masks ----------------------------------------------------------------------------------------


def test_llama2_by_hand():
    own = family("llama2")
    (row,) = own.render(say("Q1", "A1", "Q2", " A2 ", system="S"))
    assert segments(own, row) == [
        (False, "<s> [INST] <<SYS>>\nS\n<</SYS>>\n\nQ1 [/INST]"), (True, " A1 </s>"),
        (False, "<s> [INST] Q2 [/INST]"), (True, " A2 </s>"),
    ]  # fmt: skip
    assert row.ids == own.chat(say("Q1", "A1", "Q2", "A2", system="S"), add_generation_prompt=False)


def test_mistral_by_hand():
    own = family("mistral")
    (row,) = own.render(say("Q1", "A1", "Q2", "A2"))
    assert segments(own, row) == [
        (False, "<s>[INST] Q1[/INST]"), (True, " A1</s>"), (False, "[INST] Q2[/INST]"), (True, " A2</s>"),
    ]  # fmt: skip


def test_llama3_by_hand():
    own = family("llama3")
    (row,) = own.render(say("Q1", "A1", "Q2", "A2"))
    user, assistant = (f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant"))
    assert segments(own, row) == [
        (False, f"<|begin_of_text|>{user}Q1<|eot_id|>{assistant}"), (True, "A1<|eot_id|>"),
        (False, f"{user}Q2<|eot_id|>{assistant}"), (True, "A2<|eot_id|>"),
    ]  # fmt: skip


def test_chatml_does_not_train_the_newline_behind_an_answer():
    own = family("qwen2_5")
    (row,) = own.render(say("Q1", "A1", "Q2", "A2", system="S"))
    assert segments(own, row) == [
        (False, "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n"), (True, "A1<|im_end|>"),
        (False, "\n<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n"), (True, "A2<|im_end|>"),
    ]  # fmt: skip


def test_phi_does_not_train_its_second_end():
    own = family("phi3")
    assert own.stop_ids == (own.id_of("<|endoftext|>"), own.id_of("<|end|>"))
    (row,) = own.render(say("Q1", "A1", "Q2", "A2"))
    assert [text for trained, text in segments(own, row) if trained] == ["A1<|end|>", "A2<|end|>"]
    assert own.id_of("<|endoftext|>") not in row.ids


def test_a_newline_that_fuses_with_the_prompt_is_encoded_apart():
    own = chatml()
    _, answer, mask = own.render_pair("Q", "\nfoo")
    assert answer == [*own.encode("\nfoo"), own.stop_ids[0]]
    assert mask == [False] * (len(answer) - 1) + [True]
    (row,) = own.render(say("Q", "\nfoo", "R", "A"))
    assert [text for trained, text in segments(own, row) if trained] == ["\nfoo<|im_end|>", "A<|im_end|>"]


def test_a_template_that_drops_old_reasoning_gives_two_rows():
    own = family("qwen3")
    first = {"role": "assistant", "content": "A1", "reasoning_content": "because"}
    rows = own.render([*say("Q1"), first, *say("Q2", "A2")])
    assert [[text for trained, text in segments(own, row) if trained] for row in rows] == [
        ["<think>\nbecause\n</think>\n\nA1<|im_end|>"], ["<think>\n\n</think>\n\nA2<|im_end|>"],
    ]  # fmt: skip
    assert "because" not in own.decode(rows[1].ids)


def test_the_stop_is_the_token_that_the_next_turn_begins_with():
    glm = "{% for m in messages %}{{ '<|' + ('im_start' if m.role == 'user' else 'im_end') + '|>' + m.content }}{% endfor %}" \
          "{% if add_generation_prompt %}<|im_end|>{% endif %}"  # fmt: skip
    own = chatml(glm)
    assert own.stop_ids == (own.id_of("<|im_end|>"), own.id_of("<|im_start|>"))
    (row,) = own.render(say("Q1", "A1", "Q2", "A2"))
    assert segments(own, row) == [
        (False, "<|im_start|>Q1<|im_end|>"), (True, "A1<|im_start|>"), (False, "Q2<|im_end|>"), (True, "A2<|im_start|>"),
    ]  # fmt: skip


def test_an_end_token_that_no_configuration_names_is_found():
    own = family("qwen2_5")
    base = Tokenizer(own.backend, {"eos_token": "<|endoftext|>"}, CHATML)
    assert base.stop_ids == (own.id_of("<|endoftext|>"), own.id_of("<|im_end|>"))


def test_a_prompt_that_opens_a_thought_is_mended_by_enable_thinking():
    opens = CHATML[: CHATML.rindex("{{-")] + (
        "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is not defined %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
    )
    own = chatml(opens)
    (row,) = own.render(say("Q", "A"))
    assert segments(own, row)[-1] == (True, "A<|im_end|>")
    with pytest.raises(ChatError, match="turn 1: the conversation with the answer does not begin with the prompt"):
        chatml(opens.replace("enable_thinking is not defined", "true")).render(say("Q", "A"))


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("gemma", say("Q", "A", system="S"), "turn 0: the chat template refuses it: System role not supported"),
        ("gemma", [*say("Q", "A"), {"role": "assistant", "content": "B"}], "turn 2: the chat template refuses it: Conversation roles"),
        ("llama3", [*say("Q"), {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "area", "arguments": {}}}]}],
         "turn 1: the template does not write its tool call"),
        ("phi3", [*say("Q"), {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "area", "arguments": {}}}]}],
         "turn 1: the template does not write its tool call"),
        ("qwen3", [{"role": "observer", "content": "Watch out"}, *say("Q", "A")], "turn 0: the template does not write this turn of the role"),
        ("llama3", [*say("Q"), {"role": "assistant", "content": "A", "reasoning": "because"}], "turn 1: the template does not write its reasoning"),
        ("qwen2_5", [*say("Q"), {"role": "assistant", "content": [{"type": "text", "text": "A"}]}], "turn 1: its content is a list, not text"),
        ("qwen2_5", say("Q", "A<|im_end|>"), r"turn 1: it writes out the control token <\|im_end\|>"),
        ("qwen2_5", say("Q"), "turn 0: no turn has the role assistant"),
        ("qwen2_5", [{"content": "Q"}], "turn 0: it names no role"),
    ],
)  # fmt: skip
def test_what_cannot_be_masked_is_refused(name: str, messages: list[dict[str, Any]], reason: str):
    with pytest.raises(ChatError, match=reason) as caught:
        family(name).render(messages)
    assert f"turn {caught.value.turn}: {caught.value.reason}" == str(caught.value)


def test_a_template_without_an_end_or_with_text_behind_it_is_refused():
    with pytest.raises(ChatError, match="turn 1: the template writes no stop token after the answer"):
        chatml("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}").render(say("Q", "A"))
    with pytest.raises(ChatError, match="turn 1: the template writes 'Goodbye' after the end of the answer"):
        chatml("{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}{% if not add_generation_prompt %}Goodbye{% endif %}").render(
            say("Q", "A")
        )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_every_answer_is_trained_once_and_stands_behind_its_prompt(name: str, seed: int):
    own, rng = family(name), random.Random(seed)
    for _ in range(12):
        messages = conversation(rng, families()[name].system, edges=name not in ("llama2", "phi3"))
        rows = own.render(messages)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        runs = [(row, start, stop) for row in rows for start, stop in trained_runs(row)]
        assert len(runs) == len(answers)
        for (row, start, stop), turn in zip(runs, answers, strict=True):
            prompt = own.chat(messages[:turn])
            assert own.decode(row.ids[:start]) == own.decode(prompt)
            assert row.ids[stop - 1] in own.stop_ids
            said = own.decode(row.ids[:stop])[len(own.decode(prompt)) :]
            assert said.removesuffix(own.decode([row.ids[stop - 1]])).strip().endswith(messages[turn]["content"].strip())
            # A pair holds the same tokens; its mask marks the template's tokens.
            asked, answer, mask = own.render_pair(messages[:turn], messages[turn])
            assert (asked, answer) == (prompt, row.ids[start:stop])
            assert mask[-1] and not all(mask)
            _, cut, _ = own.render_pair(messages[:turn], messages[turn], finished=False)
            assert not set(cut) & set(own.stop_ids)
            assert own.decode([*prompt, *cut])[len(own.decode(prompt)) :].strip().endswith(messages[turn]["content"].strip())


def trained_runs(row: Row) -> list[tuple[int, int]]:
    found, start = [], 0
    for trained, group in itertools.groupby(row.trained):
        stop = start + len(list(group))
        found += [(start, stop)] if trained else []
        start = stop
    return found


# --- the template itself -----------------------------------------------------------------------------------


def test_without_a_template():
    own = family("llama3")
    bare = Tokenizer(own.backend, own.named)
    assert bare.stop_ids == (own.eos,)
    for use in (lambda: bare.chat(say("Q")), lambda: bare.render(say("Q", "A")), lambda: bare.render_pair("Q", "A")):
        with pytest.raises(TemplateError, match="no chat template"):
            use()


def test_a_template_is_kept_in_its_sandbox_and_its_date_is_fixed():
    assert Template("{{ strftime_now('%Y-%m-%d') }}", {}).render([], add_generation_prompt=False) == "2024-07-26"
    with pytest.raises(TemplateError, match="does not compile"):
        Template("{% for %}", {})
    for escape in ("{{ ''.__class__.__mro__ }}", "{% set ns = namespace(__class__=1) %}", "{{ messages.append(1) }}"):
        with pytest.raises(TemplateError):
            Template(escape, {}).render([], add_generation_prompt=False)


def test_templates_by_name(tmp_path: Path):
    own = family("llama3").with_template({"default": CHATML, "tool_use": "{{ tools | tojson }}"})
    own.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.decode(again.chat([], tools=[{"name": "x"}])) == '[{"name": "x"}]'
    (tmp_path / "chat_template.jinja").write_text("{{ 'a file counts' }}")
    assert Tokenizer.load(tmp_path).decode(Tokenizer.load(tmp_path).chat(say("Q"))) == "a file counts"


@pytest.mark.parametrize("ids", ["</s>", [1, None], {"id": 1}, -1, [1 << 40], float("inf")])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_wrong_id_of_the_end_is_named_with_its_file(tmp_path: Path, name: str, ids: object):
    family("llama3").save(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / name).write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(TokenizerError, match=rf"{name}: eos_token_id is .*, not a token's id or a list of such ids"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("entry", ["default", {"name": "default"}, {"template": "x"}, {"name": ["default"], "template": "x"}, {"name": "a", "template": 1}])
def test_an_entry_of_a_template_s_list_without_name_or_text_is_named_with_its_file(tmp_path: Path, entry: object):
    family("llama3").save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": [{"name": "b", "template": "y"}, entry]}))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: an entry of chat_template needs a name and a template"):
        Tokenizer.load(tmp_path)


def test_packed_documents_begin_with_what_the_tokenizer_has() -> None:
    """Qwen's tokenizers have no `bos`: `eos` separates their documents."""
    whole = made("llama3")
    without = Tokenizer(whole.backend, {"eos_token": "<|eot_id|>"})
    assert whole.begin == whole.bos != whole.eos and without.bos is None and without.begin == without.eos == whole.eos
    with pytest.raises(TokenizerError, match="neither bos_token nor eos_token"):
        _ = Tokenizer(whole.backend, {}).begin


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_goes_on_as_the_whole_conversation_would(name: str):
    own = family(name)
    told = own.token(own.stop_ids[0])  # written out in the reply, it is plain text
    turns = [{"role": "user", "content": "What is the capital of Peru?"}, {"role": "assistant", "content": "Lima."}]
    following = [{"role": "user", "content": f"No, {told} think."}]
    stop, ids = own.reply(following)
    assert own.render_pair(turns[:1], "Lima.")[1][-1] == stop and own.chat([*turns, *following])[-len(ids) - 1 :] == [stop, *ids]
    assert ids.count(stop) == own.reply([{"role": "user", "content": "No, I think."}])[1].count(stop)
    if name in ("llama2", "mistral"):
        with pytest.raises(ChatError, match="roles must alternate"):
            own.reply([{"role": "tool", "content": "4"}])
