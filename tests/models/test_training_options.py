"""Options of a training run: Muon, moving averages, spikes, activation checkpointing, ramps, experts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from puna.models import accounting
from puna.models.config import ModelConfig, Moe
from puna.models.training import objectives as o
from puna.models.training.loop import TrainConfig, Trainer, TrainingDiverged, train, weights_digest
from puna.models.training.optimizers import OPTIMIZERS, Group, Optimizer, Updated
from puna.models.training.optimizers.adamw import AdamW
from puna.models.training.optimizers.galore import GaLore, directions
from puna.models.training.optimizers.muon import Muon, orthogonalize
from puna.models.training.packing import pack
from puna.models.training.schedules import Ramp
from puna.models.training.settings import OptimizerSettings
from puna.models.training.trainer import NO_LIMITS, inner_matrices, spike_limits
from puna.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=19, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
EXPERTS = CONFIG.replace(moe=Moe(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, router_aux_loss_coef=0.1), model_type="mixtral")


def model(config: ModelConfig = CONFIG, seed: int = 0) -> Transformer:
    return Transformer(config, "lm", seed=seed)


def batches(step: int, count: int = 2) -> list[o.Targets]:
    rng = np.random.default_rng([7, step])
    return [o.Targets.from_documents(rng.integers(0, 19, (3, 11)).tolist()) for _ in range(count)]


# ---- Muon ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (3, 5, 8), (4, 64, 16)])
def test_orthogonalize_keeps_the_singular_vectors(shape: tuple[int, ...]):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    expected = s / x.norm(dim=(-2, -1))[..., None]
    for _ in range(5):  # the polynomial acts on each singular value separately
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(orthogonalize(x), u @ (expected[..., None] * v), rtol=1e-9, atol=1e-9)
    assert expected.min() > 0.3 and expected.max() < 1.3


def test_muon_by_hand():
    w0 = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    g1, g2 = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    w = torch.nn.Parameter(w0.clone())
    muon = Muon([Group([w], weight_decay=0.2)], OptimizerSettings(), momentum=0.9)
    for g in (g1, g2):
        w.grad = g.clone()
        muon.step(0.1)
    size = 0.1 * 0.2 * math.sqrt(6)
    first = w0 * (1 - 0.02) - size * orthogonalize(1.9 * g1)
    second = first * (1 - 0.02) - size * orthogonalize(g2 + 0.9 * (0.9 * g1 + g2))
    torch.testing.assert_close(w.detach(), second)


# ---- GaLore -------------------------------------------------------------------------------------------


ADAM = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6}
SAME = OptimizerSettings(beta1=0.8, beta2=0.9, epsilon=1e-6)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (2, 5, 7)])
def test_galore_is_adamw_in_the_space_of_its_directions(shape: tuple[int, ...]):
    w0, g1, g2, g3 = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tall, decay = shape[-2] > shape[-1], 1 - 0.02 * 0.3
    w = torch.nn.Parameter(w0.clone())
    galore = GaLore([Group([w], weight_decay=0.3)], SAME, rank=3, every=2, scale=0.5)
    expected, small = w0.clone(), None
    for number, g in enumerate((g1, g2, g3)):
        w.grad = g.clone()
        galore.step(0.02, torch.tensor(0.7, dtype=torch.float64))
        wide = g.mT if tall else g
        if number % 2 == 0:
            p = directions(wide, 3)
        if small is None:
            small = torch.nn.Parameter(torch.zeros_like(p.mT @ wide))
            adam = torch.optim.AdamW([small], **ADAM, weight_decay=0.0)
        before, small.grad = small.detach().clone(), p.mT @ wide * 0.7
        adam.step()
        moved = 0.5 * p @ (small.detach() - before)
        expected = expected * decay + (moved.mT if tall else moved)
        torch.testing.assert_close(w.detach(), expected)


def test_galores_directions_are_the_strongest():
    u, _ = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    v, _ = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    found = directions(u @ torch.diag(torch.tensor([1.0, 9.0, 3.0, 5.0, 2.0, 7.0])) @ v[:6], 3)
    torch.testing.assert_close((u.T @ found).abs(), torch.eye(6)[:, [1, 5, 3]], atol=1e-5, rtol=0)


def galore(rank: int, **more) -> TrainConfig:
    return TrainConfig(steps=12, schedule={"learning_rate": 0.01}, optimizer={"name": "galore", "parameters": {"rank": rank, **more}})


def test_galore_holds_what_it_says_and_a_full_rank_is_adamw():
    for rank, config in ((6, CONFIG), (6, EXPERTS), (16, CONFIG)):
        made = model(config)
        trainer = Trainer(made, o.LanguageModeling(), galore(rank, scale=0.5))
        trainer.step(1, batches(1), 0)
        inner = inner_matrices(made)
        for name, weight in made.named_parameters():
            stacked, (m, n) = weight.numel() // max(1, math.prod(weight.shape[-2:])), sorted(weight.shape[-2:]) if weight.ndim > 1 else (1, 1)
            moments = sum(v.numel() for k, v in trainer.tensors().items() if k.startswith("state.") and k.split(".", 2)[2] == name and v.ndim)
            projected = name in inner and m > rank
            assert moments == (stacked * (m * rank + 2 * rank * n) if projected else 2 * weight.numel()), name
    full, plain = model(), model()
    for made, config in ((full, galore(16)), (plain, TrainConfig(steps=12, schedule={"learning_rate": 0.01}))):
        train(made, o.LanguageModeling(), batches, config, seed=3)
    assert weights_digest(full) == weights_digest(plain)


# ---- any optimizer ------------------------------------------------------------------------------------


class Lion(Optimizer):
    """The sign of a moving average (Chen et al. 2023), defined completely in this file, as an optimizer of another package would be."""

    name, description, state_bytes, learning_rate = "lion", "Lion for all weights", 4, 1e-4

    def start(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"average": torch.zeros_like(weight)}

    def update(self, weights: list[Updated], rate: float, weight_decay: float, factor: torch.Tensor | None) -> None:
        for weight, gradient, state in weights:
            gradient = gradient if factor is None else gradient * factor
            direction = state["average"].lerp(gradient, 1 - self.settings.beta1).sign()
            weight.mul_(1 - rate * weight_decay).sub_(direction, alpha=rate)
            state["average"].lerp_(gradient, 1 - self.settings.beta2)


OWN = {"adamw": {}, "galore": {"rank": 6, "every": 5, "scale": 1}, "lion": {}, "muon": {}}


class Killed(Exception):
    pass


def resumed(folder: Path, config: TrainConfig, shape: ModelConfig = CONFIG) -> tuple[list[dict], Transformer, Transformer]:
    """Return the log and model of a training run, and the model of the same run stopped after step 7 and resumed."""

    def kill(row: dict) -> None:
        if row["step"] == 7:
            raise Killed

    def same(step: int) -> list[o.Targets]:
        return batches(1)

    whole, again = model(shape), model(shape)
    log = train(whole, o.LanguageModeling(), same, config, seed=3)
    with pytest.raises(Killed):
        train(model(shape), o.LanguageModeling(), same, config, 3, folder, 3, on_step=kill)
    train(again, o.LanguageModeling(), same, config, 3, folder, 3)
    return log, whole, again


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_learns_keeps_what_it_declares_and_resumes_to_the_same_bits(tmp_path: Path, name: str):
    for shape in (CONFIG, EXPERTS):
        config = TrainConfig(
            steps=12, schedule={"learning_rate": 0.01 if name == "lion" else 0.03, "ema": 0.8}, compute={"activation_checkpointing": True},
            optimizer={"name": name, "parameters": OWN[name], "spike_window": 8},
        )  # fmt: skip
        log, whole, again = resumed(tmp_path / str(shape.moe is None), config, shape)
        assert log[-1]["loss"] < 0.75 * log[0]["loss"]
        assert weights_digest(again) == weights_digest(whole) != weights_digest(model(shape)) and not whole.model.checkpointing
        trainer = Trainer(model(shape), o.LanguageModeling(), config)
        updated = [weight for optimizer in trainer.optimizers if optimizer.name == name for weight in optimizer.state]
        state = sum(tensor.nbytes for weight in updated for tensor in trainer.optimizers[0].state[weight].values() if tensor.ndim)
        assert name == "galore" or state == OPTIMIZERS[name].state_bytes * sum(weight.numel() for weight in updated)
        assert OPTIMIZERS[name].whole_matrices == (len(updated) < len(trainer.weights))


def test_an_optimizer_of_ones_own_is_one_class():
    config = TrainConfig(steps=1, schedule={"warmup_steps": 0, "shape": "constant"}, optimizer={"name": "lion", "weight_decay": 0})
    assert config.rate(1) == 1e-4 and TrainConfig(steps=1, schedule={"warmup_steps": 0, "shape": "constant"}).rate(1) == 1e-3
    assert config.optimizer.state_bytes == 4 and Lion in config.optimizer.implementations()
    made = model()
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    train(made, o.LanguageModeling(), batches, config, seed=0)
    for name, p in made.named_parameters():  # the first step moves each weight by the learning rate against the sign of its gradient
        assert set(((p - before[name]) / 1e-4).round().unique().tolist()) <= {-1, 0, 1}, name


def test_a_state_that_is_not_all_there_is_refused():
    trainers = [Trainer(model(), o.LanguageModeling(), TrainConfig(steps=9, optimizer={"name": name})) for name in ("adamw", "lion")]
    adam, lion = (trainer.tensors() for trainer in trainers)
    with pytest.raises(ValueError, match=r"state.average.lm_head.weight is None in it, and torch.Size\(\[19, 16\]\) in this model"):
        trainers[1].restore(adam)
    lion["state.average.model.norm.weight"] = lion["state.average.model.norm.weight"][:1]
    with pytest.raises(ValueError, match=r"state.average.model.norm.weight is torch.Size\(\[1\]\) in it"):
        trainers[1].restore(lion)

    class Hoarder(Lion):
        """An optimizer with a tensor that no checkpoint contains."""

        name = "hoarder"

        def update(self, weights: list[Updated], rate: float, weight_decay: float, factor: torch.Tensor | None) -> None:
            weights[0][2]["more"] = weights[0][1]  # type: ignore[index]

    try:
        with pytest.raises(TypeError, match="does not support item assignment"):
            train(model(), o.LanguageModeling(), batches, TrainConfig(steps=1, optimizer={"name": "hoarder"}), 0)
    finally:
        del OPTIMIZERS["hoarder"]
    for wrong, message in (
        ({"name": "galor"}, "no optimizer galor; did you mean galore"), ({"parameters": {"rank": 2}}, "adamw: rank: no such field"),
        ({"name": "muon", "parameters": {"momentum": 1}}, "optimizer muon: momentum: .*less than 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            OptimizerSettings(**wrong)


# ---- AdamW, and which weights Muon has --------------------------------------------------------------------


def test_adamw_equals_torch_where_gradients_are_missing_at_times():
    start = [torch.randn(5, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    groups = [([0, 1], 0.1), ([2], 0.0)]
    mine = AdamW([Group([ours[i] for i in which], weight_decay=decay) for which, decay in groups], SAME)
    peer = torch.optim.AdamW([{"params": [theirs[i] for i in which], "weight_decay": decay} for which, decay in groups], **ADAM)
    factor = torch.tensor(0.4)
    for step, present in enumerate(([0, 1, 2], [1], [], [0, 2], [0, 1])):
        for i in range(3):
            g = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + i))
            ours[i].grad, theirs[i].grad = (g, g * factor) if i in present else (None, None)
        mine.step(0.02, factor)
        peer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-6, atol=1e-7)
        assert mine.state[a]["step"] == peer.state[b]["step"]


def test_muon_trains_the_matrices_inside_the_layers_and_adamw_the_rest():
    for config in (CONFIG, EXPERTS):
        made = model(config)
        names = inner_matrices(made)
        ends = {name.split(".", 3)[-1] for name in names}
        attention = {f"self_attn.{x}_proj.weight" for x in "qkvo"}
        experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
        dense = {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
        assert ends == attention | (dense if config is CONFIG else experts)
        trainer = Trainer(made, o.LanguageModeling(), TrainConfig(steps=9, schedule={"learning_rate": 0.01}, optimizer={"name": "muon"}))
        trained = [w for opt in trainer.optimizers for w in opt.state]
        assert sorted(map(id, trained)) == sorted(map(id, made.parameters()))
        assert {id(p) for n, p in made.named_parameters() if n in names} == set(map(id, trainer.optimizers[0].state))


@pytest.mark.parametrize(("optimizer", "tied"), [("adamw", False), ("muon", False), ("muon", True)])
def test_only_embeddings_move_at_a_rate_of_their_own(optimizer: str, tied: bool):
    """AdamW's first step is the learning rate times the gradient's sign, so three times the rate moves three times as far."""
    moved = []
    for scale in (1.0, 3.0):
        made = model(CONFIG.replace(tie_word_embeddings=tied))
        before = {name: p.detach().clone() for name, p in made.named_parameters()}
        config = TrainConfig(steps=1, schedule={"learning_rate": 0.01, "shape": "constant"}, optimizer={"name": optimizer, "embedding_scale": scale})
        train(made, o.LanguageModeling(), batches, config, seed=0)
        moved.append({name: p.detach() - before[name] for name, p in made.named_parameters()})
    for name, once in moved[0].items():
        times = 3.0 if name == "model.embed_tokens.weight" else 1.0
        torch.testing.assert_close(moved[1][name], times * once, rtol=1e-4, atol=1e-6)
    assert moved[0]["model.embed_tokens.weight"].abs().max() == pytest.approx(0.01, rel=1e-3) and ("lm_head.weight" in moved[0]) == (not tied)


# ---- averages, spikes ---------------------------------------------------------------------------------


def test_a_run_ends_with_the_moving_average():
    seen: list[dict[str, torch.Tensor]] = []
    made = model()
    config = TrainConfig(steps=5, schedule={"learning_rate": 0.01, "ema": 0.75})
    train(
        made, o.LanguageModeling(), batches, config, 0,
        on_step=lambda _: seen.append({n: p.detach().clone() for n, p in made.named_parameters()}),
    )  # fmt: skip
    for name, parameter in made.named_parameters():
        expected = seen[0][name]
        for weights in seen[1:]:
            expected = 0.75 * expected + 0.25 * weights[name]
        torch.testing.assert_close(parameter.detach(), expected)


def test_spike_limits_by_hand():
    log = [{"loss": float(x), "gradient_norm": 1.0, "skipped": 0} for x in (9, 1, 2, 3, 4, 5, 6, 7, 8)]
    log.insert(3, {"loss": 1e9, "gradient_norm": 1e9, "skipped": 1})
    loss, norm = spike_limits(log, 8, 3.0)
    assert loss == pytest.approx(4.5 + 3 * 1.4826 * 2)  # deviations .5 .5 1.5 1.5 2.5 2.5 3.5 3.5
    assert norm == pytest.approx(1.03)  # a deviation of at least 1 %
    assert spike_limits(log, 10, 3.0) == NO_LIMITS
    assert spike_limits(log, 0, 3.0) == NO_LIMITS


def test_a_spike_is_skipped_and_logged():
    def objective(made: Transformer, batch: o.Targets, totals: dict | None = None) -> tuple:
        loss, metrics = o.LanguageModeling()(made, batch)
        return loss * (100.0 if spiking else 1.0), metrics

    config = TrainConfig(steps=14, schedule={"learning_rate": 0.01}, optimizer={"spike_window": 8, "max_skipped": 2})
    made, weights, spiking = model(), [], False

    def on_step(row: dict) -> None:
        nonlocal spiking
        weights.append(weights_digest(made))
        spiking = row["step"] == 10

    log = train(made, objective, lambda step: batches(step)[0], config, 0, on_step=on_step)
    assert [row["step"] for row in log if row["skipped"]] == [11]
    assert weights[10] == weights[9]
    assert log[10]["loss"] > 50 * log[9]["loss"]

    def always(row: dict) -> None:
        nonlocal spiking
        spiking = row["step"] >= 10

    spiking = False
    with pytest.raises(TrainingDiverged, match="spiked, in 2 steps in a row, up to step 12"):
        train(model(), objective, lambda step: batches(step)[0], config, 0, on_step=always)


# ---- memory, experts, the log -------------------------------------------------------------------------


def test_a_layer_computed_again_keeps_no_graph_alive():
    made = model(EXPERTS)
    with Trainer(made, o.LanguageModeling(), TrainConfig(steps=1, schedule={"learning_rate": 0.01}, compute={"activation_checkpointing": True})) as trainer:
        assert trainer.step(1, batches(1)[0], seed=0)["balance_loss"] > 0
    assert made.model.balance is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_step_asks_torch_for_it_and_leaves_it_as_it_was(deterministic: bool):
    seen: list[bool] = []

    class Watched(o.LanguageModeling):
        def __call__(self, *args, **options):
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().__call__(*args, **options)

    settings_ = TrainConfig(steps=1, schedule={"learning_rate": 0.01}, compute={"deterministic": deterministic})
    with Trainer(model(), Watched(), settings_) as trainer:
        trainer.step(1, batches(1), seed=0)
    assert seen == [deterministic] * 2 and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("config", [CONFIG, EXPERTS])
def test_activation_checkpointing_changes_no_number(config: ModelConfig):
    results = []
    for checkpointing in (False, True):
        made = model(config)
        settings_ = TrainConfig(steps=3, schedule={"learning_rate": 0.01}, compute={"activation_checkpointing": checkpointing})
        log = train(made, o.LanguageModeling(), batches, settings_, 0)
        results.append(([row["loss"] for row in log], weights_digest(made)))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "changes", [{}, {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}}, {"sliding_window": 8}]
)
def test_a_pass_on_a_device_waits_for_nothing_from_it(changes: dict, monkeypatch: pytest.MonkeyPatch):
    """On torch's `meta` device in place of a GPU: reading a number back fails. Host-side facts about the mask are computed before the
    move."""
    monkeypatch.setattr("puna.kernels.attention.uses_triton", lambda tensor: tensor.device.type == "meta")
    with torch.device("meta"):
        made = Transformer(CONFIG.replace(model_type="", **changes))
    batch = o.Targets.from_answers([[1, 2, 3, 4] * 5, [5]], [[[6, 7], [8]], [[9] * 20]]).to("meta")
    logprobs, _ = made.token_logprobs(batch.forest, batch.positions, batch.tokens)
    loss = made.cross_entropy(batch.forest, batch.positions, batch.tokens, torch.ones(len(batch.tokens), device="meta"))
    (loss + logprobs.sum()).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in made.parameters())


def test_balance_is_part_of_the_loss_by_share_of_tokens():
    rows = batches(1, 3)
    made = model(EXPERTS)
    total, gradient = 0.0, 0.0
    count = sum(int(row.mask.sum()) for row in rows)
    for row in rows:
        weights = torch.full((len(row.tokens),), 1.0 / count)
        loss = made.cross_entropy(row.forest, row.positions, row.tokens, weights)
        share = loss + made.take_balance_loss() * len(row) / sum(map(len, rows))
        (g,) = torch.autograd.grad(share, made.model.layers[0].mlp.gate.weight)
        total, gradient = total + share.item(), gradient + g
    other = model(EXPERTS)
    trainer = Trainer(other, o.LanguageModeling(), TrainConfig(steps=9, schedule={"learning_rate": 1e-9}, optimizer={"max_grad_norm": None}))
    seen = {}
    other.model.layers[0].mlp.gate.weight.register_hook(lambda g: seen.update(g=seen.get("g", 0) + g))
    log = trainer.step(1, rows, 0)
    assert log["loss"] == pytest.approx(total, rel=1e-6)
    assert 0.1 < log["balance_loss"] < 0.5
    torch.testing.assert_close(seen["g"], gradient)


def test_the_log_holds_speed_and_utilization():
    row = train(model(), o.LanguageModeling(), batches, TrainConfig(steps=1, schedule={"learning_rate": 0.01}), 0)[0]
    assert row["tokens_per_second"] == pytest.approx(66 / row["seconds"])
    flops = accounting.training_flops(CONFIG, [11] * 6)
    assert row["model_flops_utilization"] == pytest.approx(
        flops / row["seconds"] / accounting.peak_flops("cpu", "fp32")
    )


# ---- ramps and packing --------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_a_ramp_grows_at_its_steps(values: list[int], steps: int):
    ramp = Ramp(tuple(sorted(values)), tuple(1 + steps * i for i in range(len(values))))
    sizes = [ramp.at(step) for step in range(1, 25)]
    assert sizes == ([v for v in sorted(values) for _ in range(steps)] + [max(values)] * 24)[:24]
    assert [ramp.before(step) for step in range(1, 25)] == [sum(sizes[:k]) for k in range(24)]


@given(st.lists(st.integers(1, 50), max_size=40))
@settings(max_examples=60, deadline=None)
def test_pack_is_best_fit_decreasing(lengths: list[int]):
    """Compared with brute force: longest first, each into the fullest row that still has room."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = [(50 - sum(lengths[i] for i in row), number) for number, row in enumerate(rows)]
        fitting = [entry for entry in room if entry[0] >= lengths[index]]
        if fitting:
            rows[min(fitting)[1]].append(index)
        else:
            rows.append([index])
    assert pack(lengths, 50) == [sorted(row) for row in rows]


class Scattered(TorchDispatchMode):
    """A recorder of operators that add several values to one element, whose order on a GPU may vary."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        accumulates = name.startswith("index_put") and (args[3:4] == (True,) or (kwargs or {}).get("accumulate"))
        if name.rstrip("_") in ("index_add", "scatter_reduce", "index_reduce") or accumulates:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def test_experts_add_up_in_one_order_on_any_device():
    x = torch.randn(30, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    block = model(EXPERTS).model.layers[0].mlp
    with Scattered() as seen:
        block(x)[0].square().sum().backward()
    assert not seen.names
    with Scattered() as seen:  # the recorder does see such operators
        torch.zeros(3, 16).index_add(0, torch.tensor([1, 1]), x[torch.tensor([0, 0])].detach())
        x[torch.tensor([1, 1])].sum().backward()
    assert {name.lstrip("_") for name in seen.names} >= {"index_add"} and len(seen.names) >= 2
