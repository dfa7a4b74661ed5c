"""What a notebook's parameters may hold: values compared with their annotations, and refused before anything starts.

A value is text (from the command line) or what YAML made of it. What is meant without doubt is taken: `1e1` for a whole
number, `docvqa` for a list of names, `3` or `3,7` for a list of numbers. The rest is refused in one line.
"""

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from glance.paths import ROOT

PATHS = ("target", "head", "data")  # a relative one means the caller's folder, or else the project's
LARGEST = 2**63
WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class Parameter(NamedTuple):
    """One parameter of a notebook: its annotation, its default, and the comment that is its manual."""

    kind: str
    default: Any
    help: str


def typed(name: str, value: Any, kind: str) -> Any:
    """Return a value as its annotation has it: `str`, `int`, `float`, `bool`, `list[str]` or `list[int]`.

    Raises:
        ValueError: a value of another type; names the parameter, the value, and what would be right.
    """
    try:
        return _listed(value, kind) if kind.startswith("list") else _single(value, kind)
    except (ValueError, InvalidOperation, OverflowError):
        raise ValueError(f"{name} is {_described(kind)}, got {value!r}") from None


def _single(value: Any, kind: str) -> Any:
    if kind == "str":
        if isinstance(value, bool | float) or not isinstance(value, str | int | None):
            raise ValueError
        return "" if value is None else str(value)
    if kind == "bool":
        if isinstance(value, bool):
            return value
        return WORDS[key] if (key := str(value).strip().lower()) in WORDS else _refuse()
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    if kind == "int":
        exact = Decimal(str(value).strip())
        if not exact.is_finite() or abs(exact) >= LARGEST or exact != exact.to_integral_value():
            raise ValueError
        return int(exact)
    if kind == "float":
        return found if isfinite(found := float(value)) else _refuse()
    return value


def _listed(value: Any, kind: str) -> list[Any]:
    """Read a list: YAML's, or a single entry, or entries between commas."""
    import yaml

    if isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                value = yaml.load(value, yaml.BaseLoader)  # every entry as text: its type is the annotation's
            except yaml.YAMLError:
                raise ValueError from None
        else:
            value = [part.strip() for part in value.split(",")] if value.strip() else []
    if value is None:
        return []
    inner = kind.removeprefix("list").strip("[]") or "str"
    entries = [_single(entry, inner) for entry in (value if isinstance(value, list | tuple) else [value])]
    return entries if all(entry != "" for entry in entries) else _refuse()


def _refuse() -> Any:
    raise ValueError


def _described(kind: str) -> str:
    names = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false"}
    if kind.startswith("list"):
        return "a list of whole numbers" if "int" in kind else "a list of names"
    return names.get(kind, kind)


def from_caller(name: str, value: Any) -> Any:
    """Return a path parameter as the caller means it: absolute where the caller's folder has it, else as given."""
    if name not in PATHS or not value:
        return value
    path = Path(str(value)).expanduser()
    return str(path.absolute()) if path.exists() else value


def checked_run_name(name: str) -> str:
    """Return a run's name, or refuse one that would leave the runs' folder.

    Raises:
        ValueError: empty, or more than one folder's name.
    """
    strange = not name.strip() or name in (".", "..") or any(sign in name for sign in "/\\\0\n")
    if strange:
        raise ValueError(f"a run's name is one folder's name under data/runs, got {name!r}")
    return name


def check_values(notebook: str, values: Mapping[str, Any]) -> None:
    """Refuse what a notebook would refuse later: settings that make no sense, paths that are not there, no such device.

    Args:
        notebook: one of the pipeline.
        values: all its parameters, of the right types.

    Raises:
        ValueError: one line.
    """
    if notebook == "03-fit":
        for name, least in (("cap", -1), ("n_boot", 1), ("seed", 0)):
            if values[name] < least:
                raise ValueError(f"{name} must be at least {least}, got {values[name]}")
    if notebook not in ("01-decode", "02-audit"):
        return
    from glance.head import as_device, as_dtype, check_checkpoint

    for name in ("target", "head"):
        check_checkpoint(_at_root(values[name]), name)
    as_device(values["device"] or None)
    for name in ("max_pixels", "bfloat16_n"):
        if values.get(name, 0) < 0:
            raise ValueError(f"{name} must be at least 0, got {values[name]}")
    if notebook == "01-decode":
        as_dtype(values["dtype"])
    for plan in plans(notebook, values):
        if plan.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {plan.max_new_tokens}")


def plans(notebook: str, values: Mapping[str, Any]) -> list[Any]:
    """Build the plans that a notebook decodes by."""
    from glance.run.experiment import Plan

    shared = {"data": _at_root(values["data"]), "tasks": tuple(values["tasks"]), "branch_k": values["branch_k"]}
    shared |= {"max_new_tokens": values["max_new_tokens"], "max_pixels": values["max_pixels"] or None}
    if notebook == "02-audit":
        counts = [values["audit_n"], *([values["bfloat16_n"]] if values["bfloat16_n"] else [])]
        return [Plan(n=n, budget=values["budget"], **shared) for n in counts]
    budgets = values["sweep_budgets"]
    if not budgets or min(budgets) < 0:
        raise ValueError(f"sweep_budgets needs at least one budget, none of them negative; got {budgets}")
    arms = ("ar", *(f"tree-{nodes}" for nodes in budgets), "auto")
    return [Plan(n=values["n"], budget=values["budget"], **shared), Plan(n=values["sweep_n"], arms=arms, **shared)]


def _at_root(name: str) -> str:
    path = ROOT / name
    return str(path) if path.exists() else name
