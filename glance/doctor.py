"""`glance doctor`: is this machine ready, is the decoder exact here, and why might a head accept little?

Three parts, each a list of findings: versions against the verified pins and the device; a self-test of a few seconds on a
tiny random target (exactness over budgets, the mask of two branches against each branch alone); and, for a target and head,
the known causes of low acceptance, checked one by one (layers, template, positions, pair).
"""

import argparse
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from glance.paths import POCKET

VERIFIED = {"torch": "2.13.0", "transformers": "5.15.0", "dflash": "0.1.0"}
LOW_TAU = 1.5


class Finding(NamedTuple):
    """One thing looked at: "ok", "warn" or "fail", what it is, and what was seen or would be right."""

    level: str
    what: str
    detail: str


def check_versions() -> Iterator[Finding]:
    """Compare installed versions with the verified pins; name the device."""
    for name, pin in VERIFIED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding("fail", name, f"not installed; verified with {pin}")
            continue
        same = found.split("+")[0] == pin
        other = f"{found}; verified with {pin}"
        if name == "transformers":
            other += " (releases differ in image positions and cache rules: run an audit before you trust it)"
        yield Finding("ok" if same else "warn", name, found if same else other)
    kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    name = torch.cuda.get_device_name() if kind == "cuda" else f"{torch.get_num_threads()} threads"
    yield Finding("ok", "device", f"{kind} ({name})")


def check_exactness(seed: int = 0) -> Iterator[Finding]:
    """Decode on a tiny random target over budgets and compare with the oracle; compare two branches with each alone."""
    from glance.decode import decode, generate, greedy_generate
    from glance.drafters.block import BlockDrafter
    from glance.session import Settings

    target, head = tiny_pair(seed)
    ids = torch.randint(90, (1, 24), generator=torch.Generator().manual_seed(seed))
    gap = two_branch_gap(target, ids)
    kept = "ok" if gap < 1e-3 else "fail"
    yield Finding(kept, "tree mask", f"two branches against each alone: logits within {gap:.1e}")
    if kept == "fail":
        return  # a decode refuses such a target
    greedy = greedy_generate(target, ids, 32, stop_token_ids=())
    wrong = [
        (budget, branch)
        for budget in (0, 1, 7, 31)
        for branch in (1, 4)
        if not torch.equal(generate(head, target, ids, 32, budget=budget, branch_k=branch, stop_token_ids=()), greedy)
    ]
    yield Finding(
        "fail" if wrong else "ok", "exactness", f"budget, branch {wrong} differ" if wrong else "8 of 8 settings"
    )
    _, stats = decode(BlockDrafter(head, 7), target, ids, Settings(8, stop_token_ids=()))
    yield Finding("ok", "rounds", f"{stats.n_rounds} rounds for {stats.n_tokens} tokens")


@torch.inference_mode()
def two_branch_gap(target: Any, ids: torch.Tensor) -> float:
    """Return the largest difference of logits between two branches verified together and each verified alone."""
    from glance.target import StreamPositions, Target
    from glance.tree import make_tree

    both = make_tree([3, 5, 7, 11], [-1, -1, 0, 1], [1, 1, 2, 2], [0, 1, 0, 0], [-1.0] * 4)
    branches = {(0, 2): make_tree([3, 7], [-1, 0], [1, 2], [0, 0], [-1.0] * 2)}
    branches[1, 3] = make_tree([5, 11], [-1, 0], [1, 2], [0, 0], [-1.0] * 2)
    with Target(target, StreamPositions()) as run:
        run.prefill(ids)
        together = run.verify(1, both)
        run.cache.truncate(run.length)
        gap = 0.0
        for nodes, tree in branches.items():
            alone = run.verify(1, tree)
            run.cache.truncate(run.length)
            gap = max(gap, float((together[[0, *(i + 1 for i in nodes)]] - alone).abs().max()))
    return gap


def tiny_pair(seed: int = 0) -> tuple[Any, Any]:
    """Build a random text target and a random block head for it, a few thousand parameters each."""
    from dflash import DFlashDraftModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
    config = Qwen3Config(**shape, num_hidden_layers=2)
    config.num_target_layers = 4
    config.block_size = 8
    config.dflash_config = {"mask_token_id": 96, "target_layer_ids": [0, 2], "block_size": 8}
    target = Qwen3ForCausalLM(Qwen3Config(**shape, num_hidden_layers=4)).eval().requires_grad_(False)
    return target, DFlashDraftModel(config).eval().requires_grad_(False)


def check_pair_acceptance(pair: Any, plan: Any, prompts: list[Any]) -> Iterator[Finding]:
    """Decode a few prompts and look at the known causes of low acceptance, one by one."""
    from glance.report.summary import number
    from glance.run.experiment import decode_arm, prepare

    taus: dict[bool, list[float]] = {True: [], False: []}
    for prompt in prompts:
        ids, positions = prepare(pair, prompt, plan)
        greedy, _ = decode_arm("ar", pair, ids, positions, plan)
        text, stats = decode_arm("tree", pair, ids, positions, plan)
        if stats.n_rounds:
            taus[bool(prompt.images)].append(stats.tau)
        if text != greedy:
            yield Finding(
                "fail", "exactness", f"{prompt.task} line {prompt.index + 1}: the tree's text is not greedy's"
            )
    seen = [tau for side in taus.values() for tau in side]
    tau = sum(seen) / len(seen) if seen else float("nan")
    yield Finding("warn" if tau < LOW_TAU else "ok", "tau", f"{number(tau)} over {len(seen)} prompts")
    with_image, without = (sum(side) / len(side) if side else None for side in (taus[True], taus[False]))
    if with_image is not None and without is not None and with_image < 0.5 * without:
        yield Finding(
            "warn", "positions", f"tau {with_image:.2f} after an image, {without:.2f} without: check M-RoPE delta"
        )
    if tau < LOW_TAU:
        yield from low_acceptance_causes(pair)


def low_acceptance_causes(pair: Any) -> Iterator[Finding]:
    """List what to check when a head accepts little, with what this pair says about it."""
    head = pair.head
    config = getattr(pair.head, "config", None)
    layers = list(head.target_layer_ids)
    yield Finding("warn", "layers", f"the head reads layers {layers}: the ones it was trained on, counted from 0?")
    template = getattr(pair.processor, "chat_template", None)
    yield Finding("warn", "template", f"chat template {'present' if template else 'absent'}: the one of its training?")
    yield Finding("warn", "positions", "the head takes plain stream places, also after images: trained so?")
    trained = getattr(config, "_name_or_path", "") or "unknown"
    yield Finding("warn", "pair", f"head {trained} for target {pair.names['target']}: the same checkpoint and dtype?")


def add_command(commands: Any) -> None:
    """Add `glance doctor` to the commands."""
    parser = commands.add_parser("doctor", help="versions, device, exactness self-test, causes of low acceptance")
    parser.add_argument("--target", help="also look at this target ...")
    parser.add_argument("--head", help="... with this head")
    parser.add_argument("--data", default=str(POCKET / "eval"), help="task files to decode a few prompts of")
    parser.add_argument("--n", type=int, default=2, help="prompts per task")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    findings = [*check_versions(), *check_exactness()]
    target = arguments.target
    head = arguments.head
    if (target is None) != (head is None):
        raise ValueError("--target and --head go together: a head is trained for one target")
    pocket = (POCKET / "target", POCKET / "head")
    if target is None and all((Path(folder) / "config.json").exists() for folder in pocket):
        target, head = map(str, pocket)
    if target is not None:
        from glance.run.experiment import Plan, load_pair
        from glance.tasks import load_tasks

        plan = Plan(arguments.data, n=arguments.n)
        prompts = [prompt for prompt in load_tasks(plan.data, (), plan.n) if prompt.index]
        findings += check_pair_acceptance(load_pair(target, head), plan, prompts)
    for level, what, detail in findings:
        print(f"{level:4s}  {what:12s}  {detail}")
    if any(finding.level == "fail" and finding.what in ("exactness", "tree mask") for finding in findings):
        return 1
    return 2 if any(finding.level == "fail" for finding in findings) else 0
