"""Pages as batches: prompts as the processor would tokenise them, answers as labels, and where each token comes from.

Conventions: batch `k` of a stage is a function of seed, stage and `k` alone, so a stopped run resumes with the very next
batch; batches are drawn in groups of 8 and sorted by length within a group, to waste little on padding. Labels are
shifted: the label at a position is the token that comes next.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from glance.pocket.canvas import CELL, WIDTH
from glance.pocket.model import stack_pixels
from glance.pocket.render import Page, sample

GROUP = 8
IGNORE = -100


@dataclass
class Batch:
    """Equally sized pages. `n` pages, `t` tokens, `c` cells."""

    pixels: torch.Tensor  # (n, height, 256, 3) uint8
    ids: torch.Tensor  # (n, t)
    labels: torch.Tensor  # (n, t), shifted, -100 outside the answer
    pointers: torch.Tensor  # (n, t, 2): cell and slot that the next token comes from, -1 where none
    asked: torch.Tensor  # (n, t) bool: the label depends on the question
    slots: torch.Tensor  # (n, c, 16): characters
    things: torch.Tensor  # (n, c, 3): colour, shape, size
    start: int  # where the image begins


def frame_prompt(tokenizer: PreTrainedTokenizerFast, cells: int) -> tuple[list[int], list[int]]:
    """Return the ids before the question (image included) and after it."""
    head = tokenizer("<|im_start|>user\n<|vision_start|>")["input_ids"]
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    before = head + [image] * cells + tokenizer("<|vision_end|>")["input_ids"]
    return before, tokenizer("<|im_end|>\n<|im_start|>assistant\n")["input_ids"]


def encode_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str, cells: int) -> list[int]:
    """Encode a question with its image as the chat template does."""
    before, after = frame_prompt(tokenizer, cells)
    return before + tokenizer(prompt)["input_ids"] + after


def point_tokens(tokenizer: PreTrainedTokenizerFast, text: str, source: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Encode a text and return each token's source: that of its first character that is no space."""
    encoded = tokenizer(text, return_offsets_mapping=True)
    rows = []
    for begin, end in encoded["offset_mapping"]:
        while begin < end - 1 and text[begin] == " ":
            begin += 1
        rows.append(source[begin])
    return encoded["input_ids"], np.array(rows).reshape(-1, 2)


def encode_page(tokenizer: PreTrainedTokenizerFast, page: Page) -> tuple[list[int], list[int], np.ndarray]:
    """Return a page's prompt ids, answer ids (with the stop token) and each token's source."""
    cells = page.canvas.height * WIDTH // CELL**2
    before, after = frame_prompt(tokenizer, cells)
    question, question_source = point_tokens(tokenizer, page.prompt, page.prompt_source)
    answer, answer_source = point_tokens(tokenizer, page.answer, page.answer_source)
    blank = lambda count: np.full((count, 2), -1)  # noqa: E731
    sources = [blank(len(before)), question_source, blank(len(after)), answer_source, blank(1)]
    return before + question + after, [*answer, tokenizer.eos_token_id], np.concatenate(sources)


def mark_tokens(tokenizer: PreTrainedTokenizerFast, page: Page) -> torch.Tensor:
    """Mark the answer's tokens (without the stop token) that depend on the question, (tokens,) bool."""
    marks = page.mark_asked()
    offsets = tokenizer(page.answer, return_offsets_mapping=True)["offset_mapping"]
    return torch.tensor([bool(marks[end - 1]) for _, end in offsets])


def collate(tokenizer: PreTrainedTokenizerFast, pages: list[Page]) -> Batch:
    """Make a batch of equally high pages."""
    encoded = [encode_page(tokenizer, page) for page in pages]
    marks = [mark_tokens(tokenizer, page) for page in pages]
    length = max(len(prompt) + len(answer) for prompt, answer, _ in encoded)
    length = (length + 7) // 8 * 8
    ids = torch.full((len(pages), length), tokenizer.pad_token_id)
    labels = torch.full((len(pages), length), IGNORE)
    pointers = torch.full((len(pages), length, 2), -1)
    asked = torch.zeros((len(pages), length), dtype=torch.bool)
    for i, (prompt, answer, source) in enumerate(encoded):
        whole = torch.tensor(prompt + answer)
        ids[i, : len(whole)] = whole
        labels[i, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
        asked[i, len(prompt) - 1 : len(whole) - 2] = marks[i]
        pointers[i, : len(whole) - 1] = torch.from_numpy(source[1:])
    return Batch(
        pixels=stack_pixels([page.image for page in pages]),
        ids=ids,
        labels=labels,
        pointers=pointers,
        asked=asked,
        slots=torch.from_numpy(np.stack([page.canvas.label_slots() for page in pages])),
        things=torch.from_numpy(np.stack([page.canvas.label_things() for page in pages])),
        start=len(tokenizer("<|im_start|>user\n<|vision_start|>")["input_ids"]),
    )


class PageStream(torch.utils.data.IterableDataset):
    """An endless stream of batches of one stage, from any step on."""

    def __init__(self, tokenizer, mixture: dict[str, float], size: int, name: str, seed: int, first_step: int = 0):
        self.tokenizer = tokenizer
        self.mixture = mixture
        self.size = size
        self.name = name
        self.seed = seed
        self.first_step = first_step

    def draw_group(self, group: int) -> list[list[Page]]:
        """Draw the pages of one group of batches."""
        rng = random.Random(f"{self.seed}/{self.name}/{group}")
        tasks = rng.choices(list(self.mixture), list(self.mixture.values()), k=self.size * GROUP)
        pages = [sample(task, rng.randrange(2**48), "train") for task in tasks]
        pages.sort(key=lambda page: len(page.answer) + len(page.prompt))
        batches = [pages[i * self.size : (i + 1) * self.size] for i in range(GROUP)]
        rng.shuffle(batches)
        return batches

    def __iter__(self):
        """Yield batches; what earlier steps used of the first group is skipped."""
        group, skip = divmod(self.first_step, GROUP)
        while True:
            for pages in self.draw_group(group)[skip:]:
                yield collate(self.tokenizer, pages)
            group = group + 1
            skip = 0
