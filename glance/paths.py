"""Where things lie: every path of the project comes from here, so no file and no notebook spells one out."""

from pathlib import Path

_AROUND = Path(__file__).resolve().parent.parent
# A copy of the package alone (`pip install` without the repository) has no notebooks and data beside it, and where it lies
# is no place to write: it works in the folder it is called from.
ROOT = _AROUND if (_AROUND / "pyproject.toml").is_file() else Path.cwd()
DATA = ROOT / "data"
FIGURES = ROOT / "figures"
NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build"
RUNS = DATA / "runs"
PAPER = DATA / "paper"
KEPT = DATA / "results"
BENCH = DATA / "bench"
POCKET = DATA / "pocket"


def located(name: str | Path) -> str:
    """Return a parameter's path as it is meant: absolute as given, relative from the project's root; a hub id stays."""
    path = Path(name)
    here = ROOT / path
    return str(here) if not path.is_absolute() and here.exists() else str(name)


def named(path: str | Path) -> str:
    """Name a path as records do: relative to the project's root where it lies inside, so that no machine's folders show."""
    path = Path(path)
    return path.relative_to(ROOT).as_posix() if path.is_absolute() and path.is_relative_to(ROOT) else str(path)
