"""The passes that the audit's controls compare: single rows, plain causal blocks, and blocks of a tree's shape.

Each is teacher-forced: it is fed a text, and returns the logits that stand before each of its tokens.

Shapes: n output tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from glance.run.experiment import Pair, Plan
from glance.target import Target
from glance.tree import build_budget_tree


@torch.inference_mode()
def oracle_logits(pair: Pair, ids: torch.Tensor, positions: Any, text: Sequence[int]) -> torch.Tensor:
    """Return the single-row logits `(n, V)` that chose each token of `text`, step by step as the oracle runs."""
    return causal_block_logits(pair, ids, positions, text, 1)


@torch.inference_mode()
def causal_block_logits(pair: Pair, ids: torch.Tensor, positions: Any, text: Sequence[int], rows: int) -> torch.Tensor:
    """Return the logits `(n, V)` before each token of `text`, fed in causal blocks; no code of the decoder."""
    model = pair.target
    cache = DynamicCache(config=pair.target.config)
    inputs = positions.prefill_inputs(model, ids)
    output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **inputs)
    logits = [output.logits[0, -1:].float()]
    place = ids.shape[1]
    axes = inputs["position_ids"].shape[:-1]
    next_position = int(inputs["position_ids"].max()) + 1
    for start in range(0, len(text) - 1, rows):
        block = torch.tensor([text[start : min(start + rows, len(text) - 1)]], device=ids.device)
        q = block.shape[1]
        steps = torch.arange(start, start + q, device=ids.device)
        mask = None
        if q > 1:
            mask = torch.zeros(1, 1, q, place + start + q, device=ids.device, dtype=pair.target.dtype)
            mask[..., place + start :].masked_fill_(torch.ones(q, q, device=ids.device).triu(1).bool(), -torch.inf)
        output = model(
            input_ids=block,
            position_ids=(next_position + steps).expand(*axes, q),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(output.logits[0].float())
    return torch.cat(logits)


@torch.inference_mode()
def tree_block_logits(pair: Pair, ids: torch.Tensor, positions: Any, text: Sequence[int], plan: Plan) -> torch.Tensor:
    """Return the logits `(n, V)` before each token of `text` from verify passes whose trees hold it among decoys."""
    vocabulary = pair.target.get_input_embeddings().weight.shape[0]
    reach = pair.head.block_size - 1
    ranked = np.log(0.55 * 0.5 ** np.arange(plan.branch_k))
    with Target(pair.target, positions, room=ids.shape[1] + len(text) + plan.budget + 1) as target:
        rows = [target.prefill(ids)[0].float()]
        at = 0
        while at < len(text) - 1:
            ahead = np.array(text[at + 1 : at + 1 + reach])
            top_ids = (ahead[:, None] + np.arange(plan.branch_k)) % vocabulary  # rank 0 is the text, the others decoys
            tree = build_budget_tree(
                top_ids, np.tile(ranked, (len(ahead), 1)), budget=plan.budget, branch_k=plan.branch_k
            )
            path = tree.spine()
            logits = target.verify(text[at], tree)
            rows.append(logits[[0, *(node + 1 for node in path)]][: len(text) - 1 - at].float())
            target.keep(path)
            at += len(path) + 1
    return torch.cat(rows)[: len(text)]
