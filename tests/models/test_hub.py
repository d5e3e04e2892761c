"""The transformers wrappers: the same numbers as Llama, and used in generate, PEFT and TRL."""

import json

import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.formats.checkpoint import load, save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_theta=500_000.0, initializer_range=0.2)


def build(head="lm", **changes):
    config = ModelConfig(**{**CONFIG.model_dump(), **changes})
    return Transformer(config, head, seed=0)


def wrap(model, **options):
    from puna.models.formats.hub import PunaForCausalLM, PunaForSequenceClassification

    kind = PunaForCausalLM if model.head == "lm" else PunaForSequenceClassification
    return kind.from_transformer(model, **options)


def llama(model):
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = model.config.model_dump()
    rope = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    twin = LlamaForCausalLM(LlamaConfig(**raw, rope_parameters=rope))
    twin.load_state_dict(model.state_dict())
    return twin


def batch(seed=0):
    """Return three rows of 10 tokens: padded on the left, padded on the right, and full."""
    ids = torch.randint(1, 61, (3, 10), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[0, :4] = 0
    mask[1, 7:] = 0
    return ids, mask


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("use_cache", [False, True])
def test_logits_equal_llama_on_padded_batches(tied, use_cache):
    model = build(tie_word_embeddings=tied)
    twin, hub, (ids, mask) = llama(model), wrap(model), batch()
    for given in ({}, {"attention_mask": mask}, {"position_ids": torch.arange(5, 15).expand(3, 10)}):
        ours = hub(input_ids=ids, use_cache=use_cache, **given).logits
        theirs = twin(input_ids=ids, use_cache=False, **given).logits
        real = given.get("attention_mask", torch.ones_like(ids)).bool()
        assert (ours - theirs)[real].abs().max() <= 2e-5
        assert ours.isfinite().all()


def test_restarting_positions_are_documents():
    model = build()
    hub, (ids, _) = wrap(model), batch()
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1, 2]).expand(3, 10)
    ours = hub(input_ids=ids, position_ids=positions).logits
    theirs = llama(model)(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert (ours - theirs).abs().max() <= 2e-5
    documents = Forest.pack([part for row in ids for part in row.split([3, 4, 3])])
    assert (ours.flatten(0, 1) - model.logits(model.hidden(documents))).abs().max() <= 2e-5


def test_loss_and_gradients_equal_llama():
    model = build()
    twin, hub, (ids, mask) = llama(model), wrap(model), batch()
    # A row's first real token would be predicted by padding, whose hidden state means nothing.
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100)
    ours = hub(input_ids=ids, attention_mask=mask, labels=labels).loss
    theirs = twin(input_ids=ids, attention_mask=mask, labels=labels).loss
    assert abs(ours.item() - theirs.item()) <= 2e-5
    ours.backward()
    theirs.backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for name, parameter in hub.named_parameters():
        assert (parameter.grad - expected[name]).abs().max() <= 2e-5, name


def test_gradient_checkpointing_changes_no_number():
    model = build()
    hub, (ids, mask) = wrap(model), batch()
    hub.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            hub.gradient_checkpointing_enable()
            assert all(layer.gradient_checkpointing for layer in hub.model.layers)
        hub.zero_grad()
        hub(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in hub.parameters()])
    for once, twice in zip(*gradients, strict=True):
        torch.testing.assert_close(once, twice, rtol=1e-6, atol=1e-8)


def test_generate_equals_llama():
    model = build()
    twin, hub, (ids, _) = llama(model), wrap(model), batch()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    greedy = [m.generate(ids, do_sample=False, **options) for m in (hub, twin)]
    assert torch.equal(*greedy)
    beams = [m.generate(ids, do_sample=False, num_beams=3, **options) for m in (hub, twin)]
    assert torch.equal(*beams)


def test_wrapping_copies_nothing():
    for model in (build(), build(tie_word_embeddings=True), build("scalar")):
        hub = wrap(model)
        back = hub.to_transformer()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            assert hub.get_parameter(name) is parameter
            assert back.get_parameter(name) is parameter
        assert torch.equal(*(m.hidden(Forest.pack([[1, 2, 3]])) for m in (model, back)))
    with pytest.raises(ValueError, match="needs a model with a 'lm' head"):
        from puna.models.formats.hub import PunaForCausalLM

        PunaForCausalLM.from_transformer(build("scalar"))


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_saved_folders_are_llama_folders(tmp_path, head):
    from puna.models.formats.hub import PunaForCausalLM, PunaForSequenceClassification

    model = build(head)
    wrap(model, pad_token_id=0).save_pretrained(tmp_path / "hub")
    raw = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert raw["model_type"] == "llama"
    assert raw["architectures"] == ["LlamaForCausalLM" if head == "lm" else "LlamaForSequenceClassification"]
    again = load(tmp_path / "hub")
    assert again.config == model.config
    assert again.head == head
    save(model, tmp_path / "own")
    kind = PunaForCausalLM if head == "lm" else PunaForSequenceClassification
    loaded = kind.from_pretrained(tmp_path / "own")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_scores_are_read_at_the_last_real_token():
    model = build("scalar")
    hub, (ids, mask) = wrap(model, pad_token_id=0), batch()
    expected = [
        model.scalar(model.hidden(Forest.pack([row[kept.bool()]])))[-1]
        for row, kept in zip(ids, mask, strict=True)
    ]
    scores = hub(input_ids=ids, attention_mask=mask).logits[:, 0]
    assert (scores - torch.stack(expected)).abs().max() <= 2e-5
    padded = ids.clone()
    padded[1, 7:] = 0
    assert (hub(input_ids=padded[1:2]).logits[0, 0] - expected[1]).abs() <= 2e-5
    with pytest.raises(ValueError, match="the last real token is unknown"):
        wrap(model)(input_ids=ids)


def test_a_caller_who_wants_tuples_gets_them():
    hub, (ids, mask) = wrap(build()), batch()
    whole = hub(input_ids=ids, attention_mask=mask, labels=ids)
    loss, logits = hub(input_ids=ids, attention_mask=mask, labels=ids, return_dict=False)
    assert torch.equal(loss, whole.loss) and torch.equal(logits, whole.logits)
    hub.config.return_dict = False
    assert torch.equal(hub(input_ids=ids, attention_mask=mask)[0], whole.logits)
    assert torch.equal(hub.model(ids, mask)[0], hub.model(ids, mask, return_dict=True).last_hidden_state)


def test_what_is_not_computed_is_refused():
    from puna.models.formats.hub import PunaConfig, PunaForCausalLM

    hub, (ids, mask) = wrap(build()), batch()
    for name in ("output_hidden_states", "output_router_logits"):
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            hub(input_ids=ids, **{name: True})
    with pytest.raises(ValueError, match="TRL: router_aux_loss_coef=0"):
        hub(input_ids=ids, output_router_logits=True)
    with pytest.raises(ValueError, match=r"attention_mask must be \[batch, tokens\]"):
        hub(input_ids=ids, attention_mask=mask[:, None, None])
    with pytest.raises(ValueError, match="mlp_bias = True is not supported"):
        PunaForCausalLM(PunaConfig.from_shape(CONFIG, mlp_bias=True))


def test_lora_trains_and_merges():
    from peft import LoraConfig, get_peft_model

    model = build()
    (ids, mask), forest = batch(), Forest.pack([[1, 2, 3, 4]])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned = get_peft_model(wrap(model), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(5):
        loss = tuned(input_ids=ids, attention_mask=mask, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    expected = tuned(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0]
    merged = tuned.merge_and_unload().to_transformer()
    assert (merged.logits(merged.hidden(forest)) - expected).abs().max() <= 2e-5
    changed = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(2)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["hello world, how are you? 1 2 3"], 300)


@pytest.mark.parametrize("trainer", ["sft", "sft_bf16", "sft_packed", "dpo", "reward"])
def test_trl_gives_the_loss_of_llama(tmp_path, tokenizer, trainer):
    """Two steps in TRL, with Puna's model and with transformers' on the same weights: the same losses."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

    head = "scalar" if trainer == "reward" else "lm"
    folder = tmp_path / "model"
    save(build(head, vocab_size=tokenizer.vocab_size, max_position_embeddings=64), folder, tokenizer)
    processing = AutoTokenizer.from_pretrained(folder)
    turn = [{"role": "user", "content": "hello"}]
    answers = [
        [{"role": "assistant", "content": text}] for text in ("world", "you? 1 2 3", "how are you", "3")
    ]
    pairs = [
        {"prompt": turn, "chosen": a, "rejected": b}
        for a, b in zip(answers, answers[1:] + answers[:1], strict=True)
    ]
    rows = [{"prompt": turn, "completion": a} for a in answers] if trainer.startswith("sft") else pairs
    options = {"output_dir": str(tmp_path), "max_steps": 2, "per_device_train_batch_size": 2, "report_to": []}
    options |= {
        "use_cpu": True,
        "bf16": trainer == "sft_bf16",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    options |= {"learning_rate": 1e-3 if trainer == "sft_bf16" else 1e-2, "seed": 1}
    config, run = {
        "sft": (trl.SFTConfig(**options), trl.SFTTrainer),
        "sft_bf16": (trl.SFTConfig(**options), trl.SFTTrainer),
        "sft_packed": (trl.SFTConfig(**options, packing=True, max_length=48), trl.SFTTrainer),
        "dpo": (trl.DPOConfig(**options), trl.DPOTrainer),
        "reward": (trl.RewardConfig(**options), trl.RewardTrainer),
    }[trainer]

    def losses(make):
        reference = {"ref_model": make()} if trainer == "dpo" else {}
        dataset = Dataset.from_list(rows)
        engine = run(
            model=make(), args=config, train_dataset=dataset, processing_class=processing, **reference
        )
        engine.train()
        return [row["loss"] for row in engine.state.log_history if "loss" in row]

    kind = LlamaForSequenceClassification if head == "scalar" else LlamaForCausalLM
    ours = losses(lambda: wrap(load(folder), pad_token_id=tokenizer.pad))
    theirs = losses(lambda: kind.from_pretrained(folder))
    assert len(ours) == 2
    # A bf16 number has a relative error of up to 2^-9.
    assert ours == pytest.approx(theirs, abs=2e-4, rel=2e-3 if trainer == "sft_bf16" else None)
