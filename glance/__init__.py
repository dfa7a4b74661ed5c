"""GLANCE: lossless speculative decoding for vision-language models, one draft pass per block.

The names below load on first use, so that `import glance`, the tree, the law and the metrics need numpy alone.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm's, in a notebook without widgets: none are needed

_HOME = {
    "CandidateTree": "tree",
    "build_budget_tree": "tree",
    "children_of": "tree",
    "tree_mask": "tree",
    "DraftabilityLaw": "law",
    "generate": "decode",
    "chain_generate": "decode",
    "greedy_generate": "decode",
    "Round": "records",
    "Stats": "records",
    "StreamPositions": "target",
    "VisionPositions": "vl",
    "load_target": "vl",
    "load_block_head": "head",
    "BlockDrafter": "drafters.block",
}
_MODULES = ("tree", "law", "metrics", "view", "decode", "vl", "head")
__all__ = [*_HOME, *_MODULES]

if TYPE_CHECKING:
    from glance import decode, head, law, metrics, tree, view, vl
    from glance.decode import chain_generate, generate, greedy_generate
    from glance.drafters.block import BlockDrafter
    from glance.head import load_block_head
    from glance.law import DraftabilityLaw
    from glance.records import Round, Stats
    from glance.target import StreamPositions
    from glance.tree import CandidateTree, build_budget_tree, children_of, tree_mask
    from glance.vl import VisionPositions, load_target


def __getattr__(name: str) -> Any:
    if name in __all__:
        import_module("glance.view")  # so that trees show as trees
    if name in _HOME:
        value = getattr(import_module(f"glance.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"glance.{name}")
    else:
        raise AttributeError(f"module 'glance' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
