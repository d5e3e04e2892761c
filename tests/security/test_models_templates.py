"""Untrusted chat templates run in a separate process, within limits."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from puna.models.tokens import template
from puna.models.tokens.template import CHATML, Template, TemplateError, TemplateLimitError
from puna.models.tokens.tokenizer import ChatError, Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
import cases_models

TURNS = [{"role": "user", "content": "hi \ud800 \u2028"}, {"role": "assistant", "content": "yes" * 100_000}]


def rendered(source, turns=TURNS):
    return Template(source, {}).render(turns, add_generation_prompt=True)


def test_hostile_templates_are_stopped():
    assert cases_models.templates_rendered() == 0


def test_a_strangers_template_writes_what_it_writes_in_this_process():
    assert rendered(CHATML + " ") == rendered(CHATML) + " "
    with pytest.raises(TemplateError, match="^no$"):
        rendered("{{ raise_exception('no') }}")


def test_a_template_that_does_not_compile_says_so_each_time():
    for _ in range(2):
        with pytest.raises(TemplateError, match="the chat template does not compile: "):
            Template("{% if %}", {})


def test_a_conversation_that_takes_too_long_is_tried_once():
    tokenizer = Tokenizer.train(["to be or not to be"], 270).with_template("{{ messages[0].content }}" + "{% if messages[0].content == 'long' %}" + cases_models._LOOPS + "{% endif %}")
    assert tokenizer.chat([{"role": "user", "content": "short"}])
    with pytest.raises(ChatError, match="the chat template exceeds a limit: it takes more than 1 s of CPU time"):
        tokenizer.chat([{"role": "user", "content": "long"}] * 30)


def test_the_process_may_end_and_begins_again():
    one = Template("{{ messages[0].role }}", {})
    assert one.render(TURNS, add_generation_prompt=False) == "user"
    os.kill(template._process._popen.pid, signal.SIGKILL)
    try:
        one.render(TURNS, add_generation_prompt=False)
    except TemplateLimitError as error:
        assert "ended with status -9" in str(error)
    assert one.render(TURNS, add_generation_prompt=False) == "user"


def test_threads_get_their_own_answers():
    one, wrong = Template("{{ messages[0].content }}", {}), []

    def ask(number):
        for i in range(50):
            text = f"{number} {i}"
            if one.render([{"role": "user", "content": text}], add_generation_prompt=False) != text:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
