"""Where things lie: every path of the project comes from here, so no file and no notebook spells one out."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
FIGURES = ROOT / "figures"
NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build"
RUNS = DATA / "runs"
PAPER = DATA / "paper"
POCKET = DATA / "pocket"
