"""Rounds for the tests of views: a known text, drafts that know most of it, and the walk; no model."""

from typing import Any

import numpy as np
from made import made_round, path_along

from glance.records import Round
from glance.tree import build_budget_tree

TEXT = (
    'The| invoice| from| Mü|ller|,| dated| 12| March|:|\n|two| chairs| at| $|40|,| a| <b>|table|</b>| for| "|$|120|"|'
    " and| delivery| &| set|-|up|.| The| total| is| $|215|.|50|.| שלום| 日本|語|\u202e|."
)
TOKENS = TEXT.split("|")
VOCABULARY = sorted(
    {*TOKENS, "", " cat", " of", " with", " receipt", " amount", "'s", " supercalifragilistic", "\ufffd"}
)


def words(token: int) -> str:
    return VOCABULARY[token]


def marginals(ids: list[int], rng: np.random.Generator, n_offsets: int, k: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Draft `ids`: at each offset the true token among k, mostly first, less surely further out."""
    top_ids, top_logprobs = np.zeros((n_offsets, k), int), np.zeros((n_offsets, k))
    entropy = float(rng.gamma(1.5, 0.4))
    for d in range(n_offsets):
        truth = ids[d] if d < len(ids) else 0
        others = [int(i) for i in rng.permutation(len(VOCABULARY)) if i != truth][: k - 1]
        rank = min(k - 1, int(rng.geometric(max(0.35, 0.95 - 0.3 * entropy - 0.03 * d))) - 1)
        top_ids[d] = [*others[:rank], truth, *others[rank:]]
        logits = np.sort(rng.normal(0, 1, k))[::-1] * (2.2 - 0.1 * d) / (0.5 + 0.6 * entropy) + 2 * (np.arange(k) == 0)
        top_logprobs[d] = logits - np.log(np.exp(logits).sum() * 1.05)
    return top_ids, top_logprobs, entropy


def make_rounds(budget: int = 63, n_offsets: int = 11, k: int = 8, seed: int = 0) -> list[Round]:
    """Decode TEXT: every round drafts, walks as far as the tree has the text, and commits the path and one more."""
    rng = np.random.default_rng(seed)
    ids = [VOCABULARY.index(word) for word in TOKENS]
    rounds = []
    at = 0
    while at + 1 < len(ids):
        ahead = ids[at + 1 :]
        top_ids, top_logprobs, entropy = marginals(ahead, rng, n_offsets, k)
        tree = build_budget_tree(top_ids, top_logprobs, budget=budget, branch_k=k)
        choices = rng.integers(len(VOCABULARY), size=len(tree) + 1).tolist()
        path = path_along(tree, ahead)
        for node, choice in zip([-1, *path], ahead, strict=False):
            choices[node + 1] = choice
        made = made_round(
            tree,
            index=len(rounds),
            start=100 + at,
            root=ids[at],
            path=path,
            bonus=ahead[len(path)] if len(path) < len(ahead) else None,
            choices=choices,
            entropy=entropy,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )
        rounds.append(made)
        at += len(made.committed)
    return rounds


def page(*views: Any, dark: bool = False) -> str:
    """Put views on a page, as a notebook would."""
    colors = "background:#111;color:#ddd" if dark else "background:#fff;color:#111"
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    body = "".join(view._repr_html_() for view in views)
    return f'{head}<title>views</title><body style="margin:12px;font:14px sans-serif;{colors}">{body}'
