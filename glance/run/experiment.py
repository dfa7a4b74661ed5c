"""The arms over the tasks: what notebooks and commands both call to decode a run, and to sum it up.

On each prompt the arms run back to back, in one process, in an order that rotates from prompt to prompt, so that drift of
the machine falls on all alike. Every arm's ids are compared with `ar`'s on every prompt. Numbers follow `glance.metrics`.

Arms: "ar" the oracle; "chain" the head as a width-1 chain; "tree" at the run's budget; "tree-N" at budget N; "auto" with
trees as wide as pays (`glance.drafters.width`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from glance.decode import chain_generate, generate, greedy_generate
from glance.drafters.block import BlockDrafter
from glance.drafters.costs import time_passes
from glance.files import file_sha256, read_json, sha256, write_json
from glance.head import as_dtype, check_pair, load_block_head
from glance.metrics import LOOP_SHARE, repeated_share
from glance.paths import named
from glance.records import Stats, round_row
from glance.report.summary import number, pooled_tau
from glance.run.fingerprint import files_sha256, processor_sha256, weights_sha256
from glance.run.folder import Run, differences, provenance
from glance.run.progress import Progress
from glance.session import check_unpadded
from glance.target import StreamPositions, Target
from glance.tasks import Prompt, check_prompts, encode, load_tasks, task_names
from glance.tree import build_budget_tree
from glance.vl import VisionPositions, load_target

ARMS = ("ar", "chain", "tree")


@dataclass(frozen=True)
class Plan:
    """What to decode and how: the parameters of a run; refuses what makes no sense before anything loads."""

    data: str
    tasks: tuple[str, ...] = ()  # empty: every task of the data folder
    n: int = 100  # prompts per task, one warm-up more is decoded
    arms: tuple[str, ...] = ARMS
    budget: int = 63
    branch_k: int = 8
    extend_budget: int = 0
    max_new_tokens: int = 128
    max_pixels: int | None = None
    temperature: float = 0.0
    seed: int = 0
    trees: bool = False  # keep each round's tree in rounds.jsonl
    template: Mapping[str, Any] | None = None  # further flags of the chat template

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.arms[:1] != ("ar",):
            raise ValueError(f"arms must begin with ar, which the others are compared with; got {', '.join(self.arms)}")
        for arm in self.arms:
            if arm not in (*ARMS, "auto") and not (arm.startswith("tree-") and arm[5:].isdigit()):
                raise ValueError(f"arm {arm!r} is not known: ar, chain, tree, auto, or tree-N for a budget of N")
        twice = sorted({arm for arm in self.arms if self.arms.count(arm) > 1})
        if twice:
            raise ValueError(f"each arm (and each of sweep_budgets) is decoded once; twice: {', '.join(twice)}")
        for name, least in (("budget", 0), ("branch_k", 1), ("extend_budget", 0), ("max_new_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.max_pixels is not None and self.max_pixels < 1:
            raise ValueError(f"max_pixels must be at least 1, or left out; got {self.max_pixels}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or a positive number, got {self.temperature}")
        if "auto" in self.arms and self.extend_budget:
            raise ValueError(f"the arm auto goes with extend_budget=0, got {self.extend_budget}")
        known = task_names(self.data)
        unknown = [task for task in self.tasks if task not in known]
        if not known:
            raise ValueError(f"{self.data} has no task files (<task>.jsonl): name a folder that has, with --data")
        if unknown:
            raise ValueError(f"{self.data} has no task {', '.join(unknown)}; it has: {', '.join(known)}")

    @property
    def task_list(self) -> tuple[str, ...]:
        """The tasks that are decoded: those named, or all of the data folder."""
        return self.tasks or tuple(task_names(self.data))

    def prompts(self) -> list[Prompt]:
        """Read and check every prompt of the plan: the first of each task is a warm-up."""
        return load_tasks(self.data, self.tasks, self.n)

    def budget_of(self, arm: str) -> int:
        """Return an arm's node budget; 0 for ar and auto, which have none."""
        return int(arm[5:]) if arm.startswith("tree-") else {"ar": 0, "auto": 0}.get(arm, self.budget)


@dataclass(frozen=True)
class Pair:
    """A loaded target, what encodes its prompts, and a head that fits it."""

    target: Any
    processor: Any
    head: Any
    names: Mapping[str, str]

    @property
    def device(self) -> torch.device:
        """The device of the target's embeddings."""
        return self.target.get_input_embeddings().weight.device

    @property
    def dtype(self) -> str:
        """The target's dtype by name."""
        return str(self.target.get_input_embeddings().weight.dtype).removeprefix("torch.")

    @cached_property
    def weights(self) -> dict[str, str]:
        """Fingerprints of the target, the head and the processor: what stands in their places now, whatever the path."""
        return {
            "target": weights_sha256(self.target),
            "head": weights_sha256(self.head),
            "processor": processor_sha256(self.processor),
        }

    @property
    def drafter(self) -> dict[str, Any]:
        """What proposes trees, and the places of its block."""
        head = self.head
        facts = {name: getattr(head, name) for name in ("block_size", "mask_token_id")}
        return {"name": "block", "head": type(head).__name__, **facts, "target_layer_ids": list(head.target_layer_ids)}


def load_pair(
    target: str, head: str, *, dtype: str | None = None, device: str | None = None, attention: str = "sdpa"
) -> Pair:
    """Load target and head, check that they fit, and turn TF32 off so that fp32 means fp32.

    Raises:
        ValueError: an unknown dtype, a folder that is no checkpoint, or a head that does not fit the target.
    """
    precision = as_dtype(dtype)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model, processor = load_target(target, dtype=precision, device=device, attn_implementation=attention)
    block_head = load_block_head(head, dtype=precision, device=device)
    check_pair(block_head, model)
    return Pair(model, processor, block_head, {"target": named(target), "head": named(head)})


def prepare(pair: Pair, prompt: Prompt, plan: Plan) -> tuple[torch.Tensor, Any]:
    """Encode a prompt for the pair's target: ids `(1, P)` on its device, and the position adapter for its images."""
    inputs = encode(pair.processor, prompt, max_pixels=plan.max_pixels, template=plan.template)
    check_unpadded(inputs)
    sees = any(name.startswith("pixel_values") for name in inputs)
    positions = VisionPositions.from_inputs(inputs) if sees else StreamPositions()
    return inputs["input_ids"].to(pair.device), positions


def decode_arm(arm: str, pair: Pair, ids: torch.Tensor, positions: Any, plan: Plan) -> tuple[list[int], Stats]:
    """Decode one prompt by one arm; return the new ids and the stats."""
    settings: dict[str, Any] = {"positions": positions, "return_stats": True}
    if arm == "ar":
        out, stats = greedy_generate(pair.target, ids, plan.max_new_tokens, **settings)
    else:
        if plan.temperature:
            generator = torch.Generator(pair.device).manual_seed(plan.seed)
            settings |= {"temperature": plan.temperature, "generator": generator}
        if arm == "chain":
            out, stats = chain_generate(pair.head, pair.target, ids, plan.max_new_tokens, **settings)
        else:
            budget = "auto" if arm == "auto" else plan.budget_of(arm)
            settings |= {"branch_k": plan.branch_k, "extend_budget": plan.extend_budget}
            out, stats = generate(pair.head, pair.target, ids, plan.max_new_tokens, budget=budget, **settings)
    return out[0, ids.shape[1] :].tolist(), stats


def decode_tasks(
    pair: Pair,
    plan: Plan,
    folder: str | Path,
    *,
    say: Callable = print,
    after_task: Callable | None = None,
    stage: str = "decode",
) -> Run:
    """Decode every prompt of the plan by every arm into a run folder; picks up where an earlier call stopped.

    Rows are on disk prompt by prompt; a kill loses the prompt in hand. Says one line per task, calls `after_task` with
    its prompts, and shows how far it is under the name `stage`.

    Raises:
        ValueError: a bad task file (before any decoding), or a folder that holds another run or that another process
            writes to.
    """
    prompts = plan.prompts()
    check_prompts(pair.processor, prompts)
    BlockDrafter(pair.head, plan.budget, plan.branch_k, plan.extend_budget)  # refuses a head that is none
    check_pair(pair.head, pair.target)
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    with Run(folder, run_provenance(pair, plan, prompts)) as run:
        finished = sum(not _missing(plan, run, prompt) for prompt in prompts)
        progress = Progress(stage, len(prompts), finished)
        for task, rows in by_task.items():
            began = perf_counter()
            for prompt in rows:
                if _missing(plan, run, prompt):
                    _decode_prompt(pair, plan, run, prompt)
                    progress.step()
            say(_task_line(run, plan, task, perf_counter() - began))
            if after_task:
                after_task(rows)
        progress.close()
    return run


def _missing(plan: Plan, run: Run, prompt: Prompt) -> list[str]:
    """List the arms that a prompt still lacks."""
    return [arm for arm in plan.arms if (arm, prompt.task, prompt.index) not in run.done]


def _decode_prompt(pair: Pair, plan: Plan, run: Run, prompt: Prompt) -> None:
    """Decode one prompt by the arms that the run lacks, and write their rows together."""
    place = (prompt.task, prompt.index)
    missing = _missing(plan, run, prompt)
    turn = prompt.index % len(missing)
    ids, positions = prepare(pair, prompt, plan)
    decoded = {arm: decode_arm(arm, pair, ids, positions, plan) for arm in missing[turn:] + missing[:turn]}
    greedy = sha256(decoded["ar"][0]) if "ar" in decoded else run.done["ar", *place]["sha256"]
    for arm in missing:
        tokens, stats = decoded[arm]
        text = pair.processor.decode(tokens, skip_special_tokens=True)
        repeats = repeated_share(tokens)
        keys = {"arm": arm, "task": prompt.task, "prompt": prompt.index, "warmup": prompt.index == 0}
        keys["looped"] = repeats >= LOOP_SHARE
        row = keys | {
            "prompt_tokens": ids.shape[1],
            "n_tokens": stats.n_tokens,
            "rounds": stats.n_rounds,
            "tau": stats.tau,
            "ms_per_token": stats.ms_by("decode_only"),
            "ms_per_token_legacy": stats.ms_by("legacy"),
            "budget": plan.budget_of(arm),
            "tree_size": float(np.mean([len(report.tree) for report in stats.rounds])) if stats.rounds else 0.0,
            "finish": stats.finish,
            "repeats": repeats,
            "matches_ar": sha256(tokens) == greedy,
            "text": text,
            "sha256": sha256(tokens),
            "device": pair.device.type,
            "dtype": pair.dtype,
        }
        run.add(row, [round_row(report, **keys, trees=plan.trees) for report in stats.rounds])


def reuse(path: str | Path, pair: Pair, plan: Plan, make: Any, **settings: Any) -> dict[str, Any]:
    """Return the report at `path` if this plan on this pair wrote it, so that a pipeline resumes; else make and write it.

    `settings` are further parameters that the report depends on.
    """
    path = Path(path)
    now = run_provenance(pair, plan)
    now["parameters"] |= settings
    if path.is_file():
        report = read_json(path)
        if not differences(report.get("provenance", {}), now):
            return report
    report = {**make(), "provenance": now}
    write_json(path, report)
    return report


def run_provenance(pair: Pair, plan: Plan, prompts: Sequence[Prompt] | None = None) -> dict[str, Any]:
    """Say what a run of this plan on this pair is; `prompts` are the plan's, where they are read already."""
    data = Path(plan.data)
    gpu = torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else None
    images: dict[str, list[Path]] = {}
    for prompt in plan.prompts() if prompts is None else prompts:
        video = prompt.video or ()
        frames = video if isinstance(video, tuple) else (video,)
        images.setdefault(prompt.task, []).extend((*prompt.images, *frames))
    return provenance(
        asdict(plan) | {"data": named(data), **pair.names},
        device=pair.device.type,
        gpu=gpu,
        dtype=pair.dtype,
        threads=torch.get_num_threads(),
        attention=pair.target.config.get_text_config()._attn_implementation,
        data={f"{task}.jsonl": file_sha256(data / f"{task}.jsonl") for task in plan.tasks or task_names(data)},
        images={task: files_sha256(paths) for task, paths in images.items()},
        weights=pair.weights,
        drafter=pair.drafter,
    )


def _task_line(run: Run, plan: Plan, task: str, seconds: float) -> str:
    """Sum up a decoded task in one line of text."""
    rows = [row for (_, of, _), row in run.done.items() if of == task and not row["warmup"]]
    parts = []
    for arm in plan.arms:
        mine = [row for row in rows if row["arm"] == arm]
        tokens = sum(row["n_tokens"] for row in mine)
        ms = sum(row["ms_per_token"] * row["n_tokens"] for row in mine) / tokens
        parts.append(f"{arm} tau {number(pooled_tau(mine))} {ms:.2f} ms")
    same = sum(row["matches_ar"] for row in rows)
    return f"{task:8s} n={len(mine)}  {'  '.join(parts)}  identical {same}/{len(rows)}  {seconds:.0f} s"


@torch.inference_mode()
def measure_costs(pair: Pair, prompt: Prompt, plan: Plan, budgets: Sequence[int], repeats: int = 9) -> dict[str, Any]:
    """Time passes behind a prompt, apart from any decode: a greedy step, a draft, and a verify pass of up to N + 1 rows per
    budget.

    Medians over repeats; the greedy step is the mean of an oracle's decode, a draft reads half a block of new states; see
    also `time_passes`. They bound the speedup over the oracle: tau * c_ar / (c_draft + c_verify(N)).

    Returns:
        The prompt's length `prefix`, `ar_ms`, `draft_ms`, and in `verify` `nodes` and `ms` per budget.
    """
    if not budgets:
        raise ValueError("budgets is empty: name at least one to time")
    ids, positions = prepare(pair, prompt, plan)
    drafter = BlockDrafter(pair.head, max(budgets), plan.branch_k)
    with Target(pair.target, positions, drafter.layer_ids, room=ids.shape[1] + drafter.max_nodes + 1) as target:
        logits, fused = target.prefill(ids)
        root = int(logits.argmax())
        drafter.begin(target, lambda name: None)
        draft = drafter.draft(root, fused)
        trees = [
            build_budget_tree(draft.top_ids, draft.top_logprobs, budget=n, branch_k=plan.branch_k) for n in budgets
        ]
        new = fused[:, -(pair.head.block_size // 2) :]
        _, draft_ms, verify_ms = time_passes(drafter, target, root, trees, repeats, new)
    _, stats = greedy_generate(pair.target, ids, 4 * repeats, positions=positions, stop_token_ids=(), return_stats=True)
    ar_ms = 1e3 * stats.seconds["decode_only"] / (stats.n_tokens - 1)
    # budget 0 never drafts: its pass is the greedy step
    verify = [{"nodes": n, "ms": ms if n else ar_ms} for n, ms in zip(budgets, verify_ms, strict=True)]
    return {"prefix": ids.shape[1], "ar_ms": ar_ms, "draft_ms": draft_ms, "verify": verify}


def mean_costs(costs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Average what `measure_costs` found at several prompts, number by number."""
    means = {key: float(np.mean([cost[key] for cost in costs])) for key in ("prefix", "ar_ms", "draft_ms")}
    passes = zip(*(cost["verify"] for cost in costs), strict=True)
    verify = [{"nodes": of[0]["nodes"], "ms": float(np.mean([entry["ms"] for entry in of]))} for of in passes]
    return means | {"verify": verify}
