"""Models as verifiers: scores compared with transformers and with one answer at a time, and the choice among several models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.formats.checkpoint import load, save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.contract import Model, SeededConfig, StageConfig, StageRun, execute, stage
from puna.stages.conversations import asking
from puna.stages.verifiers.base import Score, ScoringConfig
from puna.stages.verifiers.judge import Judge
from puna.stages.verifiers.registry import from_text, to_text
from puna.stages.verifiers.scoring import Scorer
from puna.storage import Artifact, PunaError, Store

ANSWERS = ["7", "no", "seven it is", "", "7" * 40, "<|eot_id|>", "é 7"]
JOBS: list[tuple[dict[str, Any], str]] = []
FOUND: list[Score] = []


class NetConfig(SeededConfig):
    """The seed of a model."""


def network(seed: int, tokenizer: Tokenizer) -> Transformer:
    config = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=1024, initializer_range=0.3)  # fmt: skip
    return Transformer(config, seed=seed)


@stage(kind="model", version="1")
def judge_model(config: NetConfig, run: StageRun) -> None:
    """Write a language model with random weights."""
    tokenizer = Tokenizer.train(["grade the answer to a request with a number from 0 to 5 by this rubric"], 280)
    save(network(config.seed, tokenizer), run.folder, tokenizer)


@stage(kind="model", version="1")
def scalar_model(base: Model, config: NetConfig, run: StageRun) -> None:
    """Write a reward model with a random head."""
    model = load(base.path(), "scalar")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "score" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(config.seed))
    save(model, run.folder, Tokenizer.load(base.path()))


@stage(kind="evaluation", version="1")
def score_by_models(judges: list[Model] | None, config: StageConfig, run: StageRun) -> None:
    """Score the jobs of a test."""
    scorer = Scorer([row for row, _ in JOBS], ScoringConfig(), run, judges or ())
    FOUND[:] = scorer.scores(JOBS)
    scorer.report()
    run.write_rows([])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.open(tmp_path_factory.mktemp("store"))


def judge_of(store: Store, seed: int = 0) -> Artifact:
    return execute(judge_model, NetConfig(seed=seed), {}, store)


def reward_of(store: Store, seed: int = 0) -> Artifact:
    return execute(scalar_model, NetConfig(seed=seed), {"base": judge_of(store)}, store)


def row(verifier: str, reference: str | None = "7", question: str = "How many?") -> dict[str, Any]:
    return {"id": "p", "task": "t", "split": "train", "messages": asking(question), "tools": None, "reference": reference, "verifier": verifier}


def scored(folder: Path, judges: list[Artifact], jobs: list[tuple[dict[str, Any], str]]) -> tuple[list[Score], dict[str, Any]]:
    JOBS[:] = jobs
    made = execute(score_by_models, StageConfig(), {"judges": judges or None}, Store.open(folder / "scores"))
    return list(FOUND), made.manifest.metrics


def rewards_alone(model: Artifact, answers: list[str]) -> list[float]:
    """Return the scalar head's output at the end of each answer, each in a separate pass."""
    network, tokenizer = load(model.path()).double(), Tokenizer.load(model.path())
    assert network.head == "scalar"
    found = []
    for answer in answers:
        ids, _ = rendered(tokenizer, answer)
        with torch.no_grad():
            found.append(float(network.scalar(network.hidden(Forest.pack([ids])))[-1]))
    return found


def rendered(tokenizer: Tokenizer, answer: str) -> tuple[list[int], int]:
    prompt, ids, _ = tokenizer.render_pair([{"role": "user", "content": "How many?"}], answer)
    return [*prompt, *ids], len(prompt)


def test_a_reward_model_gives_a_probability(tmp_path: Path, store: Store) -> None:
    model = reward_of(store)
    answers = [text for text in ANSWERS if "eot" not in text]
    plain, scaled = to_text("reward_model"), to_text("reward_model", center=0.5, scale=2.0)
    found, metrics = scored(tmp_path, [model], [(row(text), answer) for text in (plain, scaled) for answer in answers])
    alone = rewards_alone(model, answers)
    wanted = [1 / (1 + math.exp(-reward)) for reward in alone] + [1 / (1 + math.exp(-(reward - 0.5) / 2.0)) for reward in alone]
    assert [one.value for one in found] == pytest.approx(wanted, abs=1e-4) and metrics["unscored_answers"] == 0
    assert max(alone) - min(alone) > 0.1 and found[0].detail == f"reward {float(found[0].detail.split()[1]):.4f}"


def test_what_a_reward_model_cannot_read_has_no_score(tmp_path: Path, store: Store) -> None:
    found, metrics = scored(tmp_path, [reward_of(store)], [(row(to_text("reward_model")), text) for text in ("7", "7 " * 2000)])
    assert found[0].value is not None and found[1].value is None and "tokens exceed the reward model's context" in found[1].detail
    assert metrics["unscored_answers"] == 1


def test_a_judge_gives_its_mean_grade_as_transformers_has_it(tmp_path: Path, store: Store) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tops = judge_of(store), (1, 5, 9)
    verifiers = [to_text("judge", rubric="5: right. 0: wrong.", max_grade=top, show_reference=top == 5) for top in tops]
    found, _ = scored(tmp_path, [model], [(row(text), answer) for text in verifiers for answer in ANSWERS])
    network = AutoModelForCausalLM.from_pretrained(model.path(), dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(model.path())
    wanted = []
    for top, text in zip(tops, verifiers, strict=True):
        verifier = from_text(text)
        assert isinstance(verifier, Judge)
        for answer in ANSWERS:
            shown = f"The request:\n<<<\nHow many?\n>>>\n\n{'A right answer:' if top == 5 else 'The answer to grade:'}\n<<<\n{'7' if top == 5 else answer}\n>>>"
            from puna.stages.verifiers.base import Item, Question

            asked = verifier.request(Item(verifier, Question("p", "t", "How many?", "7"), answer))
            assert shown in asked and f"<<<\n{answer}\n>>>" in asked and f"from 0 to {top}" in asked
            # An answer's text is plain text to the judge, even if it looks like a special token.
            dialogue = [{"role": "user", "content": asked.replace("<|eot_id|>", "\ufdd0")}]
            before, mark, after = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True).partition("\ufdd0")
            if mark:
                continue
            ids = tokenizer(before + after, add_special_tokens=False, return_tensors="pt").input_ids
            with torch.no_grad():
                logits = network(ids).logits[0, -1]
            grades = [tokenizer(str(grade), add_special_tokens=False).input_ids[0] for grade in range(top + 1)]
            share = logits[grades].softmax(-1)
            wanted.append((len(wanted), float(share @ torch.arange(top + 1, dtype=torch.float64)) / top))
    plain = [score for (_, answer), score in zip(JOBS, found, strict=True) if "eot" not in answer]
    assert [score.value for score in plain] == pytest.approx([value for _, value in wanted], abs=1e-4)
    assert len({score.value for score in plain}) > len(plain) // 2
    assert all("the model answers with a grade with probability" in score.detail for score in plain)


def test_the_model_is_chosen_by_its_head_or_its_digest(tmp_path: Path, store: Store) -> None:
    reward, first, second = reward_of(store), judge_of(store), judge_of(store, 1)
    by_default = [(row(to_text("reward_model")), "7"), (row(to_text("judge", rubric="r")), "7")]
    found, _ = scored(tmp_path / "a", [reward, first], by_default)  # one model of each head: the choice is clear
    named = [(row(to_text("judge", rubric="r", model=one.data_digest[:12])), "7") for one in (second, first)]
    again, _ = scored(tmp_path / "b", [first, second, reward], [by_default[0], *named])
    alone, _ = scored(tmp_path / "c", [second], [by_default[1]])
    assert [one.value for one in again] == [found[0].value, alone[0].value, found[1].value] and alone[0].value != found[1].value
    for judges, verifier, message in (
        ([first, second], to_text("judge", rubric="r"), "has 2, so the verifier's `model` must name one"),
        ([first], to_text("reward_model"), "needs a reward model, but the input `judges` has none"),
        ([first], to_text("judge", rubric="r", model="0" * 8), f"data digest 00000000…; given: {first.data_digest[:12]}"),
        ([reward], to_text("judge", rubric="r", model=reward.data_digest[:8]), "is a reward model; it needs a language model"),
    ):
        with pytest.raises(PunaError, match=message):
            scored(tmp_path / "d", judges, [(row(verifier), "7")])


def test_a_combination_of_a_rule_and_models(tmp_path: Path, store: Store) -> None:
    parts: list[dict[str, Any]] = [{"name": "numeric"}, {"name": "reward_model"}, {"name": "judge", "rubric": "r"}]
    jobs = [(row(to_text("product", of=parts)), "7"), (row(to_text("product", of=parts)), "8"), (row(to_text("weighted", of=parts, weights=[1, 2, 1])), "8")]
    jobs += [(row(json.dumps(part)), answer) for answer in ("7", "8") for part in parts]
    found, _ = scored(tmp_path, [reward_of(store), judge_of(store)], jobs)
    seven, eight = [one.value or 0.0 for one in found[3:6]], [one.value or 0.0 for one in found[6:]]
    assert (seven[0], eight[0]) == (1.0, 0.0)
    assert [one.value for one in found[:3]] == pytest.approx([math.prod(seven), 0.0, (2 * eight[1] + eight[2]) / 4])
