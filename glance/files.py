"""How the project reads and writes text: UTF-8 always, strict JSON, and files that are replaced in one step.

Conventions that decide numbers: a line ends at a line feed alone, so that a text may hold U+2028 or any other separator; a
byte order mark is skipped; nan and infinity are written as null, since JSON has neither.
"""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def read_text(path: str | Path) -> str:
    """Read a UTF-8 file, with or without a byte order mark.

    Raises:
        ValueError: bytes that are not UTF-8; names the file and the line.
    """
    data = Path(path).read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 (byte {data[error.start]:#04x}): save the file as UTF-8") from None


def read_lines(path: str | Path) -> list[str]:
    """Read a file's lines, split at line feeds alone; what a carriage return before one leaves is dropped too."""
    lines = read_text(path).split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: not JSON; names file and line.
    """
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """Read a CSV file with a header; empty cells are ""."""
    return list(csv.DictReader(io.StringIO(read_text(path), newline="")))


def json_line(value: Any) -> str:
    """Write a value as one line of strict JSON, its line feed included."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False) + "\n"


def append_lines(path: str | Path, values: Iterable[Any]) -> None:
    """Append values as JSON lines; they are on disk when this returns."""
    text = "".join(map(json_line, values))
    with Path(path).open("a", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: str | Path, text: str) -> Path:
    """Replace a file's text in one step, so that a kill leaves the old file or the new one; makes the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(path.suffix + ".scratch")
    scratch.write_text(text, encoding="utf-8", newline="\n")
    os.replace(scratch, path)
    return path


def write_json(path: str | Path, value: Any) -> Path:
    """Write readable JSON in one step."""
    return write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """Turn numpy scalars, paths and nan into JSON's own; a name that this locale cannot spell is read as UTF-8."""
    if isinstance(value, Mapping):
        return {_spelt(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return _spelt(str(value)) if isinstance(value, Path | str) else value


def _spelt(text: str) -> str:
    """Return text that UTF-8 can write: Python keeps bytes that are foreign to the locale's encoding as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return text


def sha256(ids: Iterable[int] | bytes) -> str:
    """Hash ids (as int64, little-endian) or bytes."""
    data = ids if isinstance(ids, bytes) else np.asarray(list(ids), dtype="<i8").tobytes()
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: str | Path) -> str:
    """Hash a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
