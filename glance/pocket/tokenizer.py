"""The pocket target's tokenizer: one token per word of the answers' own sentences, one per character of page words.

Conventions: a piece may carry one leading space. Words in `reserved.txt` are whole tokens; everything else is spelt
character by character (characters outside ASCII byte by byte), so any word can be read. There are no merges: a piece is
either in the vocabulary or falls apart into its bytes. This file does not know of images beyond their placeholder.
"""

from __future__ import annotations

import random
import re
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from glance.pocket.canvas import Spot
from glance.pocket.pages import ATTRIBUTES, HEADINGS, KEYS
from glance.pocket.render import DRAW
from glance.pocket.words import WORDS, read_list

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|mask|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def collect_template_words(draws: int = 400) -> list[str]:
    """List the words that answers and prompts hold beside what stands on the page, by drawing pages."""
    words = {"user", "assistant", "system", *KEYS, *ATTRIBUTES, *HEADINGS}
    for task in DRAW:
        for seed in range(draws):
            draft = DRAW[task](random.Random(f"template/{task}/{seed}"), "train")
            for pieces in [draft.prompt] + [alternative for segment in draft.segments for alternative in segment]:
                texts = [p.text if isinstance(p, Spot) else p for p in pieces if isinstance(p, (str, Spot))]
                words.update(word for text in texts for word in re.findall("[A-Za-z]{2,}", text))
    return sorted(words)


def write_reserved(path: Path = WORDS / "reserved.txt") -> list[str]:
    """Write the template words that no page word may equal, one a line, as they are spelt."""
    words = collect_template_words()
    path.write_text("\n".join(words) + "\n", encoding="utf-8")
    return words


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer from the shipped list of template words."""
    words = read_list("reserved")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "Ġ"  # how the byte-level alphabet writes a space
    pieces = [space + letter for letter in string.printable[:94]]
    pieces += [prefix + word for word in words for prefix in ("", space)]
    vocabulary = {piece: i for i, piece in enumerate([*SPECIALS, *alphabet, *pieces])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    whole = "|".join(sorted(words, key=len, reverse=True))
    pattern = rf"(?: |(?<![A-Za-z]))(?:{whole})(?![A-Za-z])| ?[^\s]|\s"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        additional_special_tokens=list(SPECIALS[1:2] + SPECIALS[3:7]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
