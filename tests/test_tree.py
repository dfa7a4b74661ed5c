"""The candidate tree against brute force over every prefix, and its mask, paths and grafts against their definitions."""

from heapq import nlargest
from itertools import product
from math import exp, inf, isclose, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glance.tree import (
    CandidateTree,
    Node,
    ancestor_matrix,
    as_tree,
    build_budget_tree,
    children_of,
    make_tree,
    tree_mask,
)

# Log-probabilities on a coarse grid (sums are exact, so that ties are ties) with absent candidates among them.
COARSE = st.sampled_from([0.0, -0.25, -0.5, -1.0, -1.5, -3.0, -inf])


@st.composite
def marginals(draw, sort=True, values=COARSE):
    """Draw (ids, logps) of a block of 0..4 offsets and 1..4 candidates; tokens of an offset differ."""
    n_offsets, width = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    logps = [draw(st.lists(values, min_size=width, max_size=width)) for _ in range(n_offsets)]
    ids = [draw(st.permutations(range(10)))[:width] for _ in range(n_offsets)]
    return ids, [sorted(row, reverse=True) for row in logps] if sort else logps


def all_prefixes(logps, branch_k):
    """List every path of ranks with a finite log-probability, as {ranks: log-probability}."""
    found = {}
    for depth in range(1, len(logps) + 1):
        for ranks in product(range(min(branch_k, len(logps[0]))), repeat=depth):
            total = sum(logps[d][r] for d, r in enumerate(ranks))
            if total > -inf:
                found[ranks] = total
    return found


def ranks_of(tree, node):
    return tuple(int(tree.ranks[i]) for i in tree.path(node))


budgets = st.integers(0, 40)
branches = st.integers(0, 6)


@given(marginals(), budgets, branches)
def test_the_tree_is_the_budget_best_paths(block, budget, branch_k):
    ids, logps = block
    tree = build_budget_tree(ids, logps, budget=budget, branch_k=branch_k)
    every = all_prefixes(logps, branch_k)
    assert len(tree) == min(budget, len(every))
    chosen = [ranks_of(tree, i) for i in range(len(tree))]
    assert len(set(chosen)) == len(chosen)
    for i, ranks in enumerate(chosen):
        assert isclose(tree[i].logp, every[ranks], abs_tol=1e-9)
        assert tree[i].token == ids[len(ranks) - 1][ranks[-1]] and tree[i].depth == len(ranks)
    best = nlargest(budget, every.values())
    assert np.allclose(sorted((node.logp for node in tree), reverse=True), best)
    assert isclose(sum(map(exp, best)), sum(exp(node.logp) for node in tree), abs_tol=1e-9)


@given(marginals(), budgets, branches)
def test_parents_come_first_and_order_is_as_stated(block, budget, branch_k):
    tree = build_budget_tree(*block, budget=budget, branch_k=branch_k)
    for i, node in enumerate(tree):
        assert -1 <= node.parent < i
        assert node.depth == 1 + (tree[node.parent].depth if node.parent >= 0 else 0)
    keys = [(-node.logp, node.depth, node.parent, node.rank) for node in tree]
    assert keys == sorted(keys)
    assert tree == build_budget_tree(*block, budget=budget, branch_k=branch_k)


@given(marginals(), budgets, branches)
def test_a_smaller_budget_is_a_prefix(block, budget, branch_k):
    whole = build_budget_tree(*block, budget=40, branch_k=branch_k)
    assert list(build_budget_tree(*block, budget=budget, branch_k=branch_k)) == list(whole)[:budget]


@given(marginals(values=st.floats(-8, 0)), budgets)
def test_the_order_among_random_probabilities(block, budget):
    ids, logps = block
    tree = build_budget_tree(ids, logps, budget=budget, branch_k=4)
    best = nlargest(budget, all_prefixes(logps, 4).values())
    assert np.allclose([node.logp for node in tree], best)


@given(marginals(sort=False, values=st.floats(-8, 0)), budgets, st.integers(1, 4))
def test_unsorted_marginals_are_sorted_first(block, budget, branch_k):
    ids, logps = block
    order = [sorted(range(len(row)), key=lambda i, row=row: -row[i]) for row in logps]
    tidy_ids = [[row[i] for i in o] for row, o in zip(ids, order, strict=True)]
    tidy = [[row[i] for i in o] for row, o in zip(logps, order, strict=True)]
    tree = build_budget_tree(ids, logps, budget=budget, branch_k=branch_k)
    assert tree == build_budget_tree(tidy_ids, tidy, budget=budget, branch_k=branch_k)


@given(marginals(), budgets, st.integers(0, 5))
def test_a_mask_row_is_the_nodes_path(block, budget, prefix):
    tree = build_budget_tree(*block, budget=budget, branch_k=4)
    visible, mask = ancestor_matrix(tree), tree_mask(tree, prefix=prefix)
    assert mask.shape == (len(tree) + 1, prefix + len(tree) + 1) and mask.dtype == np.float32
    assert set(np.unique(mask)) <= {0.0, -inf}
    for node in range(-1, len(tree)):
        row = {0, *(i + 1 for i in tree.path(node))}
        assert set(np.flatnonzero(visible[node + 1])) == row
        assert set(np.flatnonzero(mask[node + 1] == 0)) == {*range(prefix), *(prefix + i for i in row)}


@given(marginals(), budgets)
def test_children_are_who_names_the_parent(block, budget):
    tree = build_budget_tree(*block, budget=budget, branch_k=4)
    children = children_of(tree)
    assert sum(len(of) for of in children.values()) == len(tree)
    for i, node in enumerate(tree):
        assert children[node.parent][node.token] == i


@given(marginals(), budgets, st.integers(1, 4))
def test_the_spine_follows_rank_zero(block, budget, branch_k):
    tree = build_budget_tree(*block, budget=budget, branch_k=branch_k)
    spine = tree.spine()
    assert all(node.rank == 0 for node in map(tree.__getitem__, spine))
    assert tree.path(spine[-1] if spine else -1) == spine
    end = spine[-1] if spine else -1
    assert not any(node.parent == end and node.rank == 0 for node in tree)
    if branch_k == 1:
        assert spine == list(range(len(tree)))


@given(marginals(), marginals(), budgets, st.data())
def test_a_graft_hangs_a_tree_below_a_node(block, other, budget, data):
    tree = build_budget_tree(*block, budget=budget, branch_k=3)
    limb = build_budget_tree(*other, budget=6, branch_k=2)
    leaf = data.draw(st.integers(-1, len(tree) - 1))
    whole = tree.graft(leaf, limb)
    assert list(whole)[: len(tree)] == list(tree) and len(whole) == len(tree) + len(limb)
    for i, node in enumerate(limb):
        grown = whole[len(tree) + i]
        above = tree.path(leaf)
        assert whole.path(len(tree) + i) == above + [len(tree) + j for j in limb.path(i)]
        assert grown.depth == node.depth + len(above) and grown.token == node.token
        assert isclose(grown.logp, node.logp + (tree[leaf].logp if leaf >= 0 else 0.0), abs_tol=1e-9)


IDS, LOGPS = [[5, 6], [7, 8]], [[-0.1, -2.5], [-0.2, -1.0]]


@pytest.mark.parametrize("budget, branch_k, size", [(0, 8, 0), (1, 8, 1), (5, 0, 0), (9, 1, 2), (9, 8, 6), (3, 2, 3)])
def test_sizes_at_the_edges(budget, branch_k, size):
    tree = build_budget_tree(IDS, LOGPS, budget=budget, branch_k=branch_k)
    assert len(tree) == size
    assert ancestor_matrix(tree).shape == (size + 1, size + 1)
    assert len(children_of(tree)) == len(set(tree.parents.tolist()))


@pytest.mark.parametrize("empty", [[], np.empty((0, 4)), np.empty((3, 0)), [[]]])
def test_a_block_of_one_or_no_candidates_gives_no_nodes(empty):
    assert len(build_budget_tree(empty, empty, budget=7)) == 0


def test_an_offset_that_is_absent_ends_the_tree():
    tree = build_budget_tree([[1, 2], [3, 4], [5, 6]], [[0.0, -1.0], [-inf, -inf], [0.0, 0.0]], budget=9)
    assert [(node.token, node.depth) for node in tree] == [(1, 1), (2, 1)]
    assert len(build_budget_tree([[1]], [[-inf]], budget=9)) == 0


def test_ties_go_to_smaller_depth_then_parent_then_rank():
    half = log(0.5)
    tree = build_budget_tree([[0, 1], [2, 3], [4, 5]], [[half, half], [0.0, 0.0], [0.0, 0.0]], budget=14)
    assert [(n.depth, n.parent, n.rank) for n in tree] == sorted((n.depth, n.parent, n.rank) for n in tree)
    assert len(tree) == 14


def test_numpy_torch_and_lists_are_the_same_input():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    trees = [
        build_budget_tree(IDS, LOGPS, budget=5),
        build_budget_tree(np.array(IDS), np.array(LOGPS), budget=5),
        build_budget_tree(torch.tensor(IDS), torch.tensor(LOGPS, dtype=torch.float64), budget=5),
    ]
    assert trees[0] == trees[1] == trees[2]
    assert all(type(value) in (int, float) for value in trees[2][0])


def test_columns_may_be_arrays_and_become_plain_numbers():
    tree = build_budget_tree(IDS, LOGPS, budget=5)
    other = CandidateTree(tree.tokens, tree.parents, tree.depths, tree.ranks, tree.logps)
    assert other == tree == CandidateTree(*tree.columns) and tree.first(2) == CandidateTree(
        *zip(*tree[:2], strict=True)
    )
    assert {type(value) for column in other.columns for value in column} == {int, float}


def test_a_tree_is_a_sequence_of_nodes():
    tree = build_budget_tree(IDS, LOGPS, budget=5)
    assert tree[0] == Node(5, -1, 1, 0, -0.1) and tree[-1] == list(tree)[-1] and tree[1:3] == list(tree)[1:3]
    assert as_tree(tree) is tree and as_tree(list(tree)) == tree and len(as_tree([])) == 0
    assert children_of(list(tree)) == children_of(tree)
    assert isinstance(make_tree([1], [-1], [1], [0], [0.0]), CandidateTree)
    with pytest.raises(IndexError):
        tree[5]


@pytest.mark.parametrize(
    "ids, logps, settings, told",
    [
        (IDS, LOGPS, {"budget": -1}, "budget=-1"),
        (IDS, LOGPS, {"budget": 1, "branch_k": -2}, "branch_k=-2"),
        (IDS, [[0.0, -1.0]], {"budget": 1}, r"\(2, 2\) and \(1, 2\)"),
        ([1, 2], [0.0, 0.0], {"budget": 1}, "shape"),
        (IDS, [[0.0, np.nan], [0.0, -1.0]], {"budget": 1}, "1 NaN"),
    ],
)
def test_bad_marginals_are_refused(ids, logps, settings, told):
    with pytest.raises(ValueError, match=told):
        build_budget_tree(ids, logps, **settings)
