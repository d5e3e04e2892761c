"""A language model that grades pages by how probable it finds each answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from puna.stages.curate.classifiers.device import Place
from puna.stages.curate.classifiers.questions import TEXT, Question
from puna.stages.grading import mean_grades, tokens_apart
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

MARK = "\ufdd0"  # stands for the page in a rendered dialogue; no text is meant to hold this code point
TOKEN_CHARACTERS = 16  # a page is cut to so many characters per token before it is encoded


class Grader:
    """A model, and the question around a page as token ids: `head`, the page, `tail`; then one of `tokens` answers."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, question: Question, max_tokens: int) -> None:
        """PunaError where the question does not suit the model."""
        self.model, self.question, self.max_tokens = model, question, max_tokens
        before, after = _framed(tokenizer, question)
        markup: Callable[[str], list[int]] = lambda text: tokenizer.vocabulary.encode_markup(text)[0]  # noqa: E731
        self.head = [*([] if question.chat else tokenizer.lead), *markup(before)]
        self.tail, self.tokens = tokens_apart([markup(f"{after} {answer}") for answer in question.answers], question.answers)
        self._encode = tokenizer.encode  # a page that writes a special token gets the characters of it
        asked, most = len(self.head) + max_tokens + len(self.tail), model.config.max_position_embeddings
        if asked > most:
            raise PunaError(f"judge.max_tokens={max_tokens}: with the prompt's {asked - max_tokens} tokens that is more than the "
                            f"{most} that the model reads; give at most {max(most - asked + max_tokens, 0)}")  # fmt: skip

    def pages(self, texts: Sequence[str]) -> list[list[int]]:
        """The first tokens of each page, at most `max_tokens`."""
        return [self._encode(text[: TOKEN_CHARACTERS * self.max_tokens])[: self.max_tokens] for text in texts]

    def __call__(self, texts: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Grade of each page and probability that the model answers as asked, float64[n] each.

        One forward pass: the question's head is read once, every page with its tail is a branch of it.
        """
        import torch

        from puna.models.forest import Forest

        branches = [page + self.tail for page in self.pages(texts)]
        forest = Forest.branch(self.head, branches) if self.head else Forest.pack(branches)
        place = next(self.model.parameters()).device
        last = torch.tensor([len(branch) for branch in branches], device=place).cumsum(0) + len(self.head) - 1
        grades, said = mean_grades(self.model.logits(self.model.hidden(forest.to(place))[last]), self.tokens, self.question.values)
        return grades.cpu().numpy(), said.cpu().numpy()


def _framed(tokenizer: Tokenizer, question: Question) -> tuple[str, str]:
    """The text before and after the page, up to where one of the answers follows after a space."""
    prompt = question.prompt.replace(TEXT, MARK)
    if not question.chat:
        whole = f"{prompt}\n{question.start}"
    elif tokenizer.template is None:
        raise PunaError("judge.chat: the model has no chat format; set chat=false, which lets it continue the prompt")
    else:
        dialogue = [{"role": "user", "content": prompt}]
        whole = tokenizer.template.render(dialogue, add_generation_prompt=True) + question.start
    before, _, after = whole.partition(MARK)
    return before, after


@lru_cache(maxsize=1)
def grader(place: Place, question: Question, max_tokens: int, device: str) -> Grader:
    """The grader of this process, loaded once."""
    from puna.models.formats.checkpoint import CheckpointError, load_with_tokenizer

    try:
        model, tokenizer = load_with_tokenizer(place.path, "lm")
    except (CheckpointError, ValueError, OSError) as error:
        raise PunaError(f"judge: the model in {place.path} cannot be read: {error}") from error
    return Grader(model.eval().to(device), tokenizer, question, max_tokens)
