"""The decoder as transformers models, for TRL, PEFT, lm-eval and `generate`.

Modules, weights and files are those of `Transformer`: checkpoints of all families in `families.py` load, and a folder saved here has its
family's layout. `from_transformer` shares a model's weights without a copy. Without a cache, a padded batch is computed as one forest of
its real tokens, so that padding costs nothing. With a cache (`generate`), the batch stays padded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, SequenceClassifierOutputWithPast
from transformers.utils.generic import can_return_tuple

from puna.kernels.attention import ForestMask
from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import INDEX, WEIGHTS, check_files
from puna.models.formats.families import EXPERTS, architecture, hub_config, parse_config
from puna.models.layers import Attend, Block, Linear
from puna.models.transformer import Decoder, Head, Transformer, decode, forest_attend, softcap


class PunaConfig(PreTrainedConfig):
    """The configuration of models that fit no family (`model_type` puna). Both methods return the family's class for other models."""

    model_type = "puna"

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the configuration in a folder, as an instance of its family's class."""
        return AutoConfig.from_pretrained(*args, **kwargs)

    @staticmethod
    def from_shape(shape: ModelConfig, **options: Any) -> PreTrainedConfig:
        """Return the transformers configuration of a shape. `options`: further fields of the family's class."""
        raw = hub_config(shape)
        return AutoConfig.for_model(raw.pop("model_type"), **raw | options)


AutoConfig.register("puna", PunaConfig, exist_ok=True)
for _kind in EXPERTS:  # transformers converts the weights of other packages' classes only if registered
    register_checkpoint_conversion_mapping(_kind, get_checkpoint_conversion_mapping(_kind), overwrite=True)


def shape_of(config: PreTrainedConfig) -> ModelConfig:
    """Return Puna's form of a transformers configuration; raise ValueError if the configuration is unsupported."""
    return parse_config(config.to_dict())


class PunaBlock(GradientCheckpointingLayer, Block):
    """A decoder layer with transformers' gradient checkpointing."""

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor | None]:
        return Block.forward(self, x_TD, cos, sin, attend)


class PunaPreTrainedModel(PreTrainedModel):
    """The base class of the models below: loading, saving and conversion."""

    config_class = PunaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["PunaBlock"]
    _supports_sdpa = True
    head: Head | None = None

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write the folder through transformers, with the family's architecture name in config.json, which other programs need."""
        super().save_pretrained(save_directory, *args, **kwargs)
        path = Path(save_directory) / "config.json"
        if self.head is not None and path.is_file():
            raw = json.loads(path.read_text(encoding="utf-8"))
            raw["architectures"] = [architecture(raw["model_type"], self.head)]
            path.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a model loaded by transformers. Raise CheckpointError if a folder's index or sizes do not match its safetensors files."""
        folder = Path(name) if isinstance(name, str | Path) else None
        if folder is not None and any((folder / file).is_file() for file in (INDEX, WEIGHTS)):
            check_files(folder)
        return super().from_pretrained(name, *args, **kwargs)

    @classmethod
    def from_transformer(cls, model: Transformer, **options: Any) -> Self:
        """Return a model that shares the weights of `model`. Raise ValueError if the heads differ. `options`: configuration fields."""
        if model.head != cls.head:
            raise ValueError(f"{cls.__name__} needs a model with a {cls.head!r} head, not {model.head!r}")
        if cls.head == "scalar":
            options = {"num_labels": 1, **options}
        with torch.device("meta"):
            twin = cls(PunaConfig.from_shape(model.config, **options))
        twin.load_state_dict(model.state_dict(), assign=True)
        _share(model, twin)
        return twin

    def to_transformer(self) -> Transformer:
        """Return the plain model over the same weights. Merge adapters first (`merge_and_unload` in PEFT)."""
        assert self.head is not None
        with torch.device("meta"):
            model = Transformer(shape_of(self.config), self.head)
        model.load_state_dict(self.state_dict(), assign=True)
        _share(self, model)
        return model


def _share(source: nn.Module, target: nn.Module) -> None:
    for name, parameter in source.named_parameters(remove_duplicate=False):
        module, _, leaf = name.rpartition(".")
        setattr(target.get_submodule(module), leaf, parameter)


class PunaModel(PunaPreTrainedModel):
    """The backbone: token ids [B, T] or embeddings [B, T, D] to hidden states [B, T, D]."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.shape = shape = shape_of(config)
        decoder = Decoder(shape)
        self.embed_tokens = decoder.embed_tokens
        self.layers = nn.ModuleList(PunaBlock(shape, i) for i in range(shape.num_hidden_layers))
        self.norm = decoder.norm
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Any = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None, **kwargs: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """Return hidden states. `attention_mask` [B, T] marks real tokens. Without a mask and a cache, a new document begins wherever
        `position_ids` do not increase by 1. Requests for other outputs raise ValueError; other `kwargs` are ignored."""
        for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
            if kwargs.get(name, getattr(self.config, name, False)):
                # TRL asks for router logits if the balance of experts has a weight.
                where = "configuration (TRL: router_aux_loss_coef=0)" if name == "output_router_logits" else "configuration"
                raise ValueError(f"{name} is not supported: layers keep none of them; leave it out of the call and of the {where}")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must be [batch, tokens], not {list(attention_mask.shape)}")
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is None and use_cache and not self.gradient_checkpointing:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is None:
            hidden = self._forest(x_BTD, attention_mask, position_ids)
        else:
            hidden = self._forward_with_cache(x_BTD, attention_mask, position_ids, past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)

    def _forest(self, x_BTD: Tensor, keep: Tensor | None, positions: Tensor | None) -> Tensor:
        """Return hidden states [B, T, D], computed over all rows' real tokens as one forest; zeros for padding."""
        B, T, D = x_BTD.shape
        indices = torch.arange(T, device=x_BTD.device).expand(B, T)
        positions = indices if positions is None else positions.expand(B, T)
        if keep is None:
            real = torch.ones(B, T, dtype=torch.bool, device=x_BTD.device)
            first = (indices == 0) | F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
        else:
            real = keep.bool()
            first = real & (real.cumsum(1) == 1)
        starts = first[real].nonzero()[:, 0]
        total = int(real.sum())
        lengths = torch.diff(starts, append=starts.new_tensor([total]))
        mask = ForestMask.from_end((starts + lengths).to(torch.int32).repeat_interleave(lengths))
        h_ND, _ = decode(self.layers, self.norm, self.shape, x_BTD[real], positions[real], forest_attend(self.shape, mask))
        if total == B * T:
            return h_ND.view(B, T, D)
        return torch.zeros_like(x_BTD).masked_scatter(real[..., None], h_ND)

    def _forward_with_cache(self, x_BTD: Tensor, keep: Tensor | None, positions: Tensor | None, cache: Any) -> Tensor:
        """Return hidden states [B, T, D] of a padded batch that follows the tokens in the cache; add its keys and values to the cache."""
        B, T, D = x_BTD.shape
        past = cache.get_seq_length()
        indices = torch.arange(past, past + T, device=x_BTD.device)
        positions = indices.expand(B, T) if positions is None else positions.expand(B, T)

        def attend(layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            q, k, v = (x.view(B, T, *x.shape[1:]).transpose(1, 2) for x in (q_NHK, k_NGK, v_NGK))
            k, v = cache.update(k, v, layer)
            # The cache of a sliding layer has dropped its oldest keys.
            index = torch.arange(k.shape[2], device=q.device) + max(0, past + T - k.shape[2])
            visible = index <= indices[:, None]
            if (window := self.shape.windows[layer]) is not None:
                visible = visible & (indices[:, None] - index < window)
            visible = visible.expand(B, T, -1)
            if keep is not None:
                padded = F.pad(keep.bool(), (0, max(0, int(index[-1]) + 1 - keep.shape[1])), value=True)
                # A padding query sees itself, so that its softmax is defined.
                visible = visible & padded[:, None, index] | (index == indices[:, None])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)

        flat, _ = decode(self.layers, self.norm, self.shape, x_BTD.flatten(0, 1), positions.flatten(), attend)
        return flat.view(B, T, D)


class PunaForCausalLM(PunaPreTrainedModel, GenerationMixin):
    """The language model: the backbone and the output layer, with transformers' `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    head: Head | None = "lm"

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model = PunaModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Any = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0, **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Return logits [B, T, V] of the last `logits_to_keep` tokens (0: all; tensor: indices); with `labels` (-100: ignored), a loss."""
        outputs = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, return_dict=True, **kwargs)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = softcap(self.lm_head(outputs.last_hidden_state[:, positions]), self.model.shape.final_logit_softcapping)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)


class PunaForSequenceClassification(PunaPreTrainedModel):
    """The reward model: the scores of each sequence, read at its last real token. A model with mean pooling raises ValueError."""

    head: Head | None = "scalar"

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        if shape_of(config).reward_pooling != "last":
            raise ValueError("its reward is a mean over an answer, whose start transformers does not know; train with pooling=last")
        self.num_labels = config.num_labels
        self.model = PunaModel(config)
        self.score = Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None, **_: Any,
    ) -> SequenceClassifierOutputWithPast:  # fmt: skip
        """Return scores [B, labels] of each row's last token in the mask (no mask: last non-padding one); with `labels`, also the loss.
        Raise ValueError for several rows with neither a mask nor a padding token."""
        hidden = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, return_dict=True).last_hidden_state
        B, T = hidden.shape[:2]
        real = torch.ones(B, T, dtype=torch.bool, device=hidden.device)
        if attention_mask is not None:
            real = attention_mask.bool()
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids != self.config.pad_token_id
        elif B > 1:
            raise ValueError("give an attention_mask or set config.pad_token_id: the last real token is unknown")
        last = (torch.arange(T, device=hidden.device) * real).argmax(1)
        logits = self.score(hidden[torch.arange(B, device=hidden.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits)
