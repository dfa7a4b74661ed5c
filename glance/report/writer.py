"""The one writer of tables: a pandas frame as markdown, CSV, LaTeX or aligned text; it knows nothing of what they say.

All but `csv` take a frame of texts as they are to be read, its columns named by their headings.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def frame(rows: Iterable[Mapping[str, Any] | Sequence[Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Return rows as a frame of these columns that keeps every value as it is: an integer beside a gap stays one."""
    return pd.DataFrame(list(rows), columns=list(columns), dtype=object)


def markdown(cells: pd.DataFrame, *, right: Collection[str] = ()) -> str:
    """Return a frame as a markdown table, the columns named in `right` set to the right.

    >>> print(markdown(frame([["a|b", "1.00"]], ["task", "tau"]), right=["tau"]), end="")
    | task | tau |
    | --- | ---: |
    | a\\|b | 1.00 |
    """
    rules = ["---:" if head in right else "---" for head in cells.columns]
    rows = [[cell.replace("|", "\\|") for cell in row] for row in _rows(cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [list(cells.columns), rules, *rows])


def csv(values: pd.DataFrame) -> str:
    """Return a frame as CSV, numbers in full, nothing where a value is missing."""
    return values.to_csv(index=False, lineterminator="\n")


def latex(cells: pd.DataFrame, *, caption: str, label: str, n_paper: int = 0) -> str:
    """Return a frame as a LaTeX table for the booktabs package, its last `n_paper` columns under a rule of their own."""
    n = len(cells.columns)
    n_ours = n - n_paper
    spans = f"\\multicolumn{{{n_ours}}}{{c}}{{this run}}"
    rules = f"\\cmidrule(lr){{1-{n_ours}}}"
    if n_paper:
        spans += f" & \\multicolumn{{{n_paper}}}{{c}}{{paper}}"
        rules += f" \\cmidrule(lr){{{n_ours + 1}-{n}}}"
    head, *body = [" & ".join(map(latex_text, row)) + r" \\" for row in [list(cells.columns), *_rows(cells)]]
    lines = [r"\begin{table}", r"\centering\small", f"\\caption{{{latex_text(caption)}}}"]
    lines += [f"\\label{{{label}}}", f"\\begin{{tabular}}{{{'l' * n}}}", r"\toprule"]
    lines += [spans + r" \\", rules, head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def aligned(cells: pd.DataFrame, *, right: Collection[str] = ()) -> str:
    """Return a frame as lines of text with its columns below each other, those named in `right` set to the right.

    >>> print(aligned(frame([["caption", "1.00"], ["all", "12.00"]], ["task", "tau"]), right=["tau"]))
    task       tau
    caption   1.00
    all      12.00
    """
    padded = []
    for head in cells.columns:
        column = pd.Series([head, *cells[head]], dtype=object)
        side = "left" if head in right else "right"  # where the blanks go
        padded.append(column.str.pad(column.str.len().max(), side=side))
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def latex_text(text: str) -> str:
    """Return a text as LaTeX prints it literally, on one line."""
    return "".join(LATEX.get(sign, sign) for sign in " ".join(text.split()))


def _rows(cells: pd.DataFrame) -> list[list[str]]:
    return cells.to_numpy(dtype=object).tolist()
