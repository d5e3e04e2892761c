"""Recipes: their fields come from the flows' steps, and every wrong field is named before anything runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.flows.engine import launch
from puna.flows.engine.declare import FLOWS, Output, first_sentence, in_round
from puna.flows.engine.inputs import is_artifact, latest
from puna.flows.engine.recipe import Recipe, overridden, shipped_recipes
from puna.flows.engine.trace import (
    Trace,
    config_schema,
    everything,
    fields,
    flow_named,
    load,
    load_flows,
    load_stages,
    schema,
    schema_named,
    trace,
)
from puna.stages.align.dpo import dpo
from puna.stages.align.sft import SftConfig
from puna.stages.contract import External, Stage, StageConfig, StageRun, execute, stage
from puna.stages.curate.classifiers.fold_models import About
from puna.stages.curate.line_dedup import line_dedup
from puna.stages.curate.select import SelectConfig, select
from puna.stages.prompts.prompts import PromptsConfig, prompts
from puna.storage import Artifact, PunaError, Store


def labels(recipe: Recipe, flow: str = "pipeline") -> list[str]:
    found = trace(flow_named(flow), recipe)
    assert found.complaints == []
    return [step.label for step in found.steps]


def inputs_of(recipe: Recipe, label: str, flow: str = "pipeline") -> dict[str, tuple[str, ...]]:
    return next(dict(step.inputs) for step in trace(flow_named(flow), recipe).steps if step.label == label)


def config_of(recipe: Recipe, label: str, flow: str = "pipeline"):
    return next(step.config for step in trace(flow_named(flow), recipe).steps if step.label == label)


# --- what a flow consists of -------------------------------------------------------------------------------


def test_the_order_of_the_pipeline() -> None:
    order = labels(load("demo", ["controls=false"]))
    assert order[1:5] == ["ingest", "extract", "url_filter", "url_dedup"]
    assert order.index("select") < order.index("pii") < order.index("minhash_dedup") < order.index("line_dedup")
    assert order.index("line_dedup") < order.index("quality") < order.index("select_model") < order.index("decontaminate") < order.index("split")
    assert order.index("mix_experiment") < order.index("mix") < order.index("pretrain") < order.index("sft_first")
    assert len(order) == len(set(order))
    assert [name for name in order if name.endswith("_2")] == [
        f"{name}_2"
        for name in (
            "prompts", "sample", "preferences", "reward_model", "chosen", "sft", "sample_again", "pick_again", "sft_again", "grpo",
            "average", "evaluate_round", "gate",
        )
    ]


def test_a_step_that_two_flows_share_runs_once() -> None:
    whole = labels(load("demo"))
    assert whole.count("split") == whole.count("tokenizer") == whole.count("prompts") == 1
    assert "split" in labels(load("demo", flow="experiments"), "experiments") and "split" in labels(load("demo", flow="pretrain"), "pretrain")


def test_every_field_is_a_step_and_every_step_has_its_field() -> None:
    for name in FLOWS:
        known = fields(flow_named(name))
        assert {traced.step.field for traced in everything(flow_named(name)).steps} == set(known)
        properties = schema(flow_named(name))["properties"]
        assert set(properties) == {"name", "seed", "project", "base", "add", *known, *everything(flow_named(name)).settings}
        assert all(item["description"] for item in properties.values())


def test_the_aliases_of_the_pipeline() -> None:
    found = trace(flow_named("pipeline"), load("demo")).aliases
    assert {"documents@latest", "base@latest", "reward@latest", "policy@round-1", "policy@latest", "tokenizer@latest"} <= set(found)
    assert found["policy@latest"] == found["policy@round-2"] == ("average_2",)


def test_arms_in_place_of_the_last_training_have_as_large_a_budget() -> None:
    """Each arm starts from the round's model and has the same number of checks (answers to 600 prompts), updates and trained answers,
    at once or in parts."""
    recipe = load("demo", ["rounds=1", "more_controls=true"])
    order, rl, again = labels(recipe), config_of(recipe, "grpo_1"), config_of(recipe, "sft_again_1").training
    names = [name.removeprefix("control_").removesuffix("_1") for name in order if name.startswith("control_")]
    assert names == ["ranked", "checked", "best_of_n", "rl", "iterated"]
    assert inputs_of(recipe, "grpo_1")["policy"] == ("sft_again_1",)
    each = rl.prompts * rl.answers
    checks = config_of(recipe, "sample_again_1").answers * 600 + each * (rl.rollouts + 1)
    updates, start = again.steps + rl.rollouts * rl.epochs * rl.minibatches, inputs_of(recipe, "sample_again_1")["models"]
    for name, sampled in {"ranked": ["equal"], "checked": ["equal"], "iterated": [f"iterated_{part}" for part in (1, 2, 3)]}.items():
        tuned = [f"sft_{name if one == 'equal' else one}_1" for one in sampled]
        assert sum(config_of(recipe, f"sample_{one}_1").answers * 600 for one in sampled) >= checks
        assert sum(config_of(recipe, one).training.steps for one in tuned) >= updates
        assert [inputs_of(recipe, one)["model"] for one in tuned] == [start, *((one,) for one in tuned[:-1])]
    alone = config_of(recipe, "grpo_rl_1")
    assert inputs_of(recipe, "grpo_rl_1")["policy"] == start and each * (alone.rollouts + 1) >= checks
    assert alone.rollouts * alone.epochs * alone.minibatches >= updates
    assert alone.model_copy(update={"rollouts": rl.rollouts}) == rl
    assert inputs_of(recipe, "control_best_of_n_1")["model"] == ("average_checked_1",)
    ranked = config_of(recipe, "pick_ranked_1")
    assert (ranked.pick, ranked.correct, ranked.most) == ("reward_model", True, 2)
    # A round with RL only has an arm that is half finetuning and half RL.
    reinforced = load("demo", ["rounds=1", "sft_again=null", "more_controls=true"])
    assert inputs_of(reinforced, "grpo_half_1")["policy"] == ("sft_half_1",) and config_of(reinforced, "grpo_half_1").rollouts == 20
    assert config_of(reinforced, "sample_half_1").answers == 7 and "grpo_rl_1" in labels(reinforced)
    assert not [name for name in labels(load("demo", ["rounds=1", "sft_equal=null"])) if "equal" in name or "control" in name]
    # The iterations split a budget that three does not divide, and have no more than the whole.
    uneven = load("demo", ["rounds=1", "more_controls=true", "sft_equal.training.steps=61", "sample_equal.answers=13"])
    assert [config_of(uneven, f"sample_iterated_{part}_1").answers for part in (1, 2, 3)] == [5, 4, 4]
    assert [config_of(uneven, f"sft_iterated_{part}_1").training.steps for part in (1, 2, 3)] == [21, 20, 20]
    # A part of a run has the corresponding part of its warm-up.
    warm = load("demo", ["rounds=1", "more_controls=true", "sft_equal.training.schedule.warmup_steps=30", "grpo_equal.schedule.warmup_steps=40"])
    assert config_of(warm, "sft_iterated_1_1").training.schedule.warmup_steps == 10
    warm_half = load("demo", ["rounds=1", "sft_again=null", "more_controls=true", "grpo_equal.schedule.warmup_steps=40"])
    assert config_of(warm_half, "grpo_half_1").schedule.warmup_steps == 20


@pytest.mark.parametrize("flow", ["align", "round"])
def test_given_preferences_are_learned_from_beside_the_pairs_of_a_round(flow: str) -> None:
    recipe = load("smollm2-135m", ["dpo={}", "chosen={}"], flow=flow)
    for label in ("dpo_1", "chosen_1"):
        assert inputs_of(recipe, label, flow)["preferences"] == ("preferences_1", "input judged")
    alone = load("smollm2-135m", ["dpo={}", "preferences=null"], flow=flow)
    assert inputs_of(alone, "dpo_1", flow)["preferences"] == ("input judged",)


def test_control_arms_learn_from_what_their_round_learns_from() -> None:
    recipe = load("demo", ["rounds=1", "ablations=true", "dpo_instead={}", "sft_equal=null", "sft_again=null"])
    order = labels(recipe)
    arms = [name.removeprefix("control_").removesuffix("_1") for name in order if name.startswith("control_")]
    picks = [f"pick_{name}" for name in ("reward_model", "random", "majority", "verifier")]
    assert arms == ["gold", "chosen", *picks, "dpo_instead", "untaught"]
    rl = config_of(recipe, "grpo_1")
    given = inputs_of(recipe, "sft_1")
    for name in ("gold", "chosen", *picks):
        tuned = inputs_of(recipe, f"sft_{name}_1")
        beside = {"gold": {"instructions"}, "chosen": {"instructions", "chosen_1"}}.get(name, {"instructions", "chosen_1", f"{name}_1"})
        assert set(tuned["instructions"]) == beside and tuned["model"] == given["model"]
        more = rl.rollouts * rl.epochs * rl.minibatches
        assert config_of(recipe, f"sft_{name}_1") == config_of(recipe, "sft_1").model_copy(update={"more_steps": more})
        # The choice of an arm's weights gets the same inputs as the choice of the round's weights.
        assert inputs_of(recipe, f"control_{name}_1") == {**inputs_of(recipe, "evaluate_round_1"), "model": (f"average_{name}_1",)}
        assert inputs_of(recipe, f"average_{name}_1") == {**inputs_of(recipe, "average_1"), "models": ("sft_first", f"sft_{name}_1")}
    assert inputs_of(recipe, "average_1")["models"] == ("sft_first", "grpo_1")
    assert inputs_of(recipe, "dpo_instead_1")["model"] == ("sft_1",) and inputs_of(recipe, "average_untaught_1")["models"] == ("sft_first", "sft_1")
    with_dpo = load("demo", ["rounds=1", "dpo={}", "ablations=true"])
    # DPO's updates count as the policy's, too.
    longer = load("demo", ["rounds=1", "dpo={training: {steps: 7}}", "ablations=true", "sft_equal=null", "sft_again=null"])
    assert config_of(longer, "sft_gold_1").more_steps == 7 + rl.rollouts * rl.epochs * rl.minibatches
    assert inputs_of(with_dpo, "average_untaught_1")["models"][1] == "dpo_1" == inputs_of(with_dpo, "sample_again_1")["models"][0]
    assert not [name for name in labels(load("demo", ["controls=false"])) if "control" in name or "equal" in name]
    with pytest.raises(PunaError, match=r"controls: takes true or false \(got 1\)"):
        load("demo", ["controls=1"])


def test_a_teacher_stands_between_the_first_finetuning_and_the_rounds() -> None:
    recipe = load("demo", ["rounds=1", "distill={}"], flow="align")
    assert inputs_of(recipe, "distill", "align") == {"student": ("sft_first",), "teacher": ("input teacher",), "prompts": ("prompts",)}
    assert inputs_of(recipe, "sft_1", "align")["model"] == ("distill",)
    beside = inputs_of(recipe, "sft_teacher", "align")
    assert beside == {"model": ("sft_first",), "instructions": (*inputs_of(recipe, "sft_first", "align")["instructions"], "pick_teacher"), "tasks": ()}
    assert inputs_of(recipe, "sample_teacher", "align")["models"] == ("input teacher",)
    assert {"evaluate_distilled", "evaluate_sft_teacher"} <= set(labels(recipe, "align"))
    assert not [name for name in labels(load("demo", flow="align"), "align") if "teacher" in name or "distill" in name]


def test_topics_are_learned_from_demonstrations_and_told_of_what_was_picked() -> None:
    recipe = load("demo", ["rounds=1", "rejection_sample={}", "data_quality={}", "topics={max_per_topic: 100}"])
    assert inputs_of(recipe, "topics_1") == {"instructions": ("data_quality_1",), "labelled": ("instructions",), "model": ("sft_first",)}
    assert inputs_of(recipe, "sft_1")["instructions"] == ("instructions", "chosen_1", "topics_1")


def test_a_reward_model_given_several_times_is_an_ensemble() -> None:
    recipe = load("demo", ["rounds=1", "reward_model=[{}, {seed: 1}]", "grpo.ensemble=min"])
    assert inputs_of(recipe, "grpo_1")["reward_model"] == ("reward_model_1", "reward_model_1.2")
    assert inputs_of(recipe, "average_1")["reward_model"] == ("reward_model_1", "reward_model_1.2")
    assert config_of(recipe, "reward_model_1").seed != config_of(recipe, "reward_model_1.2").seed and config_of(recipe, "grpo_1").ensemble == "min"


def test_a_round_without_a_reward_model_has_no_arms_of_it() -> None:
    order = labels(load("smollm2-135m", ["controls=true"], flow="align"), "align")
    arms = [name.removeprefix("control_").removesuffix("_1") for name in order if name.startswith("control_")]
    assert arms == ["checked", "gold", "pick_random", "pick_majority", "pick_verifier", "dpo_instead", "pick_instead", "untaught"]
    assert not [name for name in order if "reward_model" in name]


def test_smollm2s_round_has_a_finetuning_arm_with_as_many_further_checks_and_answers_an_update() -> None:
    """It starts from the policy that RL starts from. An example of finetuning is a prompt's distinct right answers, about 3 of 9."""
    recipe = load("smollm2-135m", ["controls=true"], flow="align")
    rl, asked, tuned = (config_of(recipe, name, "align") for name in ("grpo_1", "sample_equal_1", "sft_checked_1"))
    assert config_of(recipe, "prompts_1", "align").train == 48
    assert asked.answers * 3 * 48 >= rl.rollouts * rl.prompts * rl.answers and asked.max_tokens == rl.max_tokens
    assert tuned.training.steps >= rl.rollouts * rl.epochs * rl.minibatches
    assert tuned.training.batch_size * 3 >= rl.prompts * rl.answers / rl.minibatches
    own = inputs_of(recipe, "sft_checked_1", "align")
    assert own["model"] == inputs_of(recipe, "grpo_1", "align")["policy"] == inputs_of(recipe, "sample_equal_1", "align")["models"]


def test_dpo_in_place_of_rl_learns_from_answers_of_the_finetuned_model_where_told() -> None:
    recipe = load("demo", ["rounds=1", "sample_instead={answers: 4}", "dpo_instead={}", "ablations=true"])
    assert inputs_of(recipe, "sample_instead_1")["models"] == ("sft_1",) and config_of(recipe, "sample_instead_1").answers == 4
    own = inputs_of(recipe, "preferences_instead_1")
    assert own == {**inputs_of(recipe, "preferences_1"), "answers": ("sample_instead_1",)}
    assert inputs_of(recipe, "dpo_instead_1")["preferences"] == ("preferences_1", "preferences_instead_1")
    # The finetuning arm gets the cost of the DPO arm's checks: one checked answer of each of the two models to each prompt.
    assert inputs_of(recipe, "pick_instead_1") == {**inputs_of(recipe, "pick_verifier_1"), "answers": ("sample_instead_1",)}
    assert config_of(recipe, "pick_instead_1").pick == "verifier"
    checked = inputs_of(recipe, "sft_pick_verifier_1")
    assert inputs_of(recipe, "sft_pick_instead_1") == {**checked, "instructions": (*checked["instructions"], "pick_instead_1")}
    assert config_of(recipe, "sft_pick_instead_1") == config_of(recipe, "sft_pick_verifier_1")
    assert not [name for name in labels(load("demo", ["rounds=1", "sample_instead={}", "dpo_instead={}", "ablations=true", "pick=null"])) if "pick_v" in name]
    assert "sample_instead_1" not in labels(load("demo", ["rounds=1", "ablations=true", "dpo_instead={}"]))
    assert not [name for name in labels(load("demo", ["rounds=1", "ablations=true"])) if "instead" in name]


def test_a_name_is_a_flow_unless_it_says_stage() -> None:
    assert set(load_flows()) >= {"curate", "experiments", "pretrain", "align", "pipeline"}
    assert launch.target_named("pretrain") is FLOWS["pretrain"] is launch.target_named("flow:pretrain")
    assert launch.target_named("stage:pretrain") is load_stages()["pretrain"]
    assert isinstance(launch.target_named("extract"), Stage)
    for wrong, meant in (("stage:pipeline", "no such flow or stage"), ("flow:extract", "no such flow or stage"), ("curat", "did you mean curate")):
        with pytest.raises(PunaError, match=meant):
            launch.target_named(wrong)


# --- leaving out, repeating, adding ------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["url_filter", "url_dedup", "pii", "minhash_dedup", "line_dedup", "decontaminate", "select"])
def test_what_passes_documents_may_be_left_out(step: str) -> None:
    whole, less = labels(load("demo", flow="curate"), "curate"), labels(load("demo", [f"{step}=null"], "curate"), "curate")
    assert less == [name for name in whole if name != step]


def test_the_step_after_one_that_is_left_out_takes_what_it_would_have_taken() -> None:
    recipe = load("demo", ["line_dedup=null", "minhash_dedup=null"], "curate")
    assert inputs_of(recipe, "domains", "curate")["documents"] == ("pii",)
    recipe = load("demo", ["rounds=1", "controls=false", "sft_first=null", "sft_again=null", "grpo=null", "sft_lora={}", "average={}"])
    assert inputs_of(recipe, "sample_1")["models"] == ("pretrain", "sft_lora") and inputs_of(recipe, "average_1")["models"] == ("pretrain", "sft_1")


def test_no_prompts_are_set_aside_for_an_average_that_is_left_out() -> None:
    recipe = load("demo", ["average=null", "ablations=true"])
    assert "development" not in labels(recipe) and inputs_of(recipe, "control_gold_2")["model"] == ("sft_gold_2",)
    assert inputs_of(load("demo"), "average_2")["prompts"] == ("development",)


def test_signals_that_are_left_out_are_not_read() -> None:
    recipe = load("demo", ["quality=null", "domains=null"], "curate")
    assert inputs_of(recipe, "select_model", "curate")["signals"] == ("heuristics", "code_reasoning")


def test_what_another_step_needs_is_missed_before_anything_runs() -> None:
    found = trace(flow_named("pipeline"), load("demo", ["tokenizer=null"])).complaints
    assert found[0] == (
        "mix_experiment needs tokenizer (tokenizer), the output of tokenizer, which the recipe leaves out; keep tokenizer, or leave out "
        "mix_experiment too: --set mix_experiment=null"
    )
    found = trace(flow_named("pipeline"), load("demo", ["sample=null", "rounds=1", "controls=false"])).complaints
    assert len(found) == 1 and found[0].startswith("preferences_1 needs answers (answers), the output of sample, ") and found[0].endswith("--set preferences=null")


def test_the_chosen_size_is_trained_with_the_ladders_z_loss() -> None:
    changes = ["train_chosen_size=true", "pretrain.z_loss=1e-5"]
    with pytest.raises(PunaError, match="ladder.z_loss is 0.0 and pretrain.z_loss 1e-05: with train_chosen_size, give both the same"):
        trace(flow_named("pipeline"), load("demo", changes))
    assert trace(flow_named("pipeline"), load("demo", [*changes, "ladder.z_loss=1e-5"])).complaints == []


def test_a_pipeline_does_without_knowledge_types() -> None:
    """Pages of one topic, as in docs/tutorial.md."""
    assert trace(flow_named("pipeline"), load("demo", ["domains=null", "train_quality=null"])).complaints == []


def test_the_second_selection_is_by_models_alone() -> None:
    for recipe in (load("demo", flow="curate"), load("clean", flow="curate"), load("llama3-8b", flow="curate")):
        chosen = config_of(recipe, "select_model", "curate")
        groups = {name for name, value in chosen if isinstance(value, StageConfig)}
        assert groups == {"code_reasoning", "quality"}


def test_the_rules_of_the_selection_are_measured_if_the_recipe_asks() -> None:
    steps = {step.label: dict(step.inputs) for step in trace(flow_named("pipeline"), load("demo", ["filter_ablation={}"])).steps}
    measured, selection = steps["filter_ablation"], steps["select"]
    assert measured["documents"] == selection["documents"] and measured["selected"] == ("select",) and measured["tokenizer"] == ("tokenizer",)
    flow, recipe = flow_named("experiments"), load("demo", ["filter_ablation={}"], "experiments")
    assert {step.label: dict(step.inputs) for step in trace(flow, recipe).steps}["filter_ablation"]["selected"] == ("input selected",)
    corpus = {"documents": Output("documents", ("d",)), "domains": [Output("signals", ("s",))]}
    assert trace(flow, load("demo", [], "experiments"), corpus).complaints == []
    with pytest.raises(PunaError, match="filter_ablation needs the documents before and after a selection: give --input unselected="):
        trace(flow, recipe, corpus)


def test_steps_that_are_off_are_asked_for() -> None:
    plain = labels(load("demo", flow="curate"), "curate")
    more = labels(load("demo", ["seed=7", "semantic_dedup={}", "substring_dedup.words=40"], "curate"), "curate")
    assert [name for name in more if name not in plain] == ["semantic_dedup", "substring_dedup"]
    assert [name for name in more if name in plain] == plain


def test_a_repeated_step_takes_what_the_first_one_gave() -> None:
    recipe = load("demo", ["line_dedup=[{max_occurrences: 9}, {max_occurrences: 3}]"], "curate")
    assert inputs_of(recipe, "line_dedup.2", "curate")["documents"] == ("line_dedup",)
    assert inputs_of(recipe, "domains", "curate")["documents"] == ("line_dedup.2",)
    assert [config.max_occurrences for config in recipe.configs(fields(flow_named("curate"))["line_dedup"])] == [9, 3]


def test_repeated_signals_are_all_read_where_a_list_is_taken() -> None:
    recipe = load("demo", ["quality=[{}, {positive: other}]"], "curate")
    assert inputs_of(recipe, "select_model", "curate")["signals"] == ("heuristics", "domains", "code_reasoning", "quality", "quality.2")
    wrong = trace(flow_named("curate"), load("demo", ["language=[{}, {}]"], "curate")).complaints
    assert wrong and "language is repeated" in wrong[0]


def test_a_classifier_is_trained_where_the_step_that_applies_it_is_there() -> None:
    trained = ["train_code_reasoning", "train_domains", "train_quality"]
    assert [name for name in labels(load("demo", flow="curate"), "curate") if name.startswith("train_")] == trained
    found = labels(load("demo", ["quality=null", "domains=null"], "curate"), "curate")
    assert [name for name in found if name.startswith("train_")] == trained[:1]
    found = labels(load("demo", ["quality=null", "train_quality={}"], "curate"), "curate")
    assert "train_quality" in found and "quality" not in found
    assert "train_code_reasoning" not in labels(load("demo", ["code_reasoning=null"], "curate"), "curate")
    untrained = load("demo", ["train_quality=null"], "curate")
    assert not trace(flow_named("curate"), untrained).complaints  # the shipped model takes its place
    assert inputs_of(untrained, "quality", "curate")["classifier"] == ()
    complaints = trace(flow_named("curate"), load("demo", ["train_domains=null"], "curate")).complaints
    assert complaints[0].startswith("domains needs classifier (classifier), the output of train_domains, which the recipe leaves out")


class PurposeConfig(StageConfig):
    """The purpose of a classifier in these tests."""

    purpose: str = Field("quality", description="The stage that applies it")
    number: int = Field(0, description="Tells classifiers of one purpose apart")


@stage(kind="classifier", version="1")
def classifier_for(config: PurposeConfig, run: StageRun) -> None:
    """Write a classifier that names its purpose."""
    About(config.purpose).write(run.folder)


def test_classifiers_that_are_given_are_applied_and_not_trained(tmp_path: Path) -> None:
    store, flow, recipe = Store.open(tmp_path), flow_named("curate"), load("demo", flow="curate")

    def made(purpose: str, number: int = 0) -> Artifact:
        return execute(classifier_for, PurposeConfig(purpose=purpose, number=number), {}, store)

    def traced(*classifiers: Artifact) -> Trace:
        page = tmp_path / "page.jsonl"
        page.write_text('{"text": "x"}')
        return trace(flow, recipe, flow.by_kind([*External.resolve(f"wikipedia={page}"), *classifiers]))

    every = {purpose: made(purpose) for purpose in ("quality", "domains", "code_reasoning", "language")}
    found = {step.label: step.inputs for step in traced(*every.values()).steps}
    assert not any(label.startswith("train_") for label in found)
    assert {purpose: found[purpose]["classifier"] for purpose in every} == {p: (f"input {made.id}",) for p, made in every.items()}
    some = {step.label: step.inputs for step in traced(every["domains"]).steps}
    assert [label for label in some if label.startswith("train_")] == ["train_code_reasoning", "train_quality"]
    assert some["domains"]["classifier"] == (f"input {every['domains'].id}",) and not some["language"]["classifier"]
    with pytest.raises(PunaError, match="is the second classifier for 'quality'; give only one"):
        traced(every["quality"], made("quality", 1))
    with pytest.raises(PunaError, match="was trained for 'classify'; the flow applies classifiers for language, code_reasoning, domains, quality"):
        traced(made("classify"))


def test_a_step_of_ones_own_after_another() -> None:
    recipe = load("demo", ["add={again: {stage: line_dedup, after: pii}}", "again.max_occurrences=3"], "curate")
    assert inputs_of(recipe, "again", "curate")["documents"] == ("pii",)
    assert inputs_of(recipe, "minhash_dedup", "curate")["documents"] == ("again",)
    assert config_of(recipe, "again", "curate").max_occurrences == 3


def test_a_step_of_ones_own_into_another() -> None:
    recipe = load("demo", ["add={more: {stage: judge, into: select_model, inputs: {model: extract}}}"], "curate")
    with pytest.raises(PunaError, match="input 'model' takes model, but extract gives documents"):
        trace(flow_named("curate"), recipe)
    recipe = load("demo", ["add={more: {stage: domains, into: select_model, inputs: {classifier: train_domains}}}"], "curate")
    assert inputs_of(recipe, "more", "curate") == {"documents": ("line_dedup",), "classifier": ("train_domains",)}
    assert inputs_of(recipe, "select_model", "curate")["signals"] == ("heuristics", "domains", "code_reasoning", "quality", "more")


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("{again: {stage: line_dedupe, after: pii}}", "add.again: line_dedupe: no such stage; did you mean line_dedup"),
        ("{again: {stage: line_dedup}}", "write either after: STEP or into: STEP"),
        ("{pii: {after: pii}}", "a step or field with this name exists"),
        ("[pii]", "add: .*dictionary"),
    ],
)
def test_a_wrong_addition_is_named(added: str, message: str) -> None:
    with pytest.raises(PunaError, match=message):
        load("demo", [f"add={added}"])


def test_a_place_that_is_not_there_is_named() -> None:
    recipe = load("demo", ["add={again: {stage: line_dedup, after: minhash}}"], "curate")
    assert trace(flow_named("curate"), recipe).complaints == ["add.again: minhash is not a step of curate; did you mean minhash_dedup?"]


# --- values ------------------------------------------------------------------------------------------------


def test_the_seed_reaches_every_step_that_has_none_of_its_own() -> None:
    recipe = load("demo", ["seed=7", "dpo.seed=3"])
    assert config_of(recipe, "pretrain").seed == config_of(recipe, "prompts").seed == 7
    assert config_of(recipe, "dpo_1").seed == 3 + 1_000_003
    assert all(getattr(step.config, "seed", 7) is not None for step in trace(flow_named("pipeline"), recipe).steps)


def test_rounds_differ_in_their_seed_and_their_prompts_alone() -> None:
    recipe = load("demo", ["rounds=3"])
    one, two = config_of(recipe, "sample_1"), config_of(recipe, "sample_2")
    assert one.seed != two.seed and one.model_copy(update={"seed": 0}) == two.model_copy(update={"seed": 0})
    first: PromptsConfig = config_of(recipe, "prompts")
    slices = ("development_pool", "prompts_1", "prompts_2", "prompts_3")
    taken = [(first.skip, first.train)] + [(c.skip, c.train) for c in (config_of(recipe, name) for name in slices)]
    assert all(skip == before[0] + before[1] for before, (skip, _) in pairwise(taken))
    assert all(config_of(recipe, f"prompts_{n}").heldout == 0 for n in (1, 2, 3))


@given(st.integers(1, 40), st.integers(0, 2**31 - 1))
def test_the_seed_of_a_round_is_a_seed(number: int, seed: int) -> None:
    config = in_round(SftConfig(seed=seed), number)
    assert isinstance(config, SftConfig) and 0 <= config.seed < 2**31
    assert in_round(SelectConfig(), number) == SelectConfig()


def test_a_default_is_laid_under_what_the_recipe_says() -> None:
    recipe = load("demo", ["sft_lora={}"])
    assert config_of(recipe, "sft_lora").method == "lora"
    assert config_of(load("demo", ["sft_lora.method=full"]), "sft_lora").method == "full"


def test_a_change_reaches_a_nested_field_and_a_member_of_a_list() -> None:
    recipe = load("demo", ["select.gopher_quality.min_words=60", "pretrain.phases.0.steps=777"])
    assert recipe.one("select", select, SelectConfig).gopher_quality.min_words == 60  # type: ignore[union-attr]
    assert config_of(recipe, "pretrain").phases[0].steps == 777


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("select.gopher_quality.min_wrods=60", "select.gopher_quality.min_wrods: no such field; did you mean min_words"),
        ("pretrain.phases=[{stpes: 3}]", "pretrain.phases.0.stpes: no such field; did you mean steps"),
        ("pretrain.phases.4.steps=3", "4 is not an index of a list of 1"),
        ("url_filter.x=1", "url_filter.x: no such field; there are "),
        ("dpo.compute={}", r"dpo.compute: no such field; did you mean training.compute\?"),
        ("pretrain.rows_per_step=3", r"pretrain.rows_per_step: no such field; did you mean phases.0.rows_per_step\?"),
        ("rows_per_step=3", r"rows_per_step: no such field; did you mean .*pretrain.phases.0.rows_per_step"),
        ("line_dedup.max_occurrences=0", "line_dedup.max_occurrences: .*greater than or equal to 1"),
        ("line_dedup=[{max_occurrences: 0}]", "line_dedup.0.max_occurrences: .*greater than or equal to 1"),
        ("line_dedup=3", "line_dedup: is not a group of fields; write"),
        ("nosuchstage.x=1", "nosuchstage: no such field"),
        ("lin_dedup.x=1", "lin_dedup: no such field; did you mean line_dedup"),
        ("pretrain.seed=many", "pretrain.seed: .*integer"),
        ("rounds=99", "rounds: takes a whole number from 0 to 20"),
        ("seed=-1", "seed: .*greater than or equal to 0"),
        ("line_dedup", "write FIELD=VALUE"),
        ("seed=true", "seed: .*valid integer"),
        ("base=clean", "base: no such field"),
        ("add=5", "add: .*dictionary"),
        ("seed.deep=1", "seed is not a group"),
    ],
)
def test_a_wrong_change_is_named(change: str, message: str) -> None:
    with pytest.raises(PunaError, match=message):
        load("demo", [change])


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(PunaError) as error:
        load("demo", ["line_dedup.max_occurrences=0", "nosuchstage.x=1", "rounds=-1", "dpo.x=1"])
    assert len(str(error.value).splitlines()) == 4


def test_fields_of_other_flows_are_checked_but_not_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("prompts: null\ndecontaminate: null\nrounds: 3\n")
    assert "prompts" not in labels(load(str(file), flow="curate"), "curate")
    file.write_text("prompts: null\nrounds: many\n")
    with pytest.raises(PunaError, match="rounds: takes a whole number"):
        load(str(file), flow="curate")


def test_an_unknown_recipe_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(PunaError, match="recipes are .*demo"):
        load("nothing")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(PunaError, match="broken.yaml"):
        load(str(broken))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompts: {tasks: [{task: chain_sum}]}\nminhash_dedpu: {bands: 3}", "minhash_dedpu: no such field; did you mean minhash_dedup"),
        ("rounds: 3", "prompts.tasks: is missing"),
        ("[a, b]", "is not a mapping of steps"),
        ("a: [1, 2", "expected ',' or ']'"),
        ("a: &a [*a]", "aliases expand to more than"),
    ],
)
def test_a_wrong_recipe_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(PunaError, match=f"(?s)recipe {file}: .*{message}"):
        load(str(file))


def test_aliases_that_stand_for_billions_of_values_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    file.write_text("\n".join(lines))
    with pytest.raises(PunaError, match="aliases expand to more than"):
        load(str(file))
    file.write_text("x: " + "[" * 5000)
    with pytest.raises(PunaError, match=r"bomb\.yaml"):
        load(str(file))


def test_a_change_to_one_use_of_an_alias_leaves_the_others(tmp_path: Path) -> None:
    changed = load("demo", ["ladder.model.hidden_size=256"])
    assert config_of(changed, "ladder").model.hidden_size == 256 and config_of(changed, "pretrain").model.hidden_size == 128


def test_values_are_yaml() -> None:
    values: dict = {"a": {"b": 1}}
    overridden(values, "a.c=[1, 2]")
    overridden(values, "d=null")
    assert values == {"a": {"b": 1, "c": [1, 2]}, "d": None}


def test_a_string_takes_the_text_that_was_written() -> None:
    verifier = '{"name":"regex","pattern":"[aeiou]"}'
    kind = load_stages()["import_prompts"]
    assert launch.stage_config(kind, None, [f"verifier={verifier}"]).verifier == verifier  # type: ignore[attr-defined]
    assert launch.stage_config(kind, None, ["import_prompts.verifier=012"]).verifier == "012"  # type: ignore[attr-defined]
    assert launch.stage_config(kind, None, ['verifier="012"']).verifier == "012"  # type: ignore[attr-defined]
    with pytest.raises(PunaError, match="heldout_fraction: .*valid number"):
        launch.stage_config(kind, None, ["heldout_fraction={a: 1}"])
    assert config_of(load("demo", ["pretrain.phases.0.name=[3]"]), "pretrain").phases[0].name == "[3]"


def test_a_group_s_own_error_does_not_repeat_the_group() -> None:
    with pytest.raises(PunaError) as error:
        load("demo", ["dpo.training.compute.layout={data: 2, shard: 2, tensor: 2, pipeline: 2}"])
    assert str(error.value).endswith("or of data, shard, expert")


def test_a_group_given_by_set_is_laid_on_the_recipes_own() -> None:
    changed = config_of(load("clean", ["select={gopher_quality: {min_words: 60}}"]), "select").model_dump()
    assert changed["gopher_quality"]["min_words"] == 60
    expected = config_of(load("clean"), "select").model_dump()
    own = SelectConfig().model_dump()
    assert expected["fineweb"] != own["fineweb"]  # the base has its own values, which would be lost if the group were replaced
    assert changed == {**expected, "gopher_quality": {**expected["gopher_quality"], "min_words": 60}}


def test_a_group_given_by_set_changes_one_member_of_a_list() -> None:
    values: dict = {"runs": [{"steps": 1, "seed": 2}, {"steps": 3, "seed": 4}]}
    overridden(values, "runs.1={steps: 5}")
    assert values == {"runs": [{"steps": 1, "seed": 2}, {"steps": 5, "seed": 4}]}


def test_every_shipped_recipe_loads() -> None:
    for name in shipped_recipes():
        flow = {"clean": "curate", "continue": "pretrain", "one-gpu": "pretrain", "phases": "pretrain", "safety": "safety", "capabilities": "capabilities"}.get(name, "pipeline")
        assert trace(flow_named(flow), load(name, flow=flow)).complaints == []


# --- inputs of a flow --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["documents/3f2a91", "3f2a", "policy@latest", "model/0123456789ab"])
def test_what_is_an_artifact(text: str) -> None:
    assert is_artifact(text)


@pytest.mark.parametrize(
    "text", ["crawl/x.warc.gz", "news=/data/news", "/data/3f2a", "hf://datasets/a/b", "hf://datasets/a/b@abc123", "pages", "documents/notes", "a@b/c.jsonl"]
)
def test_what_is_a_file(text: str) -> None:
    assert not is_artifact(text)


def test_a_folder_whose_name_could_be_a_key_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("2024", "documents/2024", "a@b"):
        assert is_artifact(name) and not Path(name).exists()
        Path(name).mkdir(parents=True)
        assert not is_artifact(name)


def test_a_source_that_quality_learns_from_must_be_there(tmp_path: Path) -> None:
    page = tmp_path / "news.jsonl"
    page.write_text('{"text": "x"}\n')
    store = Store.open(tmp_path / "store")
    flow = flow_named("curate")

    def ask(changes: list[str], *texts: str) -> dict[str, object]:
        return launch.checked_inputs(flow, load("demo", ["domains=null", *changes], "curate"), texts, store, quiet=True)

    with pytest.raises(PunaError, match=r"positive_sources=\['wikipedia'\]: no input has such a name \(they are news\)"):
        ask([], str(page))
    ask(["quality=null", "select_model.quality=null"], str(page))
    with pytest.raises(PunaError, match="all inputs have these names; others are needed too"):
        ask(["train_quality.positive_sources=[good]"], f"good={page}")
    assert isinstance(ask(["train_quality.positive_sources=[good]"], f"good={page}", str(page))["inputs"], list)


def test_every_unmet_need_is_told_before_the_first_stage(tmp_path: Path) -> None:
    page = tmp_path / "pages.jsonl"
    page.write_text("".join(f'{{"text": "The goal of the football team, number {n}, in the match of the league"}}\n' for n in range(40)))
    store = Store.open(tmp_path / "store")
    with pytest.raises(PunaError) as error:
        launch.checked_inputs(flow_named("curate"), load("demo", ["select.domains={}"], "curate"), [str(page)], store, quiet=True)
    said = str(error.value).splitlines()
    assert [line.partition(":")[0] for line in said] == ["train_domains", "train_quality"] and "--set domains=null" in said[0] and "of 40 pages" in said[0]
    with pytest.raises(PunaError, match=r"select_model: rule quality\.\w+ reads the signal 'quality.*', which no input contains"):
        launch.checked_inputs(flow_named("curate"), load("demo", ["quality=null", "domains=null"], "curate"), [str(page)], store, quiet=True)
    assert store.runs() == [] and store.artifacts() == []


def test_inputs_are_read_once_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "news.jsonl"
    page.write_text('{"text": "x"}\n')
    read: list[str] = []
    original = External.resolve

    def resolve(text: str) -> list[External]:
        read.append(text)
        return original(text)

    def session(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(External, "resolve", resolve)
    monkeypatch.setattr(launch, "session", session)
    store = Store.open(tmp_path / "store")
    with pytest.raises(PunaError, match="positive_sources"):
        launch.run(launch.Request("curate", inputs=(str(page),)), store)
    with pytest.raises(InterruptedError):
        launch.run(launch.Request("curate", inputs=(str(page),), changes=("quality=null", "select_model.quality=null", "domains=null")), store)
    assert read == [str(page)] * 2 and store.runs() == []


def test_files_where_an_artifact_is_wanted_name_the_command(tmp_path: Path) -> None:
    pairs = tmp_path / "my-pairs.jsonl"
    pairs.write_text("{}\n")
    with pytest.raises(PunaError, match=r"dpo: takes no files, so import them first: .*`puna import preferences .* --as my_pairs`, then --input my_pairs@latest"):
        launch.run_stage(dpo, launch.Request("dpo", inputs=(str(pairs),)), Store.open(tmp_path / "store"))
    with pytest.raises(PunaError, match="has no input for|needs the input"):
        flow_named("pretrain").by_kind(External.resolve(str(pairs)))


def test_a_flow_without_inputs_takes_what_its_aliases_name(tmp_path: Path) -> None:
    flow = flow_named("pretrain")
    assert latest(flow.inputs, Store.open(tmp_path), True) == []
    assert flow.inputs[0].name == "documents"
    assert isinstance(flow.placeholders()["documents"], Output)


def test_stages_outside_a_flow_say_so() -> None:
    from puna.flows.engine.declare import step

    with pytest.raises(PunaError, match="no flow is in progress"):
        step(line_dedup)
    with pytest.raises(PunaError, match="no flow is in progress"):
        step(prompts)


def test_every_name_that_a_recipe_can_hold_has_a_schema_with_its_own_description():
    names = {name for flow in load_flows().values() for name in schema(flow)["properties"]}
    assert {"select_model", "domains", "seed", "project"} <= names
    found = {name: schema_named(name) for name in names}
    assert [name for name, own in found.items() if own is None or own.get("description") == StageConfig.__doc__] == []
    assert config_schema(load_stages()["domains"])["description"] == first_sentence(load_stages()["domains"].doc)
    printed = CliRunner().invoke(app, ["fields", "select_model"])
    assert printed.exit_code == 0 and json.loads(printed.stdout)["properties"].keys() == load_stages()["select"].config.model_fields.keys()
