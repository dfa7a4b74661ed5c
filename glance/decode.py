"""Lossless speculative decoding: one round in five numbered steps, the loop around it, and the oracle that checks it.

    drafter.draft(committed token, fused states)          1 draft   one pass of the head
    drafter.grow(marginals)          -> CandidateTree     2 tree    best-first, no further pass
    target.verify(root + tree)       -> logits            3 verify  one pass of the target
    walk(tree, the target's choices) -> path, bonus       4 walk
    target.keep(path)                -> fused states      5 commit

With temperature 0 the target chooses the plain argmax. With temperature > 0 it draws one token per row from its own
conditional, and the walk follows the draws: the tree decides what is reused, never what is drawn. How tokens, rounds and
time are counted stands in `glance.session`.

Shapes: P prompt tokens, n output tokens, N nodes, V vocabulary.
"""

import warnings
from collections.abc import Iterable
from math import isfinite, nan
from operator import index
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from glance.drafters import Drafter
from glance.drafters.auto import AutoDrafter
from glance.drafters.block import BlockDrafter
from glance.records import Round, Stats
from glance.session import Choice, Clock, Entropies, Settings, Stream, ended, fetch, generation_rules, settings_of
from glance.target import Positions, StreamPositions, Target, check_decodable, check_mask, check_verifiable
from glance.tree import ROOT, CandidateTree
from glance.verify import state_of

WithStats = tuple[Tensor, Stats]  # what `return_stats=True` returns


@overload
def generate(
    head: Any,
    target: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int = 256,
    *,
    return_stats: Literal[True],
    **more: Any,
) -> WithStats: ...
@overload
def generate(head: Any, target: nn.Module, input_ids: Tensor, max_new_tokens: int = 256, **more: Any) -> Tensor: ...
def generate(
    head: Any,
    target: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int = 256,
    *,
    budget: int | str = 63,
    branch_k: int = 8,
    extend_budget: int = 0,
    positions: Positions | None = None,
    return_stats: bool = False,
    **settings: Any,
) -> Tensor | WithStats:
    """Decode with a block head and a wide tree: the target's own text, in fewer passes of the target.

    Args:
        head: a block head, see `glance.head`.
        target: a transformers model with full attention.
        input_ids: (1, P) or (P,).
        budget, branch_k, extend_budget: see `BlockDrafter`; budget="auto" takes in each round the number of nodes that
            pays for itself, see `glance.drafters.width`.
        positions: how the prompt enters the target; default plain positions, `VisionPositions` for images.
        return_stats: also return `Stats`.
        settings: the fields of `Settings`: stop_token_ids, temperature, top_p, top_k, generator, timing, on_round, streamer,
            compile. An `attention_mask` of ones is accepted too, so that a tokenizer's output can be passed whole.

    Returns:
        ids (1, P + n), prompt included as in transformers' `generate`; with `return_stats`, `(ids, Stats)`.

    Raises:
        ValueError: a batch, an empty prompt, settings out of range, a head that does not fit, a target that cannot be
            verified as a tree, placeholders without pixels, or non-finite logits.
    """
    with ended(settings.get("streamer")):
        if isinstance(budget, str) and (budget != "auto" or extend_budget):
            raise ValueError(
                f'budget must be a number, or "auto" with extend_budget=0; got {budget!r} and {extend_budget}'
            )
        told = settings_of(max_new_tokens, settings)
        auto = budget == "auto"
        drafter = AutoDrafter(head, branch_k) if auto else BlockDrafter(head, budget, branch_k, extend_budget)
        ids, stats = _decode(drafter, target, input_ids, told, positions)
    return (ids, stats) if return_stats else ids


@overload
def chain_generate(
    head: Any,
    target: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int = 256,
    *,
    return_stats: Literal[True],
    **more: Any,
) -> WithStats: ...
@overload
def chain_generate(
    head: Any, target: nn.Module, input_ids: Tensor, max_new_tokens: int = 256, **more: Any
) -> Tensor: ...
def chain_generate(
    head: Any,
    target: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int = 256,
    *,
    positions: Positions | None = None,
    return_stats: bool = False,
    **settings: Any,
) -> Tensor | WithStats:
    """Decode with the same head as a width-1 chain: its most probable token at every offset. Arguments as `generate`."""
    with ended(settings.get("streamer")):
        told = settings_of(max_new_tokens, settings)
        drafter = BlockDrafter(head, max(0, (getattr(head, "block_size", None) or 1) - 1), branch_k=1)
        ids, stats = _decode(drafter, target, input_ids, told, positions)
    return (ids, stats) if return_stats else ids


def decode(
    drafter: Drafter, model: nn.Module, input_ids: Tensor, settings: Settings, positions: Positions | None = None
) -> tuple[Tensor, Stats]:
    """Run rounds until a stop token or the limit. There is no other loop: whatever proposes trees goes through this one.

    Args:
        drafter: what proposes a tree in each round, see `glance.drafters.Drafter`.
        model: the target, a transformers model with full attention.
        input_ids: (1, P) or (P,).
        settings: see `Settings`.
        positions: how the prompt enters the target; None for plain positions.

    Returns:
        ids (1, P + n), prompt included, and the `Stats` of the decode with a `Round` for each round.

    Raises:
        ValueError: as `generate`.
    """
    with ended(settings.streamer):
        return _decode(drafter, model, input_ids, settings, positions)


@torch.inference_mode()
def _decode(
    drafter: Drafter, model: nn.Module, input_ids: Tensor, settings: Settings, positions: Positions | None
) -> tuple[Tensor, Stats]:
    """Check what was given, then run the loop; whoever calls ends the streamer."""
    input_ids = _checked_prompt(input_ids, model)
    end = input_ids.shape[1] + settings.max_new_tokens
    room = end + drafter.max_nodes + 1
    check_verifiable(model, room=room, chain=drafter.chain)
    check_decodable(model, end)
    rows = drafter.max_nodes + 1 if settings.compile else 0
    positions = positions or StreamPositions()
    with Target(model, positions, drafter.layer_ids, room=room, end=end, rows=rows) as target:
        return _run_rounds(drafter, target, input_ids, settings)


def _run_rounds(drafter: Drafter, target: Target, input_ids: Tensor, settings: Settings) -> tuple[Tensor, Stats]:
    """Prefill, then rounds until the text ends: the loop."""
    choose = Choice(settings)
    entropies = Entropies(settings)
    stats = Stats(timing=settings.timing)
    listeners = [hear for hear in (getattr(drafter, "observe", None), settings.on_round) if hear]
    stops = stop_ids(target.model, settings.stop_token_ids)
    clock = Clock(target.device)
    drafter.begin(target, clock.lap)
    clock.open("legacy")
    logits, fused = target.prefill(input_ids)
    (root,) = choose(logits)
    if not drafter.chain and drafter.max_nodes > 1:
        check_mask(target.model, input_ids)
    stream = Stream(input_ids, root, stops, settings)
    clock.open("decode_only")
    while not stream.finish:
        clock.start_round()
        draft = drafter.draft(root, fused)  # 1 draft
        clock.lap("draft")
        if not stats.rounds:
            clock.open("decode_only")
        tree = drafter.grow(draft)  # 2 tree
        clock.lap("tree")
        logits = target.verify(root, tree)  # 3 verify
        choices = choose(logits)
        clock.lap("verify")
        path, bonus = walk(tree, choices)  # 4 walk
        commit = stream.commit([tree.columns.tokens[node] for node in path], bonus)
        path = path[: commit.accepted]
        fused = target.keep(path)  # 5 commit
        clock.lap("commit")
        report = Round(
            index=len(stats.rounds),
            start=target.length - commit.accepted - 1,
            root=root,
            tree=tree,
            accepted=commit.accepted,
            path=path,
            bonus=commit.bonus,
            committed=commit.tokens,
            choices=choices,
            entropy=nan,
            truncated=commit.truncated,
            ms=clock.laps,
            offsets=len(draft.top_ids),
            top_ids=draft.top_ids,
            top_logprobs=draft.top_logprobs,
        )
        stats.rounds.append(report)
        entropies.add(report, logits)
        for listener in listeners:
            listener(report)
        root = commit.tokens[-1]
    entropies.fill()
    stats.seconds = clock.close()
    stats.n_rounds = len(stats.rounds)
    stats.n_tokens = len(stream.tokens)
    stats.finish = stream.finish
    return stream.ids(), stats


def walk(tree: CandidateTree, choices: list[int]) -> tuple[list[int], int]:
    """Follow the target's own choices from the root while the tree has them.

    Args:
        tree: N candidates.
        choices: (N+1,) the target's choice after the root, then after each node.

    Returns:
        The path's node indices, and the bonus: the target's choice where it left the tree.
    """
    path: list[int] = []
    at = ROOT
    for node, (parent, token) in enumerate(zip(tree.columns.parents, tree.columns.tokens, strict=True)):
        if parent == at and token == choices[at + 1]:  # children come after their parents
            path.append(node)
            at = node
    return path, choices[at + 1]


@overload
def greedy_generate(
    target: nn.Module, input_ids: Tensor, max_new_tokens: int = 256, *, return_stats: Literal[True], **more: Any
) -> WithStats: ...
@overload
def greedy_generate(target: nn.Module, input_ids: Tensor, max_new_tokens: int = 256, **more: Any) -> Tensor: ...
@torch.inference_mode()
def greedy_generate(
    target: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int = 256,
    *,
    positions: Positions | None = None,
    return_stats: bool = False,
    **settings: Any,
) -> Tensor | WithStats:
    """Decode greedily, one token per pass: the oracle. It shares neither loop, cache, mask nor delta with what it checks.

    Arguments and returns as `generate`; `tau` is 1. Sampling has no oracle: `temperature` is refused.
    """
    with ended(settings.get("streamer")):
        told = settings_of(max_new_tokens, settings)
        if told.temperature:
            raise ValueError(f"the oracle is greedy: temperature must be 0, got {told.temperature}")
        input_ids = _checked_prompt(input_ids, target)
        check_decodable(target, input_ids.shape[1] + max_new_tokens)
        ids, stats = _run_greedy(target, input_ids, positions or StreamPositions(), told)
    return (ids, stats) if return_stats else ids


def _run_greedy(model: nn.Module, input_ids: Tensor, positions: Positions, settings: Settings) -> tuple[Tensor, Stats]:
    """Prefill, then a pass per token."""
    stops = stop_ids(model, settings.stop_token_ids)
    cache = DynamicCache(config=model.config)
    clock = Clock(input_ids.device)
    clock.open("legacy")
    inputs = positions.prefill_inputs(model, input_ids)
    lock = state_of(model).lock  # threads that share a target take turns
    with lock:
        logits = model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **inputs).logits
    stream = Stream(input_ids, _argmax(logits), stops, settings)
    clock.open("decode_only")
    position = inputs["position_ids"].amax(-1, keepdim=True).max() * torch.ones_like(inputs["position_ids"][..., :1])
    while not stream.finish:
        position = position + 1  # on every axis, one past the furthest so far
        step = torch.tensor([stream.tokens[-1:]], device=input_ids.device)
        with lock:
            logits = model(step, position_ids=position, past_key_values=cache, use_cache=True).logits
        stream.commit([], _argmax(logits))
    n = len(stream.tokens)
    return stream.ids(), Stats(n, stream.finish, [], n - 1, settings.timing, clock.close())


def _argmax(logits: Tensor) -> int:
    """Return the last row's argmax of `(1, q, V)`, in one transfer to the host; refuse a row that is not finite."""
    top, token = fetch(*logits[0, -1].float().max(-1))
    if not isfinite(top):
        raise ValueError("the target's logits are not finite (nan or inf): check its weights and dtype")
    return int(token)


def stop_ids(model: nn.Module, stop_token_ids: Any = None) -> frozenset[int]:
    """Return the ids that end a text: those given, or for None the target's own from its `generation_config`."""
    if stop_token_ids is None:
        stop_token_ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if stop_token_ids is None:
        return frozenset()
    if isinstance(stop_token_ids, np.ndarray | np.generic | Tensor):
        stop_token_ids = stop_token_ids.tolist()
    several = stop_token_ids if isinstance(stop_token_ids, Iterable) else [stop_token_ids]
    try:
        return frozenset(map(index, several))
    except (TypeError, ValueError):
        raise ValueError(f"stop_token_ids must be a whole number or several, got {stop_token_ids!r}") from None


def _checked_prompt(input_ids: Any, model: nn.Module) -> Tensor:
    """Return the prompt as `(1, P)` on the target's device, or raise; say once where transformers' greedy would differ."""
    input_ids = torch.as_tensor(input_ids)
    if input_ids.dim() == 1:
        input_ids = input_ids[None]
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids must be one prompt, (1, P) or (P,), got shape {tuple(input_ids.shape)}")
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids is empty: a prompt has at least one token")
    if input_ids.is_floating_point():
        raise ValueError(f"input_ids must be integers, got {input_ids.dtype}")
    rows = model.get_input_embeddings().weight.shape[0]
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= rows:
        raise ValueError(f"input_ids must lie in 0..{rows - 1}, got {int(input_ids.min())}..{int(input_ids.max())}")
    for name, value in generation_rules(model).items():
        warnings.warn(
            f"the target's generation_config has {name}={value}; greedy here is the plain argmax, without it",
            stacklevel=3,
        )
    return input_ids.to(model.get_input_embeddings().weight.device)
