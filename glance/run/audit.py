"""The audit: is the output the target's own greedy text? Measured per prompt, with controls, and told from near-ties.

What fails it:

- In fp32 (TF32 off, asserted), any divergence of any arm from the oracle.
- In bf16 or fp16, a divergence whose top-2 margin is larger than the measured block-pass noise: a fault. Inside the noise
  it is a near-tie: two tokens that the target itself cannot tell apart once rows are packed. Noise is the largest change of
  a top-2 margin between the oracle's single-row passes and plain causal blocks of as many rows as a tree has. These blocks
  share no code with the decoder, so a fault of the decoder cannot pass as noise.
- A control that fails: transformers' own `generate`, which shares nothing with us, says another text than the oracle (judged
  as a divergence is); the oracle does not repeat itself; a planted fault goes unseen; or (fp32) a teacher-forced block pass
  of the tree's own shape chooses another token.

A planted fault that could not show leaves "not exercised": equality held, but the audit's own check is
missing. It fails nothing.

Shapes: P prompt tokens, n output tokens, N nodes, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glance.decode import greedy_generate
from glance.files import sha256
from glance.precision import is_fast
from glance.run.control import generate_text
from glance.run.experiment import Pair, Plan, decode_arm, prepare, run_provenance
from glance.run.findings import Findings, oracle_hashes
from glance.run.passes import causal_block_logits, oracle_logits, tree_block_logits
from glance.run.planted import planted_faults
from glance.run.progress import Progress
from glance.target import Target
from glance.tasks import Prompt
from glance.tree import build_budget_tree

ROWS = (1, 2, 8, 16, 64)  # of the row-invariance table
GENERATE = "transformers generate"  # stands as the arm where the oracle differs from it
SLOW_N = 1  # prompts per task in bfloat16 where it is slow
CONTEXT = 12  # tokens shown on each side of a divergence


def audit(
    pair: Pair,
    plan: Plan,
    prompts: Sequence[Prompt],
    *,
    say: Callable = print,
    faults: bool = True,
    generate_n: int = 2,
    folder: str | Path | None = None,
    oracle_of: str | Path | None = None,
) -> dict[str, Any]:
    """Check every arm of the plan against the oracle on every prompt, and all of them against transformers' `generate`.

    Args:
        pair, plan: what is audited; every arm of the plan but "ar" is compared with "ar".
        prompts: the plan's prompts, in order of their tasks.
        say: called with a line per task.
        faults: whether to plant faults too.
        generate_n: prompts per task that `generate` decodes too.
        folder: where findings are kept prompt by prompt, so that an interrupted audit goes on; None keeps nothing.
        oracle_of: a run's folder whose oracle's texts are taken where provenance allows it.

    Returns:
        The report, which audit.json holds:

        - verdict: "exact", "near-ties only", "not exercised" or "fault"; dtype, n_prompts, budget.
        - arms: arm -> {identical, of}: prompts whose ids equal the oracle's.
        - oracle: {shared, decoded}: prompts whose oracle's text came from `oracle_of`, or was decoded here.
        - controls: oracle_repeat {identical, of}; block_pass and causal_block {rows, argmax_changed, max_logit_gap,
          max_margin_change}, single-row passes against blocks of the tree's shape and plain causal ones.
        - generate: arms as above, against transformers' own; divergences of the oracle from it.
        - noise: the largest change of a top-2 margin in causal blocks.
        - divergences: {task, prompt, arm, index, greedy_id, other_id, runner_up_id, margin, kind, greedy_text, other_text,
          sha256_greedy, sha256_other} each.
        - row_invariance: {dtype, rows, masked, bitwise_equal, max_abs, max_ulp} per packing.
        - faults: {fault, must_fail, diverged, of, caught, applies, why} each; provenance.

    Raises:
        ValueError: TF32 in an fp32 audit, a negative `generate_n`, or prompts that cannot be encoded.
    """
    if pair.dtype == "float32" and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
        raise ValueError("TF32 is on, so float32 matrix products are not float32: turn it off before an fp32 audit")
    if generate_n < 0:
        raise ValueError(f"generate_n must be 0 or more, got {generate_n}")
    made_by = run_provenance(pair, plan)
    hashes = oracle_hashes(oracle_of, made_by) if oracle_of else {}
    findings = Findings(folder, {**made_by, "generate_n": generate_n})
    known = sum((prompt.task, prompt.index) in findings.done for prompt in prompts)
    progress = Progress(f"audit {pair.dtype}", len(prompts), known)
    rows = []
    of_task = Counter()
    for done, prompt in enumerate(prompts, start=1):
        place = (prompt.task, prompt.index)
        by_generate = of_task[prompt.task] < generate_n
        of_task[prompt.task] += 1
        found = findings.done.get(place)
        if found is None:
            found = findings.add(examine(pair, plan, prompt, by_generate, hashes.get(place)))
            progress.step()
        rows.append(found)
        if done == len(prompts) or prompts[done].task != prompt.task:
            say(_task_line(pair, prompt, rows, len(prompts)))
    progress.close()
    report = _summed(pair, plan, rows)
    report["row_invariance"] = row_invariance(pair, plan, prompts[0])
    report["faults"] = planted_faults(pair, plan, prompts, [row["greedy"] for row in rows]) if faults else []
    report["provenance"] = made_by
    findings.end()
    return {"verdict": verdict(report), **report}


def examine(pair: Pair, plan: Plan, prompt: Prompt, by_generate: bool, oracle_sha256: str | None) -> dict[str, Any]:
    """Decode one prompt by every arm and every control; return what was found.

    Args:
        oracle_sha256: hash of the oracle's text where it is known: the oracle is decoded only if no arm's text has it.
    """
    ids, positions = prepare(pair, prompt, plan)
    texts = {arm: decode_arm(arm, pair, ids, positions, plan)[0] for arm in plan.arms if arm != "ar"}
    greedy = next((text for text in texts.values() if sha256(text) == oracle_sha256), None)
    shared = greedy is not None
    if greedy is None:
        greedy = decode_arm("ar", pair, ids, positions, plan)[0]
    alone = oracle_logits(pair, ids, positions, greedy)
    causal = _no_gap()
    tree = _no_gap()
    _widen(causal, alone, causal_block_logits(pair, ids, positions, greedy, plan.budget + 1))
    _widen(tree, alone, tree_block_logits(pair, ids, positions, greedy, plan))
    found: dict[str, Any] = {"task": prompt.task, "prompt": prompt.index, "greedy": greedy, "shared": shared}
    found |= {"repeat": alone.argmax(-1).tolist() == greedy, "causal": causal, "tree": tree, "generate": None}
    found["arms"] = {arm: text == greedy for arm, text in texts.items()}
    found["divergences"] = [
        _divergence(pair, prompt, arm, greedy, text, alone) for arm, text in texts.items() if text != greedy
    ]
    if by_generate:
        reference = generate_text(pair, prompt, plan)
        same = {arm: text == reference for arm, text in {"ar": greedy, **texts}.items()}
        parted = [] if same["ar"] else [_divergence(pair, prompt, GENERATE, greedy, reference, alone)]
        found["generate"] = {"same": same, "divergences": parted}
    return found


def _summed(pair: Pair, plan: Plan, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put the prompts' findings together."""
    blocks = {"causal": _no_gap(), "tree": _no_gap()}
    for kind, gap in blocks.items():
        for row in rows:
            for key, value in row[kind].items():
                gap[key] = max(gap[key], value) if key.startswith("max_") else gap[key] + value
    noise = blocks["causal"]["max_margin_change"]
    compared = [row["generate"] for row in rows if row["generate"]]
    parted = [entry for row in compared for entry in row["divergences"]]
    suspects = [entry for row in rows for entry in row["divergences"]]
    for entry in (*suspects, *parted):
        entry["kind"] = "near-tie" if pair.dtype != "float32" and entry["margin"] <= noise else "fault"
    shared = sum(row["shared"] for row in rows)
    return {
        "dtype": pair.dtype,
        "n_prompts": len(rows),
        "budget": plan.budget,
        "oracle": {"shared": shared, "decoded": len(rows) - shared},
        "arms": {arm: _tally(row["arms"][arm] for row in rows) for arm in plan.arms if arm != "ar"},
        "controls": {
            "oracle_repeat": _tally(row["repeat"] for row in rows),
            "block_pass": blocks["tree"],
            "causal_block": blocks["causal"],
        },
        "generate": {
            "arms": {arm: _tally(row["same"][arm] for row in compared) for arm in plan.arms},
            "divergences": parted,
        },
        "noise": noise,
        "divergences": suspects,
    }


def failures(report: dict[str, Any]) -> list[str]:
    """Say what fails the audit, one sentence each; empty where nothing does."""
    controls = report["controls"]
    repeat = controls["oracle_repeat"]
    apart = sum(row["kind"] == "fault" for row in report["divergences"])
    foreign = sum(row["kind"] == "fault" for row in report["generate"]["divergences"])
    unseen = [row["fault"] for row in report["faults"] if row["caught"] is False]
    found = []
    if apart:
        found.append(f"{apart} outputs of arms differ from the oracle's")
    if foreign:
        found.append(f"the oracle differs from transformers' own generate on {foreign} prompts")
    if repeat["identical"] < repeat["of"]:
        found.append(f"the oracle repeats itself on {repeat['identical']} of {repeat['of']} prompts alone")
    if report["dtype"] == "float32" and (changed := controls["block_pass"]["argmax_changed"]):
        found.append(f"a block pass of a tree's shape chose {changed} other tokens than single steps")
    if unseen:
        found.append(f"planted faults did not behave as they must: {', '.join(unseen)}")
    return found


def verdict(report: dict[str, Any]) -> str:
    """Return "fault" where something fails the audit, "near-ties only" where only these stand out, "not exercised" where
    equality held and a planted fault that applies to the target could not show, else "exact"."""
    if failures(report):
        return "fault"
    if report["divergences"] or report["generate"]["divergences"]:
        return "near-ties only"
    open_ = [row for row in report["faults"] if row["caught"] is None and row["applies"]]
    return "not exercised" if open_ else "exact"


def lines(report: dict[str, Any]) -> list[str]:
    """Say a report in lines of text: counts, divergences with the text around them, controls, and what to do."""
    said = [
        f"{arm}: {count['identical']} of {count['of']} identical to greedy" for arm, count in report["arms"].items()
    ]
    for arm, count in report["generate"]["arms"].items():
        name = "the oracle" if arm == "ar" else arm
        said.append(f"{name}: {count['identical']} of {count['of']} identical to transformers' own generate")
    oracle = report["oracle"]
    said.append(f"the oracle's texts: {oracle['decoded']} decoded here, {oracle['shared']} known from the run's folder")
    for row in (*report["divergences"], *report["generate"]["divergences"]):
        place = f"{row['arm']} {row['task']}/{row['prompt']} at token {row['index']}"
        said.append(f"  {row['kind']}: {place}, margin {row['margin']:.3g}")
        said.append(f"    oracle {row['greedy_text']!r}, {row['arm']} {row['other_text']!r}")
    words = {True: "as it must", False: "NOT AS IT MUST"}
    for row in report["faults"]:
        if row["caught"] is None:
            word = "not exercised" if row["applies"] else "does not apply"
            said.append(f"planted: {row['fault']}: {word}: {row['why']}")
        else:
            said.append(f"planted: {row['fault']}: {words[row['caught']]} ({row['diverged']} differ)")
    said += [f"failed: {reason}" for reason in failures(report)]
    if report["verdict"] == "not exercised":
        said.append("every output was equal, but some checks of the audit itself were not exercised (see above)")
    return [*said, f"verdict: {report['verdict']}"]


def choose_low(device: torch.device | str, n: int) -> tuple[str, int, str]:
    """Choose the low precision to audit on a device: bfloat16, float16 where only that is fast, or few prompts.

    Returns:
        dtype, prompts per task, and a line that says why.
    """
    kind = torch.device(device).type
    if is_fast(torch.bfloat16, device):
        return "bfloat16", n, f"bfloat16 is fast on this {kind}: {n} prompts per task"
    if is_fast(torch.float16, device):
        return "float16", n, f"bfloat16 is slow on this {kind} and float16 is fast: float16, {n} prompts per task"
    few = min(n, SLOW_N)
    return "bfloat16", few, f"bfloat16 is slow on this {kind}: {few} of {n} prompts per task"


def _task_line(pair: Pair, prompt: Prompt, rows: Sequence[dict[str, Any]], of: int) -> str:
    equal = [same for row in rows for same in row["arms"].values()]
    return f"{pair.dtype} {prompt.task:8s} {len(rows)}/{of} prompts, identical {sum(equal)}/{len(equal)}"


def _tally(equal: Iterable[bool]) -> dict[str, int]:
    found = list(equal)
    return {"identical": sum(found), "of": len(found)}


def row_invariance(pair: Pair, plan: Plan, prompt: Prompt) -> list[dict[str, Any]]:
    """Compare one row alone with the same row packed with others, masked and not: bitwise equal, or how far off."""
    ids, positions = prepare(pair, prompt, plan)
    root = greedy_generate(pair.target, ids, 1, positions=positions)[0, -1].item()
    table = []
    alone = None
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
