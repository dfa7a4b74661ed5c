"""A run's folder: how rows are written so that a kill loses nothing, and where they came from.

`rounds.jsonl` gets a prompt's rounds before `prompts.jsonl` gets its row; `provenance.json` says what made them. Rows are
flushed per prompt, and the prompt's row is the seal: it holds the count and the hash of its rounds. What is not whole when
the folder is opened again (rounds without a row, a row whose rounds were lost, doubled rows) is dropped, to be decoded
again. One process writes to a folder at a time. A folder without rows is nobody's. The file knows nothing of models.
"""

import os
import platform
import socket
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from glance.files import plain, read_json, read_text, write_json, write_text
from glance.paths import ROOT
from glance.records import (
    SCHEMAS,
    answer_key,
    lines_sha256,
    match_rounds,
    parse_rows,
    row_line,
    whole_lines,
)

VERSIONED = (  # these decide pixels and tokens
    "torch",
    "torchvision",
    "transformers",
    "tokenizers",
    "safetensors",
    "pillow",
    "dflash",
    "numpy",
    "glance-companion",
)
DRAWN_WITH = ("matplotlib", "scipy", "pandas")  # these decide figures and tables: recorded, never compared
# A run under another value of any of these is another run.
IDENTITY = ("parameters", "versions", "device", "dtype", "attention", "data", "images", "weights", "drafter")


class Run:
    """A run's folder, open for appending rows; a context manager that holds the folder's lock.

    Args:
        folder: made if it does not exist.
        provenance: what the run is; a folder with rows of another run is refused.

    Raises:
        ValueError: another process writes to the folder, or it holds rows of another run; nothing was changed then.
    """

    def __init__(self, folder: str | Path, provenance: Mapping[str, Any]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder)
        self._lock.take()
        try:
            self._claim(provenance)
            self.done = self._repair()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes write to the folder; `done` can still be read."""
        self._lock.release()

    def add(self, prompt: Mapping[str, Any], rounds: Iterable[Mapping[str, Any]]) -> None:
        """Append a prompt's rounds, then its row, sealed with their count and hash; both are on disk when this returns."""
        lines = [row_line("rounds.jsonl", row).removesuffix("\n") for row in rounds]
        row = {**prompt, "rounds_kept": len(lines), "rounds_sha256": lines_sha256(lines)}
        seal = row_line("prompts.jsonl", row)
        _append(self.folder / "rounds.jsonl", "".join(line + "\n" for line in lines))
        _append(self.folder / "prompts.jsonl", seal)
        self.done[answer_key(row)] = row

    def _claim(self, provenance: Mapping[str, Any]) -> None:
        """Refuse a folder that holds rows of another run; write provenance where it holds none."""
        path = self.folder / "provenance.json"
        if not whole_lines(self.folder / "prompts.jsonl"):
            write_json(path, provenance)
            return
        if not path.exists():
            raise ValueError(
                f"{self.folder} has rows and no provenance.json to say whose: name a new run, or delete it"
            )
        differing = differences(read_json(path), provenance)
        if differing:
            raise ValueError(
                f"{self.folder} holds another run ({'; '.join(differing[:4])}): name a new run, or delete it"
            )

    def _repair(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        """Keep what is whole, and return its rows by arm, task and prompt."""
        paths = [self.folder / name for name in SCHEMAS]
        sealed, logged = (whole_lines(path) for path in paths)
        prompts = parse_rows(paths[0], sealed)
        rounds = parse_rows(paths[1], logged)
        whole = match_rounds(prompts, rounds, logged)
        rows_kept = sorted(place for place, _ in whole.values())
        rounds_kept = sorted(place for _, places in whole.values() for place in places)
        for path, lines, kept in zip(paths, (sealed, logged), (rows_kept, rounds_kept), strict=True):
            text = "".join(lines[place] + "\n" for place in kept)
            if path.exists() and path.stat().st_size != len(text.encode()):
                write_text(path, text)
        return {answer_key(prompts[place]): prompts[place] for place in rows_kept}


class FolderLock:
    """The lock of a folder: one process writes to it at a time, and is named to the others.

    The system frees the lock when its process ends, however it ends.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._holder = folder / ".writer"
        self._lock = FileLock(folder / ".lock", timeout=0)

    def take(self) -> None:
        """Take the lock.

        Raises:
            ValueError: another process has it; names that process.
        """
        try:
            self._lock.acquire()
        except Timeout:
            who = read_text(self._holder).strip() if self._holder.is_file() else "another process"
            raise ValueError(f"{self._folder} is being written by {who}: wait for it, or name a new run") from None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_text(self._holder, f"process {os.getpid()} on {socket.gethostname()} since {now}\n")

    def release(self) -> None:
        """Free the lock; nothing happens where it is free already."""
        if self._lock.is_locked:
            self._holder.unlink(missing_ok=True)
            self._lock.release()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say in which facts that decide its numbers a run differs from another: none where both are one run."""
    new = plain(new)
    found = []
    for group in IDENTITY:
        before = old.get(group)
        now = new.get(group)
        if before == now:
            continue
        if isinstance(now, dict):
            before = before if isinstance(before, dict) else {}
            keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
            found += [f"{group} {key}: {_short(before.get(key))} there, {_short(now.get(key))} now" for key in keys]
        else:
            found.append(f"{group}: {_short(before)} there, {_short(now)} now")
    return found


def provenance(parameters: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """Say what makes a run's numbers: parameters, commit, versions, machine; `facts` adds device, dtype, data hashes."""
    return {
        "parameters": dict(parameters),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in VERSIONED}},
        "drawn_with": {**{name: _version(name) for name in DRAWN_WITH}, "freetype": _freetype()},
        "machine": {"platform": platform.platform(), "processor": _processor(), "cpus": os.cpu_count()},
        **facts,
    }


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _short(value: Any) -> str:
    """Show a value; of a hash its head."""
    if isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef"):
        value = value[:12]
    return repr(value)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _freetype() -> str | None:
    """Name the FreeType that matplotlib draws letters with."""
    try:
        return import_module("matplotlib.ft2font").__freetype_version__
    except ImportError:
        return None


def _processor() -> str:
    """Name the CPU where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """Name the commit, with a + where the tree differs from it; None outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
