"""The tokenizer that comes with a model: any Hugging Face fast tokenizer with its chat template, or one trained here.

Text never becomes a special token: ``<|eot_id|>`` in a document, prompt or answer is encoded as its characters. `render` refuses a training
conversation whose text holds a special token. Tokenizers trained here are byte-level BPE with Llama 3's special tokens and chat format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from puna.models.tokens.chat import ChatError, ChatFormat, Row
from puna.models.tokens.template import CHATML, LLAMA3, Message, Template, TemplateError
from puna.models.tokens.tokenizer_files import SAMPLING, TokenizerError, read_files
from puna.models.tokens.tokenizer_trial import WORDS

__all__ = ["CHATML", "ChatError", "Message", "Row", "Template", "TemplateError", "Tokenizer", "TokenizerError"]

BOS, EOS, EOT, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|finetune_right_pad_id|>"
START_HEADER, END_HEADER = "<|start_header_id|>", "<|end_header_id|>"
SPECIAL_TOKENS = (BOS, EOS, START_HEADER, END_HEADER, EOT, PAD)
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
CONTEXT = 8  # tokens before a stream that are decoded together with it
BROKEN = 32  # tokens without a complete final character after which `TextStream` stops waiting: the bytes are not text


class Tokenizer(ChatFormat):
    """A tokenizer: text to token ids and back, and conversations rendered by the model's chat template.

    `bos` and `eos` are the ids of the tokens that begin and end a document, None if the model has none. `pad`, the id that pads a batch and
    is always masked, falls back to `eos`, then 0. `generation`: fields of generation_config.json, by transformers' names."""

    def __init__(
        self, backend: tokenizers.Tokenizer, named: Mapping[str, str], template: str | Mapping[str, str] | None = None,
        stops: Sequence[int] = (), generation: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Make a tokenizer. `named`: special tokens by their names (`bos_token`, …). `stops`: ids of tokens that end an answer, besides
        `eos_token`'s. Raise TokenizerError if the vocabulary lacks a named special token, TemplateError for a wrong template."""
        super().__init__(backend)
        self.named, self.generation = dict(named), dict(generation or {})
        if missing := [token for token in self.named.values() if self.id_of(token) is None]:
            raise TokenizerError(f"the tokenizer lacks the special tokens {', '.join(missing)}")
        self.bos, self.eos, pad = (self.id_of(self.named.get(f"{name}_token")) for name in ("bos", "eos", "pad"))
        self.pad: int = next((id_ for id_ in (pad, self.eos) if id_ is not None), 0)
        self.template = None if template is None else Template(template, self.named)
        self._stops = tuple(dict.fromkeys(id_ for id_ in (self.eos, *stops) if id_ is not None))

    @staticmethod
    def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Return a tokenizer of `vocab_size` tokens (fewer if the texts have too few words): 6 special ones, 256 bytes and learned merges.
        The merges depend on word counts, not on the texts' order or the threads. Raise ValueError below `SMALLEST_VOCABULARY`."""
        if vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(f"vocab_size {vocab_size} is below {SMALLEST_VOCABULARY}, the bytes and special tokens")
        backend = tokenizers.Tokenizer(BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(WORDS), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )  # fmt: skip
        backend.train_from_iterator(texts, trainer=trainer)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
        return Tokenizer(backend, {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}, LLAMA3)

    @staticmethod
    def load(folder: Path | str) -> Tokenizer:
        """Return the tokenizer of a folder in Hugging Face's layout: `tokenizer.json` is the vocabulary; `tokenizer_config.json`,
        `special_tokens_map.json`, chat templates, `generation_config.json` and `config.json` complete it if they exist. Raise
        FileNotFoundError without `tokenizer.json`, TokenizerError for an invalid file."""
        return Tokenizer(*read_files(Path(folder)))

    def save(self, folder: Path | str) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` for transformers' AutoTokenizer, without `stops` and `generation`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast", **self.named, "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        }  # fmt: skip
        if self.template is not None:
            source = self.template.source
            config["chat_template"] = source if isinstance(source, str) else [{"name": name, "template": source[name]} for name in source]
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        text = json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def with_template(self, source: str | Mapping[str, str]) -> Tokenizer:
        """Return a tokenizer of the same vocabulary with another chat template. Raise TemplateError if the template does not compile."""
        return Tokenizer(self.backend, self.named, source, self._stops, self.generation)

    def with_backend(self, backend: tokenizers.Tokenizer) -> Tokenizer:
        """Return a tokenizer with the vocabulary `backend`, and this tokenizer's special and stop tokens, template and `generation`."""
        return Tokenizer(backend, self.named, None if self.template is None else self.template.source, self._stops, self.generation)

    def document(self, text: str) -> list[int]:
        """Return the ids of a document: `bos`, the text's ids, `eos`; a begin or end token that the model lacks is left out."""
        return [*([] if self.bos is None else [self.bos]), *self.encode(text), *self.end]

    @property
    def end(self) -> list[int]:
        """Return a list with `eos`, the token that ends a document; the list is empty if the model has none."""
        return [] if self.eos is None else [self.eos]

    @property
    def begin(self) -> int:
        """Return the first token of each packed document: `bos`, else `eos` (as Qwen does). Raise TokenizerError if there is neither."""
        if not self.lead:
            raise TokenizerError("the tokenizer names neither bos_token nor eos_token, which separate packed documents")
        return self.lead[0]

    @property
    def lead(self) -> list[int]:
        """Return a list with the token that precedes a text to be continued or scored: `bos`, else `eos`; empty if there is neither."""
        id_ = self.eos if self.bos is None else self.bos
        return [] if id_ is None else [id_]

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the model's defaults for `SamplingParams` (temperature, …); empty unless generation_config.json sets `do_sample`."""
        return {name: self.generation[name] for name in SAMPLING if name in self.generation} if self.generation.get("do_sample") else {}


class TextStream:
    """A decoder of a stream of tokens. It returns text once the text is final: whole characters that cannot belong to a stop string.
    `context`: the tokens whose text the stream continues. `rest`: the text that is not final yet."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._tokenizer, self._stop, tail = tokenizer, tuple(stop), [*context[-CONTEXT:]]
        # The context may end within a character.
        self._tokens = [] if tokenizer.decode(tail, skip_special_tokens=True).endswith("\ufffd") else tail
        self._read = len(self._tokens)  # leading tokens that serve as context: a token decoded alone may lose its leading space
        self.rest, self._held, self._given = "", "", 0  # decoded text not yet returned; number of returned characters of the current text

    def add(self, token: int, last: bool = False) -> str:
        """Return the text that is final once `token` is added. `last`: return all remaining text, up to a stop string."""
        self._tokens.append(token)
        before, now = (self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (self._tokens[: self._read], self._tokens))
        text = self._held + now[len(before) :]
        ends = [text.find(stop) for stop in self._stop if stop in text]
        if ends:
            end = min(ends)
        elif last:
            end = len(text)
        else:
            whole = len(text.rstrip("\ufffd"))
            end = whole - max((_stop_overlap(text[:whole], stop) for stop in self._stop), default=0)
        end = max(end, self._given)
        new_text, self._given, self.rest = text[self._given : end], end, text[end:]
        if not now.endswith("\ufffd") or len(self._tokens) - self._read >= BROKEN:
            self._tokens, self._held, self._given = self._tokens[self._read :], self.rest, 0
            self._read = len(self._tokens)
        return new_text


def _stop_overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)
