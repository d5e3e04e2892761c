"""Byte-level BPE with Llama 3's special tokens and chat format.

Text never turns into a special token: a page or a user that writes ``<|eot_id|>`` gets the bytes of
those characters. Special tokens enter by id only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
START_HEADER = "<|start_header_id|>"
END_HEADER = "<|end_header_id|>"
EOT = "<|eot_id|>"
PAD = "<|finetune_right_pad_id|>"
SPECIAL_TOKENS = (BOS, EOS, START_HEADER, END_HEADER, EOT, PAD)
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)

# The alternatives of Llama 3's pattern, except that digits come one by one: contractions; a word with at
# most one mark or blank before it; one digit; marks with a blank before and line ends after; blanks up to
# the last line end; blanks, of which the last stays with the word that follows.
SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{%- endif %}"
)

Message = Mapping[str, str]


class Tokenizer:
    """Text to token ids and back; `bos`, `eos`, `start_header`, `end_header`, `eot`, `pad` are ids."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True
        ids = [backend.token_to_id(token) for token in SPECIAL_TOKENS]
        missing = [token for token, id_ in zip(SPECIAL_TOKENS, ids, strict=True) if id_ is None]
        if missing:
            raise ValueError(f"the tokenizer lacks the special tokens {', '.join(missing)}")
        self.bos, self.eos, self.start_header, self.end_header, self.eot, self.pad = ids
        self.special = frozenset(ids)
        self._header_break = self.encode("\n\n")

    @staticmethod
    def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn merges from texts until there are `vocab_size` tokens (6 special ones, 256 bytes).

        The result depends on how often each word occurs, not on the order of the texts or on the number
        of threads. A text too poor in words yields fewer tokens.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"vocab_size {vocab_size} is below {SMALLEST_VOCABULARY}, the bytes and special tokens"
            )
        backend = tokenizers.Tokenizer(BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer=trainer)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A",
            pair=f"{BOS} $A {BOS}:1 $B:1",
            special_tokens=[(BOS, backend.token_to_id(BOS))],
        )
        return Tokenizer(backend)

    @staticmethod
    def load(folder: Path | str) -> Tokenizer:
        """Read `tokenizer.json` from a folder."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: a tokenizer or model folder holds tokenizer.json"
            )
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))

    def save(self, folder: Path | str) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which transformers' AutoTokenizer loads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "chat_template": CHAT_TEMPLATE,
        }
        (folder / "tokenizer.json").write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        text = json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added before or after."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, on all threads."""
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def document(self, text: str) -> list[int]:
        """Ids of a document to pretrain on: begin, text, end."""
        return [self.bos, *self.encode(text), self.eos]

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> list[int]:
        """Ids of a dialogue in Llama 3's format: one message is a mapping with `role` and `content`.

        Blanks around a content are cut, as the chat template does.
        """
        ids = [self.bos]
        for message in messages:
            ids += self._header(message["role"])
            ids += self.encode(message["content"].strip())
            ids.append(self.eot)
        return ids + self._header("assistant") if add_generation_prompt else ids

    def render_pair(
        self, prompt: str | Sequence[Message], answer: str, finished: bool = True
    ) -> tuple[list[int], list[int], list[bool]]:
        """Prompt ids (up to the assistant's header), answer ids, and the answer's format mask.

        A string is one user message. The answer ends in ``<|eot_id|>`` unless it was cut off
        (`finished=False`). The mask holds one flag per *answer* token, True at format tokens (the
        assistant's header is part of the prompt, where nothing is predicted).
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answer_ids = self.encode(answer.strip())
        if finished:
            answer_ids.append(self.eot)
        return self.chat(messages, add_generation_prompt=True), answer_ids, self.format_mask(answer_ids)

    def format_mask(self, ids: Sequence[int]) -> list[bool]:
        """True at format tokens: special tokens, and a header's role and line break."""
        mask = [id_ in self.special for id_ in ids]
        for start, id_ in enumerate(ids):
            if id_ != self.start_header:
                continue
            stop = next((i for i in range(start, len(ids)) if ids[i] == self.end_header), None)
            if stop is None:
                continue
            after = stop + 1 + len(self._header_break)
            if list(ids[stop + 1 : after]) == self._header_break:
                stop = after - 1
            mask[start : stop + 1] = [True] * (stop + 1 - start)
        return mask

    def _header(self, role: str) -> list[int]:
        return [self.start_header, *self.encode(role), self.end_header, *self._header_break]
