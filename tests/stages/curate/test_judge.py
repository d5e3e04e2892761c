"""The judge: grades derived by hand for a model with known weights, the sample, the prompts, and classifiers trained on the grades."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load_with_tokenizer, save
from puna.models.formats.gguf.files import write
from puna.models.tokens.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from puna.models.transformer import Transformer
from puna.stages.contract import External, StageConfig, execute
from puna.stages.contract.config import parse
from puna.stages.curate.code_reasoning import TrainCodeReasoningConfig, train_code_reasoning
from puna.stages.curate.encoder_quality import TrainEncoderQualityConfig, encoder_quality, train_encoder_quality
from puna.stages.curate.judge import SCALES, TEXT, TOP, JudgeConfig, built_in, judge
from puna.stages.grading import tokens_apart
from puna.storage import Identity, PunaError, Store

PROMPT = "How good is this? {text} Say it."
GAIN, LIFT = 8.0, 3.0


def counting_folder(folder, context=256):
    """A checkpoint that measures which share of the earlier tokens are "~", and makes high digits, and Yes, likelier the larger it is.

    Tokens are bytes. The hidden state is (1, is "~", is not "~", seen): attention weighs all tokens equally (its queries and keys are
    zero), its value is "is ~", and the result is added to `seen`; the feed-forward block adds nothing.
    """
    tokenizer = Tokenizer.train([], SMALLEST_VOCABULARY)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
                         num_key_value_heads=1, max_position_embeddings=context, rms_norm_eps=1e-12)  # fmt: skip
    model = Transformer(config)
    mark = tokenizer.encode("~")[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0], embeddings[:, 2] = 1.0, 1.0
        embeddings[mark] = torch.tensor([1.0, 1.0, 0.0, 0.0])
        attention = model.model.layers[0].self_attn
        attention.v_proj.weight[0, 1] = 1.0
        attention.o_proj.weight[3, 0] = LIFT
        for answer, slope in slopes(["0", "1", "2", "3", "4", "5"]) | slopes(["N", "Y"]):
            model.lm_head.weight[tokenizer.encode(answer)[0], 3] = slope
    save(model, folder, tokenizer)
    return folder


def slopes(answers):
    """Return answer → the slope of its logit in `seen`."""
    return {(answer, GAIN * at / (len(answers) - 1)) for at, answer in enumerate(answers)}


def counting_model(store, folder):
    with store.work("a" * 64) as work:
        counting_folder(work.output)
        return work.commit("model", "a" * 64, Identity(stage="import"))


def seen_after(text, prompt, max_tokens, chat):
    """Return the last normalized `seen` after question and page: the share of "~" passes through two normalizations."""
    page = text.encode()[:max_tokens]
    framing = len("Answer: ") + len(prompt.replace(TEXT, "").encode()) + 1  # begin-of-text token
    # Four special tokens around two roles, two line breaks after each, and the end of the turn; or one line break.
    framing += 2 * 2 + len("user") + len("assistant") + 4 + 1 if chat else 1
    share = page.count(b"~") / (len(page) + framing)
    seen = LIFT * share * np.sqrt(2)  # a token's own state has length sqrt(2) of 4 elements
    return seen / np.sqrt((1 + 1 + seen**2) / 4)


def expected(text, prompt=PROMPT, max_tokens=64, values=(0, 1, 2, 3, 4, 5), chat=True):
    """Return the grade and the probability of a valid answer, in fp64."""
    seen = seen_after(text, prompt, max_tokens, chat)
    top = np.exp(GAIN * np.arange(len(values)) / (len(values) - 1) * seen)
    every = np.concatenate([np.exp(GAIN * np.arange(n) / (n - 1) * seen) for n in (6, 2)])
    rest = SMALLEST_VOCABULARY - len(every)
    return float(top @ values / top.sum()), float(top.sum() / (every.sum() + rest))


def tilded(count, seed=0):
    """Return rows of documents with a random share of "~"."""
    generator = np.random.default_rng(seed)
    rows = []
    for n in range(count):
        length, share = int(generator.integers(5, 100)), generator.uniform()
        text = "".join("~" if hit else "x" for hit in generator.uniform(size=length) < share)
        rows.append((f"{n:04d}", ("web", "wikipedia", "code")[n % 3], text))
    return rows


@pytest.mark.parametrize(("question", "values"), [("scale", (0, 1, 2, 3, 4, 5)), ("yes_no", (0, 1))])
@pytest.mark.parametrize("chat", [True, False])
def test_grades_by_derivation(tmp_path, make_documents, question, values, chat):
    store, rows = Store.open(tmp_path), tilded(30)
    given = {"documents": make_documents(store, rows), "model": counting_model(store, tmp_path)}
    made = execute(judge, JudgeConfig(prompt=PROMPT, question=question, max_tokens=64, chat=chat, batch_documents=7), given, store)
    table = made.read().to_pydict()
    found = dict(zip(table["id"], table["judgement"], strict=True))
    wanted = {i: expected(text, values=values, chat=chat) for i, source, text in rows if source != "code"}
    assert {i for i, grade in found.items() if grade is None} == {i for i, source, _ in rows if source == "code"}
    for identity, (grade, _) in wanted.items():
        assert found[identity] == pytest.approx(grade, abs=1.1e-4)
    assert np.std([grade for grade, _ in wanted.values()]) > 0.05  # the derived grades differ between documents
    assert made.manifest.metrics["answer_probability"] == pytest.approx(np.mean([said for _, said in wanted.values()]), abs=1.1e-4)
    assert made.manifest.metrics["graded"] == 20


def test_a_folder_is_the_same_model(tmp_path, make_documents):
    store = Store.open(tmp_path / "store")
    documents, config = make_documents(store, tilded(9)), JudgeConfig(prompt=PROMPT, max_tokens=64)
    folder = External.resolve(f"judge={counting_folder(tmp_path / 'model')}")[0]
    made = [
        execute(judge, config, {"documents": documents, **given}, store).manifest.data_digest
        for given in ({"model": counting_model(store, tmp_path)}, {"checkpoint": folder})
    ]
    assert made[0] == made[1]


def test_a_gguf_file_is_the_same_model(tmp_path, make_documents):
    model, tokenizer = load_with_tokenizer(counting_folder(tmp_path / "model"))
    write(tmp_path / "model.gguf", model.config, model.state_dict(), tokenizer)
    store = Store.open(tmp_path / "store")
    documents, config = make_documents(store, tilded(9)), JudgeConfig(prompt=PROMPT, max_tokens=64)
    folder, file = (External.resolve(f"judge={tmp_path / name}")[0] for name in ("model", "model.gguf"))
    made = [execute(judge, config, {"documents": documents, "checkpoint": one}, store) for one in (folder, file)]
    assert made[0].data_digest == made[1].data_digest


def test_special_tokens_of_a_page_are_characters(tmp_path, make_documents):
    """As special tokens, they would end the user's turn; and 64 tokens would cover more text."""
    text = "<|eot_id|>" * 5 + "~" * 40
    store = Store.open(tmp_path)
    given = {"documents": make_documents(store, [("a", "web", text)]), "model": counting_model(store, tmp_path)}
    grade = execute(judge, JudgeConfig(prompt=PROMPT, max_tokens=64), given, store).read()["judgement"][0].as_py()
    assert grade == pytest.approx(expected(text)[0], abs=1.1e-4)


def test_the_sample_is_each_groups_own(tmp_path, make_documents):
    store, rows = Store.open(tmp_path), tilded(90)
    model = counting_model(store, tmp_path)

    def graded(kept, seed=0, languages=None):
        given = {"documents": make_documents(store, kept), "model": model}
        if languages:
            given["language"] = store.import_table("signals", pa_table(languages, kept))
        table = execute(judge, JudgeConfig(prompt=PROMPT, max_tokens=16, sample=5, seed=seed), given, store).read().to_pydict()
        return {i for i, grade in zip(table["id"], table["judgement"], strict=True) if grade is not None}

    every = graded(rows)
    source = {i: name for i, name, _ in rows}
    assert sorted(source[i] for i in every) == ["web"] * 5 + ["wikipedia"] * 5
    assert graded([row for row in rows if row[1] == "web"]) == {i for i in every if source[i] == "web"}
    assert graded(rows, seed=1) != every
    language = {i: ("en", "de")[n // 3 % 2] for n, (i, _, _) in enumerate(rows)}
    groups = sorted((source[i], language[i]) for i in graded(rows, languages=language))
    assert groups == sorted([(s, name) for s in ("web", "wikipedia") for name in ("de", "en")] * 5)


def pa_table(languages, rows):
    import pyarrow as pa

    return pa.table({"id": [i for i, _, _ in rows], "language": [languages[i] for i, _, _ in rows]})


def test_classifiers_learn_the_grades(tmp_path, make_documents, themed, small_model):
    """A judge who prefers "~", which occurs on the sports pages; the encoder finds the other sports pages by their words."""
    store = Store.open(tmp_path)
    rows = [(i, source, "~" * 30 * ("sports" in i) + text.lower()) for i, source, text in themed(96)]
    documents, judged = make_documents(store, rows), counting_model(store, tmp_path)
    config = JudgeConfig(prompt=PROMPT, max_tokens=40, sample=30)
    labels = execute(judge, config, {"documents": documents, "model": judged}, store)
    table = labels.read().to_pydict()
    grades = {i: grade for i, grade in zip(table["id"], table["judgement"], strict=True) if grade is not None}
    likes = [grade for i, grade in grades.items() if "sports" in i]
    assert min(likes) > 3 > max(grade for i, grade in grades.items() if "sports" not in i)
    plain = make_documents(store, [(i, source, text.lower()) for i, source, text in themed(96)])
    encoder = small_model(store, [text for _, _, text in rows])
    given = {"documents": plain, "model": encoder}
    learned = execute(train_encoder_quality, TrainEncoderQualityConfig(max_tokens=64), given | {"labels": labels}, store)
    assert learned.manifest.metrics["labelled"] == len(grades) < 72
    made = execute(encoder_quality, StageConfig(), given | {"classifier": learned}, store)
    quality = {i: q for i, q in zip(*made.read().select(["id", "quality"]).to_pydict().values(), strict=True) if q is not None}
    assert np.mean([(q > 0.5) == ("sports" in i) for i, q in quality.items() if i not in grades]) > 0.9
    both = [execute(judge, config.model_copy(update={"signal": f"{kind}_judgement"}), {"documents": documents, "model": judged}, store)
            for kind in ("code", "reasoning")]  # fmt: skip
    small = TrainCodeReasoningConfig(dimension=8, buckets=10_000, epochs=3)
    made = execute(train_code_reasoning, small, {"documents": plain, "labels": both}, store)
    assert made.manifest.metrics["code_positives"] == made.manifest.metrics["reasoning_positives"] == len(likes)


def test_what_cannot_be_asked_is_named(tmp_path, make_documents, small_model):
    store = Store.open(tmp_path / "store")
    documents, model = make_documents(store, tilded(6)), counting_model(store, tmp_path)

    def asked(given=None, **fields):
        return execute(judge, JudgeConfig(**{"prompt": PROMPT, "max_tokens": 64} | fields), given or {"documents": documents, "model": model}, store)

    with pytest.raises(PunaError, match=r"contains \{text\} once.*contains it 0 times"):
        parse(JudgeConfig, {"prompt": "no place"}, "judge")
    with pytest.raises(PunaError, match="contains it 2 times"):
        parse(JudgeConfig, {"prompt": "{text} and {text}"}, "judge")
    with pytest.raises(PunaError, match="built-in prompts have 5 points"):
        parse(JudgeConfig, {"max_grade": 9}, "judge")
    with pytest.raises(PunaError, match="give exactly one checkpoint"):
        asked({"documents": documents})
    with pytest.raises(PunaError, match="more than the 256 that the model reads"):
        asked(max_tokens=240)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x.txt").write_text("x")
    with pytest.raises(PunaError, match="no config.json, and 0 GGUF files"):
        asked({"documents": documents, "checkpoint": External.resolve(str(tmp_path / "none"))[0]})
    assert execute(judge, JudgeConfig(), {"documents": make_documents(store, []), "model": model}, store).rows() == 0


def test_answers_are_told_apart_by_one_token():
    assert tokens_apart([[7, 8, 1], [7, 8, 2, 3]], ("a", "b")) == ([7, 8], [1, 2])
    with pytest.raises(PunaError, match="apart by one token"):
        tokens_apart([[7, 1], [7, 1], [7, 2]], ("a", "b", "c"))
    with pytest.raises(PunaError, match="apart by one token"):
        tokens_apart([[7], [7, 1]], ("a", "ab"))


def test_built_in_prompts_hold_the_page_once():
    for signal, (_, points) in SCALES.items():
        assert built_in(signal, "scale").count(TEXT) == built_in(signal, "yes_no").count(TEXT) == 1
        assert len(points) == TOP == max(JudgeConfig(signal=signal).make_question().values)
