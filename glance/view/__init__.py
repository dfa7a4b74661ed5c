"""Looking at rounds: trees, masks, streams and whole answers as script-free HTML, and as text where there is no browser.

    pages     the views: tree, mask, marginals, stream, round, decode
    story     a tree as it grows, the walk, the rhythm of answers, things beside each other
    frame     what every view is made of: id, styles, notes
    drawing   one tree on paper: spelling, places, SVG, mask, matplotlib twin

Importing this room gives a `CandidateTree` its looks: the indented text in a terminal, the drawing in a notebook.
"""

from glance.tree import CandidateTree
from glance.view.frame import View
from glance.view.pages import decode, marginals, mask, round, stream, tree, tree_figure, tree_text

__all__ = ["View", "decode", "marginals", "mask", "round", "stream", "tree", "tree_figure", "tree_text"]

CandidateTree.__repr__ = tree_text
CandidateTree._repr_html_ = lambda self: tree(self).html
