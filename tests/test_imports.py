"""`import glance`, the tree, the law and the metrics need numpy alone."""

import subprocess
import sys
import textwrap

import pytest

import glance

BLOCKED = ("torch", "transformers", "scipy", "pandas", "dflash", "matplotlib", "seaborn", "PIL", "safetensors")
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + textwrap.dedent(code)], capture_output=True, text=True, timeout=3600
    )


def test_the_blocker_blocks():
    assert "torch is blocked" in run("import torch").stderr


def test_numpy_alone_suffices():
    done = run(
        """
        import glance, glance.tree, glance.law, glance.metrics, glance.view
        from glance.tree import build_budget_tree, children_of
        tree = build_budget_tree([[1, 2], [3, 4]], [[-0.1, -2.0], [-0.2, -1.0]], budget=4)
        assert glance.tree_mask(tree).shape == (5, 5) and children_of(tree)[-1] == {1: 0, 2: 3}
        assert repr(tree) and glance.build_budget_tree is build_budget_tree
        import numpy as np
        rng = np.random.default_rng(0)
        entropy = rng.uniform(0, 2, 400)
        law = glance.DraftabilityLaw.fit(entropy, rng.geometric(1 - 1 / (1 + np.exp(entropy - 1))) - 1)
        assert law.expected(0.0) > law.expected(1.0)
        assert abs(glance.metrics.geomean([1.0, 4.0]) - 2.0) < 1e-12
        assert not {"torch", "transformers", "scipy", "pandas"} & set(sys.modules)
        print("done")
        """
    )
    assert done.stdout == "done\n", done.stderr


def test_what_needs_torch_says_so():
    assert "torch is blocked" in run("import glance; glance.generate").stderr


def test_every_public_name_is_there():
    for name in glance.__all__:
        assert getattr(glance, name) is not None and name in dir(glance)
    with pytest.raises(AttributeError, match=r"no attribute 'speculate'; it has .*generate"):
        glance.speculate  # noqa: B018
