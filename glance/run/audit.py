"""The audit: is the output the target's own greedy text? Measured per prompt, with controls, and told from near-ties.

What fails it:

- In fp32 (TF32 off, asserted), any divergence of any arm from the oracle.
- In bf16 or fp16, a divergence whose top-2 margin is larger than the measured block-pass noise: a fault. Inside the noise
  it is a near-tie: two tokens that the target itself cannot tell apart once rows are packed. Noise is the largest change of
  a top-2 margin between the oracle's single-row passes and plain causal blocks of as many rows as a tree has. These blocks
  share no code with the decoder, so a fault of the decoder cannot pass as noise.
- A control that fails: the oracle does not repeat itself, or a planted fault goes unseen, or (fp32) a teacher-forced block
  pass of the tree's own shape chooses another token.

Shapes: P prompt tokens, n output tokens, N nodes, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from glance.decode import decode, greedy_generate
from glance.files import sha256
from glance.run.experiment import Pair, Plan, decode_arm, prepare, run_provenance
from glance.run.faults import FAULTS, KnownText
from glance.run.progress import watched
from glance.session import Settings
from glance.target import Target
from glance.tasks import Prompt
from glance.tree import build_budget_tree

ROWS = (1, 2, 8, 16, 64)  # of the row-invariance table
CONTEXT = 12  # tokens shown on each side of a divergence


def audit(
    pair: Pair, plan: Plan, prompts: Sequence[Prompt], *, say: Callable = print, faults: bool = True
) -> dict[str, Any]:
    """Check every arm of the plan against the oracle on every prompt.

    Returns:
        The report: verdict ("exact", "near-ties only" or "fault"), counts per arm, controls, every divergence with its
        margin and the text around it, row invariance, planted faults, provenance.
    """
    if pair.dtype == "float32" and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
        raise ValueError("TF32 is on, so float32 matrix products are not float32: turn it off before an fp32 audit")
    arms = [arm for arm in plan.arms if arm != "ar"]
    counts = {arm: {"identical": 0, "of": 0} for arm in arms}
    repeat, suspects = {"identical": 0, "of": 0}, []
    blocks = {"causal": _no_gap(), "tree": _no_gap()}
    for done, prompt in enumerate(watched(prompts, f"audit {pair.dtype}", len(prompts)), start=1):
        ids, positions = prepare(pair, prompt, plan)
        greedy, _ = decode_arm("ar", pair, ids, positions, plan)
        alone = oracle_logits(pair, ids, positions, greedy)
        _count(repeat, alone.argmax(-1).tolist() == greedy)
        _widen(blocks["causal"], alone, causal_block_logits(pair, ids, positions, greedy, plan.budget + 1))
        _widen(blocks["tree"], alone, tree_block_logits(pair, ids, positions, greedy, plan))
        for arm in arms:
            other, _ = decode_arm(arm, pair, ids, positions, plan)
            _count(counts[arm], other == greedy)
            if other != greedy:
                suspects.append(_divergence(pair, prompt, arm, greedy, other, alone))
        if done == len(prompts) or prompts[done].task != prompt.task:
            same, of = (sum(c[key] for c in counts.values()) for key in ("identical", "of"))
            say(f"{pair.dtype} {prompt.task:8s} {done}/{len(prompts)} prompts, identical {same}/{of}")
    noise = blocks["causal"]["max_margin_change"]
    for row in suspects:
        row["kind"] = "near-tie" if pair.dtype != "float32" and row["margin"] <= noise else "fault"
    report = {
        "dtype": pair.dtype,
        "n_prompts": len(prompts),
        "budget": plan.budget,
        "arms": counts,
        "controls": {"oracle_repeat": repeat, "block_pass": blocks["tree"], "causal_block": blocks["causal"]},
        "noise": noise,
        "divergences": suspects,
        "row_invariance": row_invariance(pair, plan, prompts[0]),
        "faults": planted_faults(pair, plan, prompts) if faults else [],
        "provenance": run_provenance(pair, plan),
    }
    return {"verdict": verdict(report), **report}


def verdict(report: dict[str, Any]) -> str:
    """Return "fault" where something must fail the audit, "near-ties only" where only these stand out, else "exact"."""
    controls = report["controls"]
    failed = [
        controls["oracle_repeat"]["identical"] < controls["oracle_repeat"]["of"],
        report["dtype"] == "float32" and controls["block_pass"]["argmax_changed"] > 0,
        any(row["kind"] == "fault" for row in report["divergences"]),
        any(not row["caught"] for row in report["faults"]),
    ]
    return "fault" if any(failed) else "near-ties only" if report["divergences"] else "exact"


@torch.inference_mode()
def oracle_logits(pair: Pair, ids: torch.Tensor, positions: Any, text: Sequence[int]) -> torch.Tensor:
    """Return the single-row logits `(n, V)` that chose each token of `text`, step by step as the oracle runs."""
    return causal_block_logits(pair, ids, positions, text, 1)


@torch.inference_mode()
def causal_block_logits(pair: Pair, ids: torch.Tensor, positions: Any, text: Sequence[int], rows: int) -> torch.Tensor:
    """Return the logits `(n, V)` before each token of `text`, fed in causal blocks; no code of the decoder."""
    model, cache = pair.target, DynamicCache(config=pair.target.config)
    inputs = positions.prefill_inputs(model, ids)
    output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **inputs)
    logits, place = [output.logits[0, -1:].float()], ids.shape[1]
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
    vocabulary, reach = pair.target.get_input_embeddings().weight.shape[0], pair.head.block_size - 1
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


def row_invariance(pair: Pair, plan: Plan, prompt: Prompt) -> list[dict[str, Any]]:
    """Compare one row alone with the same row packed with others, masked and not: bitwise equal, or how far off."""
    ids, positions = prepare(pair, prompt, plan)
    root = greedy_generate(pair.target, ids, 1, positions=positions)[0, -1].item()
    table, alone = [], None
    with torch.inference_mode(), Target(pair.target, positions, room=ids.shape[1] + 80) as target:
        target.prefill(ids)
        for rows in ROWS:
            for masked in (False, True):
                ranked = np.linspace(-0.1, -3, max(rows - 1, 1))[None]
                tree = build_budget_tree(
                    np.arange(len(ranked[0]))[None], ranked, budget=rows - 1, branch_k=max(rows - 1, 1)
                )
                target.masked = masked
                row = target.verify(root, tree)[0]
                target.cache.truncate(target.length)
                alone = row if alone is None else alone
                table.append(
                    {
                        "dtype": pair.dtype,
                        "rows": rows,
                        "masked": masked and rows > 1,
                        "bitwise_equal": bool(torch.equal(row, alone)),
                        "max_abs": float((row - alone).abs().max()),
                        "max_ulp": max_ulp(row, alone),
                    }
                )
    return [row for i, row in enumerate(table) if i != 1]  # a single row has no mask


def max_ulp(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the largest distance between two tensors of one float dtype, in steps of representable numbers."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    lowest = torch.iinfo(integer).min
    ordered = []
    for bits in (a.contiguous().view(integer).long(), b.contiguous().view(integer).long()):
        ordered.append(torch.where(bits < 0, lowest - bits, bits))  # negative floats count downwards from -0.0
    return int((ordered[0] - ordered[1]).abs().max())


def planted_faults(pair: Pair, plan: Plan, prompts: Sequence[Prompt], most: int = 10) -> list[dict[str, Any]]:
    """Plant each fault of `glance.run.faults` and decode until it shows or `most` prompts are through."""
    shown = [prompt for prompt in prompts if prompt.images][:: max(1, len(prompts) // most)] or list(prompts)
    cases = []
    for prompt in shown[:most]:
        ids, positions = prepare(pair, prompt, plan)
        cases.append((ids, positions, decode_arm("ar", pair, ids, positions, plan)[0]))
    table = []
    for name, (plant, must_fail) in FAULTS.items():
        diverged = of = 0
        for ids, positions, greedy in cases:
            with plant(pair.head):
                other = _decode_under_fault(pair, plan, ids, positions, greedy) if must_fail else None
                other = decode_arm("tree", pair, ids, positions, plan)[0] if other is None else other
            of, diverged = of + 1, diverged + (other != greedy)
            if diverged and must_fail:
                break
        caught = (diverged > 0) == must_fail
        table.append({"fault": name, "must_fail": must_fail, "diverged": diverged, "of": of, "caught": caught})
    return table


def _decode_under_fault(pair: Pair, plan: Plan, ids: torch.Tensor, positions: Any, greedy: list[int]) -> list[int]:
    """Decode with trees that hold the right text among decoys; [] where the decoder noticed the fault by itself."""
    vocabulary, offsets = pair.target.get_input_embeddings().weight.shape[0], pair.head.block_size - 1
    drafter = KnownText(greedy, ids.shape[1], max(plan.budget, 15), plan.branch_k, offsets, vocabulary)
    try:
        out, _ = decode(drafter, pair.target, ids, Settings(plan.max_new_tokens), positions)
    except ValueError:  # logits that are not finite
        return []
    return out[0, ids.shape[1] :].tolist()


def _divergence(
    pair: Pair, prompt: Prompt, arm: str, greedy: list[int], other: list[int], alone: torch.Tensor
) -> dict[str, Any]:
    """Describe where two texts part: index, both ids, the oracle's top-2 margin there, the text around, both hashes."""
    at = next((i for i, (a, b) in enumerate(zip(greedy, other, strict=False)) if a != b), min(len(greedy), len(other)))
    top = alone[min(at, len(alone) - 1)].topk(2)
    window = slice(max(0, at - CONTEXT), at + CONTEXT)
    return {
        "task": prompt.task,
        "prompt": prompt.index,
        "arm": arm,
        "index": at,
        "greedy_id": greedy[at] if at < len(greedy) else None,
        "other_id": other[at] if at < len(other) else None,
        "margin": float(top.values[0] - top.values[1]),
        "runner_up_id": int(top.indices[1]),
        "greedy_text": pair.processor.decode(greedy[window]),
        "other_text": pair.processor.decode(other[window]),
        "sha256_greedy": sha256(greedy),
        "sha256_other": sha256(other),
    }


def _no_gap() -> dict[str, Any]:
    return {"rows": 0, "argmax_changed": 0, "max_logit_gap": 0.0, "max_margin_change": 0.0}


def _widen(gap: dict[str, Any], alone: torch.Tensor, packed: torch.Tensor) -> None:
    """Take the rows of one text into a comparison of single-row logits with packed ones, both `(n, V)`."""
    top, ids = alone.topk(2, dim=-1)
    moved = packed.gather(-1, ids)
    change = ((moved[:, 0] - moved[:, 1]) - (top[:, 0] - top[:, 1])).abs().max()
    gap["rows"] += len(alone)
    gap["argmax_changed"] += int((packed.argmax(-1) != ids[:, 0]).sum())
    gap["max_logit_gap"] = max(gap["max_logit_gap"], float((packed - alone).abs().max()))
    gap["max_margin_change"] = max(gap["max_margin_change"], float(change))


def _count(tally: dict[str, int], same: bool) -> None:
    tally["identical"] += same
    tally["of"] += 1
