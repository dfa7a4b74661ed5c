"""How much of a head's blocks a target accepts: in real decoding, and beside it as teacher-forced training sees it.

Rounds that were cut at a stop token or at the limit are left out throughout.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from glance.decode import decode
from glance.drafters.block import BlockDrafter
from glance.head import block_logits
from glance.records import Round
from glance.session import Settings
from glance.target import StreamPositions
from glance.train.blocks import TrainSettings, hang_blocks, run_blocks
from glance.train.distill import Example, Inputs, read_states
from glance.vl import VisionPositions


def decode_rounds(
    head: nn.Module, target: nn.Module, prompts: Sequence[Inputs], drafter: BlockDrafter, max_new_tokens: int
) -> list[tuple[torch.Tensor, list[Round]]]:
    """Decode held-out prompts; return each text's ids `(T,)` and its rounds that were not cut."""
    texts = []
    head_mode = head.training
    head.eval()
    for i in range(len(prompts)):
        inputs = prompts[i]
        positions = VisionPositions.from_inputs(inputs) if "pixel_values" in inputs else StreamPositions()
        ids, stats = decode(drafter, target, inputs["input_ids"], Settings(max_new_tokens), positions)
        texts.append((ids[0].cpu(), [r for r in stats.rounds if not r.truncated]))
    head.train(head_mode)
    return texts


def tau_of(texts: list[tuple[torch.Tensor, list[Round]]]) -> float:
    """Return tokens per round, pooled over all rounds that were not cut."""
    accepted = [r.accepted for _, rounds in texts for r in rounds]
    return 1 + sum(accepted) / len(accepted) if accepted else float("nan")


@torch.inference_mode()
def compare_acceptance(
    head: nn.Module, target: nn.Module, prompts: Sequence[Inputs], settings: TrainSettings, mask: int
):
    """Set the chain's acceptance in decoding beside the teacher-forced one, from the same anchors, offset by offset.

    Returns:
        tau of chain and tree, and per offset the share of rounds that accept at least so far: as decoded, and as one
        training pass over the finished text says. The two should agree; where they part, the head is not fed in decoding
        what it was trained on.
    """
    block = settings.block
    texts = decode_rounds(head, target, prompts, BlockDrafter(head, block - 1, 1), settings.max_new_tokens)
    tree = decode_rounds(head, target, prompts, BlockDrafter(head, settings.budget), settings.max_new_tokens)
    decoded = torch.zeros(block - 1)
    forced = torch.zeros(block - 1)
    n = 0
    for i, (ids, rounds) in enumerate(texts):
        if not rounds:
            continue
        states = read_states(target, head.target_layer_ids, [prompts[i]], [ids])[0]
        blocks = hang_blocks([Example(ids, 0, states)], [[r.start for r in rounds]], block, mask)
        said = block_logits(head, target)(run_blocks(head, target, blocks.to(states.device))).argmax(-1)
        right = said.view_as(blocks.labels).cpu() == blocks.labels  # (1, A, B)
        forced += right[0, :, 1:].int().cumprod(-1).sum(0)
        decoded += torch.stack([torch.arange(1, block) <= r.accepted for r in rounds]).sum(0)
        n += len(rounds)
    rows = {"decode": (decoded / max(n, 1)).tolist(), "teacher_forced": (forced / max(n, 1)).tolist()}
    gap = float((decoded - forced).abs().max()) / max(n, 1)
    return {"tau_chain": tau_of(texts), f"tau_tree_{settings.budget}": tau_of(tree), "rounds": n, "gap": gap, **rows}


def acceptance_text(result: dict[str, Any]) -> str:
    """Lay out acceptance by offset, decoded beside teacher-forced."""
    taus = "  ".join(f"{name} {value:.2f}" for name, value in result.items() if name.startswith("tau"))
    pairs = zip(result["decode"], result["teacher_forced"], strict=True)
    rows = [f"{k:6d}  {decoded:6.3f}  {forced:14.3f}" for k, (decoded, forced) in enumerate(pairs, start=1)]
    return "\n".join([f"{taus}  over {result['rounds']} rounds", "offset  decode  teacher-forced", *rows])
