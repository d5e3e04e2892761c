"""The files of a tokenizer in Hugging Face's layout, read as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from puna.models.tokens.tokenizer_trial import Trial, unknown
from puna.models.tokens.vocabulary import with_tokens
from puna.models.untrusted.bounds import read_object

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have a name; a chat template may use them."""
TOKENS = 1 << 22  # upper bound on the number of tokens and on their ids
ADDED = 1 << 16  # maximum number of tokens that are added to a vocabulary
LONGEST = 1 << 12  # maximum characters of a token
REPEATS = 16  # maximum copies of the text in a post-processor
WORD = 256  # maximum characters of a token or word for Unigram and WordPiece, which search the vocabulary at every character


class TokenizerError(ValueError):
    """An error: a folder holds no tokenizer, or the tokenizer cannot be read or used."""


class TokenizerFiles(NamedTuple):
    """The content of a tokenizer's files. `named`: special tokens by name; `template`: one or several by name; `stops`: token ids."""

    backend: tokenizers.Tokenizer
    named: dict[str, str]
    template: str | dict[str, str] | None
    stops: list[int]
    generation: dict[str, Any]


def read_files(folder: Path) -> TokenizerFiles:
    """Return the content of a folder's tokenizer files. Raise FileNotFoundError without tokenizer.json, TokenizerError for a bad file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a tokenizer or model folder holds tokenizer.json")
    content, config = _json(path), _json(folder / "tokenizer_config.json")
    try:
        check_content(content, len(_added_tokens(config)))
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise TokenizerError(f"{path} is not a valid tokenizer: {error}") from error
    others = _json(folder / "special_tokens_map.json")
    special = {name: text for name in NAMED if (text := _text(config.get(name) or others.get(name)))}
    stops = _stop_ids(folder)
    tokens = [token for id_ in stops if (token := backend.id_to_token(id_)) is not None]
    with_tokens(backend, [*special.values(), *_token_texts(config), *_token_texts(others), *tokens], _added_tokens(config))
    return TokenizerFiles(backend, special, _template(folder, config), stops, _generation(folder))


def check_content(content: Mapping[str, Any], more: int) -> None:
    """Raise ValueError for too many or too long tokens, too large ids, or too costly steps. `more`: number of tokens from other files."""
    model, added_tokens = content.get("model") or {}, content.get("added_tokens") or []
    pieces = model.get("vocab") or {}
    ids = {piece[0]: id_ for id_, piece in enumerate(pieces)} if isinstance(pieces, list) else pieces
    ids = {**ids, **{token["content"]: token["id"] for token in added_tokens}}
    if len(added_tokens) + more > ADDED:
        raise ValueError(f"{len(added_tokens) + more:,} tokens are added to the vocabulary: at most {ADDED:,} are allowed")
    if (top := max(ids.values(), default=0)) >= TOKENS:
        raise ValueError(f"it has a token with the id {top:,}: ids must be below {TOKENS:,}")
    limit = WORD if model.get("type") in ("Unigram", "WordPiece") else LONGEST
    if (longest := max(*map(len, ids), model.get("max_input_chars_per_word") or 0, 0)) > limit:
        raise ValueError(f"it has a token or a word of {longest:,} characters: at most {limit:,} are read")
    if (why := unknown(content.get("decoder"))) is not None:
        raise ValueError(f"its decoder has {why}, which is not known to run in linear time")
    if json.dumps(content.get("post_processor")).count('"Sequence"') > REPEATS:
        raise ValueError(f"its post_processor repeats a text more than {REPEATS} times")
    if (trial := Trial.of(content)) is not None:
        trial.check()


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except ValueError as error:
        raise TokenizerError(str(error)) from error


def _text(token: Any) -> str | None:
    """Return the text of a token that is given as a string or as an object with `content`; None if it has no text."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _token_texts(config: Mapping[str, Any]) -> list[str]:
    tokens: list[Any] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(name) or []
        tokens += list(value.values()) if isinstance(value, dict) else value
    return [text for token in tokens if (text := _text(token))]


def _added_tokens(config: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """Return the tokens that tokenizer_config.json adds to the vocabulary, in the order of their ids."""
    decoder = config.get("added_tokens_decoder") or {}
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return [
        tokenizers.AddedToken(token["content"], **{flag: bool(token.get(flag)) for flag in flags})
        for _, token in sorted(decoder.items(), key=lambda item: int(item[0]))
    ]


def _stop_ids(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        given = _json(folder / name).get("eos_token_id")
        if given is not None:
            try:
                ids = [int(id_) for id_ in (given if isinstance(given, list) else [given])]
            except (ValueError, TypeError, OverflowError):
                ids = [-1]
            if not all(0 <= id_ < TOKENS for id_ in ids):
                raise TokenizerError(f"{folder / name}: eos_token_id is {given!r}, not a token's id or a list of such ids")
            return ids
    return []


NOT_SAMPLING = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
"""Fields of generation_config.json that do not affect sampling."""
SAMPLING = {
    "temperature": (0.0, 10.0), "top_p": (1e-9, 1.0), "top_k": (0, 1 << 31), "min_p": (0.0, 1.0), "repetition_penalty": (1e-9, 10.0),
}  # fmt: skip
"""Sampling fields of generation_config.json, each with its minimum and maximum."""


def _generation(folder: Path) -> dict[str, Any]:
    """Return generation_config.json without `NOT_SAMPLING` and nulls. Raise TokenizerError for a `SAMPLING` field out of range."""
    path = folder / "generation_config.json"
    fields = {name: value for name, value in _json(path).items() if value is not None and name not in NOT_SAMPLING}
    for name, (low, high) in SAMPLING.items():
        value = fields.get(name, low)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (isinstance(value, float) and isinstance(low, float))) or not low <= value <= high:
            raise TokenizerError(f"{path}: {name} is {value!r}, not a number from {low:g} to {high:g}")
    return fields


def _template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or several by name, or None. Template files take precedence over tokenizer_config.json."""
    template = config.get("chat_template")
    entries = template if isinstance(template, list) else []
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(part), str) for part in ("name", "template")):
            raise TokenizerError(f"{folder / 'tokenizer_config.json'}: an entry of chat_template needs a name and a template, both text")
    templates = {entry["name"]: entry["template"] for entry in entries}
    if isinstance(template, str):
        templates["default"] = template
    if isinstance(text := _json(folder / "chat_template.json").get("chat_template"), str):
        templates["default"] = text
    for path in [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]:
        if path.is_file():
            templates["default" if path.stem == "chat_template" else path.stem] = path.read_text(encoding="utf-8")
    return templates["default"] if set(templates) == {"default"} else templates or None
