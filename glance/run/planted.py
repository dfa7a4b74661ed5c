"""The audit of the audit: each fault of `glance.run.faults` is planted where it can show, and must be seen.

A fault is planted on prompts alone whose texts are long enough for it and, for the delta, whose images shift positions.
Where there is none, or where a fault left the few tokens that it met unchanged, it was not exercised: that is told from a
fault that went unseen over many tokens, which fails the audit.
"""

from collections.abc import Sequence
from typing import Any

import torch

from glance.decode import decode
from glance.run.experiment import Pair, Plan, decode_arm, prepare
from glance.run.faults import DELTA, FAULTS, NEEDS, KnownText
from glance.session import Settings
from glance.tasks import Prompt
from glance.vl import rope_owner

ENOUGH = 64  # tokens after which a planted fault that changed none of them went unseen


def planted_faults(
    pair: Pair, plan: Plan, prompts: Sequence[Prompt], texts: Sequence[list[int]], most: int = 10
) -> list[dict[str, Any]]:
    """Plant each fault and decode until it shows or `most` prompts are through.

    Args:
        texts: the oracle's ids of each prompt.

    Returns:
        One row per fault; `caught` is None where it was not exercised, `why` says the reason and what to do, and `applies`
        is false where no prompt could exercise it on this target.
    """
    return [_plant(name, pair, plan, prompts, texts, most) for name in FAULTS]


def _plant(
    name: str, pair: Pair, plan: Plan, prompts: Sequence[Prompt], texts: Sequence[list[int]], most: int
) -> dict[str, Any]:
    plant, must_fail = FAULTS[name]
    pairs = list(zip(prompts, texts, strict=True))
    seeing = [case for case in pairs if case[0].images]
    usable = [case for case in (seeing or pairs) if len(case[1]) >= NEEDS[name]]
    if name == DELTA and not seeing:
        usable = []
    shifted = False
    diverged = of = tokens = 0
    for prompt, greedy in usable[:: max(1, len(usable) // most)][:most]:
        ids, positions = prepare(pair, prompt, plan)
        if name == DELTA and not _delta(pair, ids, positions):
            continue
        shifted = True
        with plant(pair.head):
            if must_fail:
                other = _decode_under_fault(pair, plan, ids, positions, greedy)
            else:
                other = decode_arm("tree", pair, ids, positions, plan)[0]
        of += 1
        tokens += len(greedy) - 1
        diverged += other != greedy
        if diverged and must_fail:
            break
    row = {"fault": name, "must_fail": must_fail, "diverged": diverged, "of": of, "applies": True, "why": None}
    if of and (not must_fail or diverged or tokens >= ENOUGH):
        return row | {"caught": (diverged > 0) == must_fail}
    row |= {"caught": None, "why": f"too few tokens ({tokens} of {ENOUGH}): more prompts, or a larger --max-new"}
    if name == DELTA and rope_owner(pair.target) is None:
        row |= {"applies": False, "why": "this target's positions are not shifted by images"}
    elif name == DELTA and not seeing:
        row["why"] = "no prompt has an image: audit prompts with images"
    elif name == DELTA and usable and not shifted:
        row |= {"applies": False, "why": "the images shift no positions on this target"}
    elif not of:
        row["why"] = f"no text has {NEEDS[name]} tokens: a larger --max-new, or prompts with longer answers"
    return row


def _delta(pair: Pair, ids: torch.Tensor, positions: Any) -> int:
    """Return rope position minus place after a prompt."""
    return int(positions.prefill_inputs(pair.target, ids)["position_ids"].max()) + 1 - ids.shape[1]


def _decode_under_fault(pair: Pair, plan: Plan, ids: torch.Tensor, positions: Any, greedy: list[int]) -> list[int]:
    """Decode with trees that hold the right text among decoys; [] where the decoder noticed the fault by itself."""
    vocabulary = pair.target.get_input_embeddings().weight.shape[0]
    offsets = min(pair.head.block_size - 1, max(1, (len(greedy) - 2) // 2))  # a short text takes two rounds as well
    drafter = KnownText(greedy, ids.shape[1], max(plan.budget, 15), plan.branch_k, offsets, vocabulary)
    try:
        out, _ = decode(drafter, pair.target, ids, Settings(plan.max_new_tokens), positions)
    except ValueError:  # logits that are not finite
        return []
    return out[0, ids.shape[1] :].tolist()
