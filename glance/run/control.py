"""A control that shares nothing with the decoder: a prompt's greedy text by transformers' own `generate`.

It gets what the processor returned, pixels, grids and token types as they are, and none of our positions. Rules of the
target's `generation_config` are taken away while it runs, since greedy here is the plain argmax; its stop tokens stay.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from glance.decode import stop_ids
from glance.run.experiment import Pair, Plan
from glance.tasks import Prompt, encode


@torch.inference_mode()
def generate_text(pair: Pair, prompt: Prompt, plan: Plan) -> list[int]:
    """Return the new ids of `generate(do_sample=False)` on a prompt, with an attention mask of ones."""
    encoded = encode(pair.processor, prompt, max_pixels=plan.max_pixels, template=plan.template)
    inputs = {
        name: value.to(pair.device) if isinstance(value, torch.Tensor) else value for name, value in encoded.items()
    }
    if not any(name.startswith("pixel_values") for name in inputs):
        inputs.pop("token_type_ids", None)  # some tokenizers make them by habit
    ids = inputs["input_ids"]
    inputs["attention_mask"] = torch.ones_like(ids)
    stops = sorted(stop_ids(pair.target))
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=plan.max_new_tokens,
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else None,
    )
    with _alone(pair.target):
        out = pair.target.generate(**inputs, generation_config=greedy)
    return out[0, ids.shape[1] :].tolist()


@contextmanager
def _alone(target: Any) -> Iterator[None]:
    """Take away the target's own rules and the rope shift that an earlier prompt left on it; put both back."""
    rules = target.generation_config
    owners = [owner for owner in (target, getattr(target, "model", None)) if hasattr(owner, "rope_deltas")]
    deltas = [owner.rope_deltas for owner in owners]
    target.generation_config = GenerationConfig()
    for owner in owners:
        owner.rope_deltas = None
    try:
        yield
    finally:
        target.generation_config = rules
        for owner, delta in zip(owners, deltas, strict=True):
            owner.rope_deltas = delta
