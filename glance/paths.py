"""Where things lie: every path of the project comes from here, so no file and no notebook spells one out."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
