"""Low-rank adapters through PEFT, put into the model and merged out of it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from puna.stages.contract import StageConfig

if TYPE_CHECKING:
    from peft import LoraConfig

    from puna.models.transformer import Transformer

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Lora(StageConfig):
    """Low-rank adapters: a matrix W becomes W + alpha / rank * B A."""

    rank: int = Field(16, ge=1, description="Rank of the adapters")
    alpha: float = Field(32.0, gt=0, description="Scale of the adapters' product, over the rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the adapters, fraction")
    targets: tuple[Projection, ...] = Field(PROJECTIONS, min_length=1, description="Projections that get an adapter")

    def peft(self) -> LoraConfig:
        """PEFT's settings."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=sorted(self.targets), bias="none"
        )


def inject(model: Transformer, config: Lora, seed: int) -> int:
    """Put adapters beside the model's projections and freeze everything else; returns what is trained.

    The product starts at zero, so the model's outputs are unchanged.
    """
    import torch
    from peft import inject_adapter_in_model

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config.peft(), model)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def merge(model: Transformer) -> None:
    """Add each adapter's product to its matrix and take the adapters out; in place."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], module.get_base_layer())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
