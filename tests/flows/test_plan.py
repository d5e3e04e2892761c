"""`puna plan` compared with accounting of the same model by hand."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.flows.cli.notebook import run_flow
from puna.flows.engine import cost
from puna.flows.engine.cost import Total, Training, plan_flow
from puna.flows.engine.recipe import Recipe
from puna.flows.engine.trace import flow_named, load
from puna.models import accounting
from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages import executors
from puna.stages.contract import External, execute
from puna.stages.conversations import asking
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.stages.training.chosen_size import ChosenSize
from puna.stages.training.phase import SHAPE
from puna.storage import PunaError, Store
from puna.storage.schemas import table_schema

OWN = '''
from puna.stages.contract import Documents, StageConfig, StageRun, stage


class PlannedConfig(StageConfig):
    """No settings."""


@stage(kind="documents")
def planned_stage(documents: Documents, config: PlannedConfig, run: StageRun) -> None:
    """Keep every document."""
'''


def costs(recipe: Recipe, gpu: str | None, gpus: int, size: ChosenSize | None = None) -> dict[str, Any]:
    return cost.costs(Training.of(recipe), gpu, gpus, size=size)


def test_the_plan_is_the_sum_of_its_phases():
    recipe = load("demo", [], "pretrain")
    found = costs(recipe, "H100", 1)
    training = recipe.one("pretrain", pretrain, PretrainConfig)
    length = recipe.one("tokenize", tokenize, TokenizeConfig).sequence_length
    config = training.model.complete(recipe.one("tokenizer", tokenizer, TokenizerConfig).vocab_size, length)
    assert found["parameters"] == accounting.parameters(config).total
    step = [length] * training.phases[0].rows_per_step
    phase = found["phases"][0]
    assert phase["tokens"] == sum(step) * training.phases[0].steps
    assert phase["flops"] == accounting.training_flops(config, step) * training.phases[0].steps
    assert found["seconds"] == sum(p["seconds"] for p in found["phases"])
    eight = costs(recipe, "H100", 8)
    assert found["seconds"] / 8 < eight["seconds"]  # eight devices exchange data that one need not
    adamw = costs(load("demo", ["pretrain.optimizer.name=adamw"], "pretrain"), "H100", 1)  # Muon keeps 4 bytes less per parameter
    assert adamw["state_bytes"] - found["state_bytes"] == 4 * adamw["parameters"]
    assert adamw["phases"][0]["peak_bytes"] - found["phases"][0]["peak_bytes"] == 4 * adamw["parameters"]
    with pytest.raises(PunaError, match="there is no data sheet for the GPU 'TPU'"):
        costs(recipe, "TPU", 1)
    with pytest.raises(PunaError, match="--gpus needs --gpu"):
        costs(recipe, None, 2)


def test_a_total_says_which_steps_it_leaves_out() -> None:
    steps = ("split", "tokenizer", "mix", "tokenize", "pretrain")
    assert str(Total(27, 13_600, 714e6, steps)).endswith(" of memory, without an estimate for split, tokenizer, mix, tokenize and 1 more (no earlier run)")
    assert str(Total(0, 0, 0, steps[:1])) == "no estimate for split (no earlier run)"


def test_the_command_prints_json_and_text():
    result = CliRunner().invoke(app, ["plan", "--gpu", "A100", "--json", "--set", "pretrain.phases=[{steps: 70}]"])
    assert json.loads(result.output)["phases"][0]["steps"] == 70
    text = CliRunner().invoke(app, ["plan", "--gpu", "A100"]).output
    assert "phase initial" in text and "arithmetic_intensity" in text


def test_the_plan_counts_the_model_that_a_training_goes_on_from_or_the_chosen_one(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    shape = ModelConfig(vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    save(Transformer(shape), tmp_path / "model", Tokenizer.train(["a tokenizer of bytes"], 300))
    model = execute(import_model, ImportModelConfig(), {"model": External.resolve(f"model={tmp_path / 'model'}")[0]}, store)
    page = {"id": "0" * 32, "url": "https://x.org", "fetched_at": datetime(2026, 1, 1, tzinfo=UTC), "source": "web", "title": None, "text": "a"}
    documents = store.import_table("documents", pa.Table.from_pylist([page], schema=table_schema("documents").schema))
    words = ["plan", "pretrain", "--store", str(store.root), "--input", documents.id, "--gpu", "H100", "--json", "--recipe"]
    found = json.loads(CliRunner().invoke(app, [*words, "continue", "--input", model.id]).output)
    row = shape.replace(max_position_embeddings=2048)
    steps = -(-10_000_000 // (8 * 2048))
    assert found["parameters"] == accounting.parameters(shape).total and found["phases"][0]["steps"] == steps
    assert found["flops"] == pytest.approx(accounting.training_flops(row, [2048] * 8) * steps)
    # The size is unknown before the small runs; after them it is that of the artifact.
    assert json.loads(CliRunner().invoke(app, [*words, "one-gpu"]).output)["model"].startswith("chosen by choose_size")
    size = ChosenSize(sequence_length=2048, model=SHAPE, optimizer={"name": "muon"}, phase={"until": 2**22, "rows_per_step": 4})
    chosen = costs(load("one-gpu", [], "pretrain"), "H100", 1, size=size)
    assert chosen["parameters"] == accounting.parameters(SHAPE.complete(32768, 2048)).total and chosen["tokens"] == 2**22


def test_a_stage_is_planned_by_the_rows_and_the_vocabulary_of_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "cores", lambda: 1)
    store = Store.open(tmp_path / "store")
    page = {"id": "0" * 32, "url": "https://x.org", "fetched_at": datetime(2026, 1, 1, tzinfo=UTC), "source": "web", "title": None, "text": "a llama " * 9}
    documents = store.import_table("documents", pa.Table.from_pylist([page], schema=table_schema("documents").schema))
    words = execute(tokenizer, TokenizerConfig(vocab_size=265), {"documents": [documents]}, store)
    rows = execute(tokenize, TokenizeConfig(sequence_length=16), {"documents": documents, "tokenizer": words}, store)
    command = ["plan", "stage:pretrain", "--store", str(store.root), "--input", rows.id, "--input", words.id, "--json", "--set"]
    many = "phases=[{steps: 70, rows_per_step: 8}]"
    found = json.loads(CliRunner().invoke(app, [*command, many, "--gpu", "H100", "--gpus", "4", "--set", "compute.layout.tensor=2"]).output)
    shape = PretrainConfig().model.complete(265, 16)
    assert found["parameters"] == accounting.parameters(shape).total and found["tokens"] == 70 * 8 * 16
    assert found["phases"][0]["layouts"][0].startswith("data 2 x tensor 2: ") and [step["state"] for step in found["steps"]] == ["runs"]
    assert found["flops"] == 70 * accounting.training_flops(shape, [16] * 8)
    with pytest.raises(PunaError, match="phase initial reads the tokens long, which are not given"):
        CliRunner().invoke(app, [*command, "phases=[{tokens: long}]", "--gpu", "H100"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("name", "parameters", "tokens", "flops"),
    [  # parameters: model cards of Llama 3.1 and 3.2; tokens and FLOPs: the report, which counts 6 per parameter and token
        ("llama3-1b", 1.236e9, 9.0e12, 6 * 1.236e9 * 9.0e12), ("llama3-8b", 8.03e9, 15.6e12, 6 * 8.03e9 * 15.6e12),
        ("llama3-405b", 405.85e9, 15.6e12, 3.8e25),
    ],
)  # fmt: skip
def test_the_recipes_of_the_report_have_its_numbers(name: str, parameters: float, tokens: float, flops: float) -> None:
    found = costs(load(name, [], "pretrain"), "H100", 16_000)
    assert found["parameters"] == pytest.approx(parameters, rel=0.002) and found["tokens"] == pytest.approx(tokens, rel=0.005)
    # Attention is added on top, which counts most for long contexts and small models.
    assert flops < found["flops"] < flops * (1.1 if name == "llama3-405b" else 1.8)


OTHERS = ("url_filter", "url_dedup", "language", "heuristics", "select", "pii", "minhash_dedup", "line_dedup", "quality", "select_model")


def test_a_plan_tells_what_is_reused_what_runs_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "cores", lambda: 1)
    page, place = tmp_path / "page.jsonl", tmp_path / "store"
    page.write_text('{"text": "The llamas of the high plain."}\n')

    def states(*changes: str) -> list[tuple[str, str, str]]:
        recipe = load("clean", [*(f"{name}=null" for name in OTHERS), *changes], "curate")
        return [(step.label, step.state, step.why) for step in plan_flow(flow_named("curate"), recipe, [str(page)], str(place))]

    assert states() == [("ingest", "runs", "never ran"), ("extract", "after", "ingest")] and not place.exists()
    made = run_flow("curate", page, recipe="clean", changes=[f"{name}=null" for name in OTHERS], store=place)
    assert states() == [("ingest", "reused", made["ingest"].id), ("extract", "reused", made["extract"].id)]
    ingest, extract = states("extract.max_depth=999")
    assert ingest[1] == "reused" and extract == ("extract", "runs", "config max_depth: 1000 → 999")
    # An earlier run gives an estimate for a changed one; a single stage has a plan too.
    words = ["plan", "stage:extract", "--store", str(place), "--input", made["ingest"].id, "--set", "max_depth=999", "--json"]
    (step,) = json.loads(CliRunner().invoke(app, words).output)["steps"]
    assert step["state"] == "runs" and step["expected"]["rows"] == 1
    assert step["expected"]["seconds"] == pytest.approx(made["extract"].manifest.timings["seconds"], rel=0.05)
    (tmp_path / "planned.py").write_text(OWN)
    words = ["plan", "planned_stage", "--store", str(place), "--module", str(tmp_path / "planned.py"), "--input", made["extract"].id, "--json"]
    # In its own process, since a declared stage stays.
    (step,) = json.loads(subprocess.run([sys.executable, "-m", "puna.flows.cli.main", *words], check=True, capture_output=True).stdout)["steps"]
    assert (step["stage"], step["state"], step["why"]) == ("planned_stage", "runs", "never ran")
    said = CliRunner().invoke(app, ["plan", "align", "--recipe", "smollm2-135m", "--store", str(place)]).output
    assert "sample_1                 after   input model, prompts_1" in said and "phase" not in said
    with pytest.raises(PunaError, match="only pretraining and the stage sample are planned for GPUs, and align with recipe smollm2-135m is neither"):
        CliRunner().invoke(app, ["plan", "align", "--recipe", "smollm2-135m", "--gpu", "A100"], catch_exceptions=False)


def test_a_plan_too_large_for_a_cpu_names_a_device_that_can() -> None:
    """llama3-1b on a CPU was once estimated at hundreds of millions of hours."""
    one = costs(load("llama3-1b", [], "pretrain"), None, 1)
    assert str(one["device"]).startswith("32 x H100 (no --gpu given; this CPU would take years") and one["seconds"] <= 90 * 86_400
    assert one["seconds"] == costs(load("llama3-1b", [], "pretrain"), "H100", 32)["seconds"]
    large = costs(load("llama3-405b", [], "pretrain"), None, 1)
    assert str(large["device"]).startswith("16384 x H100 (no --gpu given") and large["seconds"] > 90 * 86_400  # no number is fast enough
    for phase in large["phases"]:
        assert "shard" in phase["layouts"][0] and "x tensor 8" in phase["layouts"][0] and phase["peak_bytes_checkpointing"] < 72e9
    assert costs(load("demo", [], "pretrain"), None, 1)["device"] == "this CPU"


def test_a_plan_for_several_devices_lists_the_layouts_that_fit() -> None:
    said = CliRunner().invoke(app, ["plan", "pretrain", "--recipe", "llama3-1b", "--gpu", "H100", "--gpus", "8"]).output
    assert said.count("s a step") >= 6 and "times are computed" in said
    plan = costs(load("llama3-1b", [], "pretrain"), "H100", 8)
    for phase in plan["phases"]:
        assert len(phase["layouts"]) == 3 and f"{phase['seconds_per_step']:.3g} s a step" in phase["layouts"][0]
    assert plan["seconds"] == pytest.approx(sum(phase["seconds_per_step"] * phase["tokens"] / phase["tokens_per_step"] for phase in plan["phases"]))
    assert all("context" not in "".join(phase["layouts"]) for phase in plan["phases"])
    (alone,) = costs(load("llama3-1b", [], "pretrain"), "H100", 1)["phases"][0]["layouts"]
    assert alone.startswith("one process: ") and "computes each layer twice" in alone  # otherwise 165 GB for rows


def test_a_plan_has_the_layout_of_its_recipe_and_the_bytes_of_one_of_its_devices() -> None:
    """By hand, bf16 with AdamW's two moments: 20 bytes per parameter; 16 where FSDP2 keeps fp32 shards only."""
    def plan(gpus: int, **sizes: int) -> dict[str, Any]:
        return costs(load("llama3-1b", [f"pretrain.compute.layout.{axis}={size}" for axis, size in sizes.items()], "pretrain"), "H100", gpus)

    whole = plan(8, data=8)
    assert whole["state_bytes"] == 20 * whole["parameters"] and all(phase["layouts"][0].startswith("data 8: ") for phase in whole["phases"])
    cut = plan(16, shard=8)  # repeated: two copies
    assert cut["state_bytes"] == 2 * cut["parameters"] and all(phase["layouts"][0].startswith("data 2 x shard 8: ") for phase in cut["phases"])
    for phase, other in zip(cut["phases"], whole["phases"], strict=True):
        assert len(phase["layouts"]) == 1 and f"{phase['state_bytes'] / 1e9:,.1f}" == "2.5"
        # The activations are the same, and FSDP2 gathers only a few layers.
        assert phase["activation_bytes"] == other["activation_bytes"] < phase["peak_bytes"] < other["peak_bytes"] - 15e9
        shown = {f"{phase[name] / 1e9:,.0f} GB per device" for name in ("peak_bytes", "peak_bytes_checkpointing")}
        assert any(text in phase["layouts"][0] for text in shown)
    assert plan(2, tensor=2)["phases"][0]["layouts"][0].startswith("tensor 2")
    for gpus, sizes, problem in (
        (6, {"shard": 4}, "compute.layout = shard 4 does not fit 6 GPUs; set --gpus to 4 or a multiple"),
        (5, {"tensor": 5}, "num_attention_heads is 32, which it must divide"), (2, {"context": 2}, "proved only on CPUs"),
        (8192, {"data": 8192}, "phase initial has"),
    ):  # fmt: skip
        with pytest.raises(PunaError, match=problem):
            plan(gpus, **sizes)
    (fails,) = costs(load("llama3-405b", ["pretrain.compute.layout.tensor=8"], "pretrain"), "H100", 8)["phases"][0]["layouts"]
    assert fails.startswith("tensor 8 does not fit into H100. The least memory: tensor 8: ")


def test_a_plan_that_no_layout_fits_says_so() -> None:
    plan = costs(load("llama3-405b", [], "pretrain"), "H100", 16)
    assert all("no tested layout fits into H100" in phase["layouts"][0] and phase["seconds"] is None for phase in plan["phases"])
    assert plan["seconds"] is None


def test_the_plan_of_answers_is_the_roofline_of_the_model_and_the_prompts(tmp_path: Path) -> None:
    """By hand: 30 answers of 20 tokens to 3 prompts on an H100, all at once; each step reads the weights and all keys and values."""
    store = Store.open(tmp_path / "store")
    shape = ModelConfig(vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    own = Tokenizer.train(["a tokenizer of bytes"], 300)
    save(Transformer(shape), tmp_path / "model", own)
    model = execute(import_model, ImportModelConfig(), {"model": External.resolve(f"model={tmp_path / 'model'}")[0]}, store)
    texts = ["short", "a longer question, which counts", "last"]
    rest = {"task": "t", "split": "train", "tools": None, "reference": "1", "verifier": None}
    rows = [{"id": str(n), "messages": asking(text), **rest} for n, text in enumerate(texts)]
    prompts = store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))
    words = ["plan", "sample", "--store", str(store.root), "--input", model.id, "--input", prompts.id, "--set", "answers=10", "--set", "max_tokens=20"]
    (found,) = json.loads(CliRunner().invoke(app, [*words, "--gpu", "H100", "--json"]).output)["answering"]
    lengths = [len(own.chat([{"role": "user", "content": text}])) for text in texts]
    key = 2 * 2 * 8 * 2 * 1  # layers, keys and values, width of a head, bytes, heads of keys
    assert found["cache_bytes_per_token"] == key and found["answers_at_once"] == found["answers"] == 30
    assert found["longest_prompt_tokens"] == max(lengths) and found["mean_prompt_tokens"] == pytest.approx(sum(lengths) / 3)
    context, weights = max(lengths) + 20, 2 * sum(p.numel() for p in Transformer(shape).parameters())
    read = (weights - (0 if shape.tie_word_embeddings else 2 * 300 * 16) + 30 * context * key) / (0.85 * 3.35e12)
    assert found["bound_by"] == "memory" and found["least_step_seconds"] == pytest.approx(read)
    assert found["most_tokens_per_second"] == pytest.approx(30 / read)
    matrices = sum(p.numel() for name, p in Transformer(shape).named_parameters() if p.ndim == 2 and "embed" not in name)
    asked = 2 * (matrices + (300 * 16 if shape.tie_word_embeddings else 0)) * sum(lengths) / (0.75 * 989e12)
    assert found["least_seconds"] == pytest.approx(20 * read + asked)
    few = json.loads(CliRunner().invoke(app, [*words, "--gpu", "H100", "--json", "--set", "serving.memory=0.00002"]).output)["answering"][0]
    assert few["answers_at_once"] == int(20_000 / (key * (20 + max(lengths) / 10))) < 30
    with pytest.raises(PunaError, match="an answer of 20 tokens to the longest prompt"):
        CliRunner().invoke(app, [*words, "--gpu", "H100", "--set", "serving.memory=0.000001"], catch_exceptions=False)
    with pytest.raises(PunaError, match="--gpus 2: the cost of sample is planned for one GPU"):
        CliRunner().invoke(app, [*words, "--gpu", "H100", "--gpus", "2"], catch_exceptions=False)
    said = CliRunner().invoke(app, words).output
    assert "least_seconds" in said and "this CPU" in said
    one, parts = (
        json.loads(CliRunner().invoke(app, [*words, "--json", "--set", f"serving.layout={layout}"]).output)["answering"][0]
        for layout in ("{}", "{data: 2, pipeline: 2}")
    )
    assert (one["layout"], parts["layout"]) == ("one process", "pipeline 2 x data 2") and parts["answers_at_once"] == 30
    assert [one[name] / parts[name] for name in ("weight_bytes", "cache_bytes_per_token", "cache_bytes")] == [2.0, 2.0, 4.0]
    misfit = "num_key_value_heads is 1, which it must divide"
    for more, layout, problem in ((["--gpu", "H100"], "pipeline", "proved only on CPUs"), (["--gpu", "H100"], "tensor", misfit), ([], "tensor", misfit)):
        with pytest.raises(PunaError, match=problem):
            CliRunner().invoke(app, [*words, *more, "--set", f"serving.layout={{{layout}: 2}}"], catch_exceptions=False)


def test_a_plan_with_tasks_counts_whole_weights_and_needs_no_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "one.yaml").write_text("task: one\n")
    whole: list[bool] = []
    monkeypatch.setattr("puna.models.training.parallel.estimate.best_layouts", lambda config, work, *more, only: whole.append(work.whole) or [])
    words = ["plan", "pretrain", "--recipe", "llama3-1b", "--gpu", "H100", "--gpus", "8", "--store", str(tmp_path / "store"), "--json"]
    plans = [json.loads(CliRunner().invoke(app, [*words, *more]).output) for more in ([], ["--input", f"tasks={tmp_path / 'tasks'}"])]
    assert not whole[0] and all(whole[len(whole) // 2 :])
    split, *_ = plans[1]["steps"]
    assert (split["label"], split["state"], split["why"]) == ("split", "after", "input documents")


def test_a_plan_refuses_by_the_same_words_what_a_run_refuses_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path / "store")
    page = {"id": "0" * 32, "url": "https://x.org", "fetched_at": datetime(2026, 1, 1, tzinfo=UTC), "source": "web", "title": None, "text": "a"}
    documents = store.import_table("documents", pa.Table.from_pylist([page], schema=table_schema("documents").schema))
    domains = store.import_table("signals", pa.table({"id": ["a"], "domain": ["x"]}))
    own = ["pretrain", "--recipe", "demo", "--store", str(store.root), "--input", documents.id, "--input", f"domains={domains.id}"]

    def refusals(*words: str) -> list[str]:
        results = [CliRunner().invoke(app, [command, *own, *words]) for command in ("plan", "run")]
        assert all(isinstance(result.exception, PunaError) for result in results), words
        return [str(result.exception) for result in results]

    for change, problem in (
        ("pretrain.phases=[{steps: 9, tokens: best}]", "phase initial reads the tokens best, which are not given: name tokenize_best"),
        ("pretrain.compute.layout={expert: 2}", "layout.expert = 2: the model has no experts"),
        ("split.heldout_fraction=0", "evaluate_base measures documents that split holds out"),
        ("tokenize=null", "the output of tokenize, which the recipe leaves out"),
    ):  # fmt: skip
        plan, run = refusals("--set", change)
        assert problem in plan and set(plan.splitlines()) <= set(run.splitlines())  # a run also counts its processes
    assert CliRunner().invoke(app, ["plan", *own, "--set", "pretrain.compute.layout={shard: 2}"]).exit_code == 0  # the run starts processes
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    plan, run = refusals()
    assert plan == run and "GB of memory are free" in plan
    assert CliRunner().invoke(app, ["plan", *own, "--gpu", "H100"]).exit_code == 0  # the memory of another machine
