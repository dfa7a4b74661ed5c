"""Exit codes: 0 all held; 1 not lossless, and nothing else; 2 bad input; 3 any other surprise; 130 interrupted.

Bad input is what the project itself refuses (a ValueError raised in its own files) and what the system refuses (an OSError:
a read-only or full disk, a folder that is a file): one line. Anything else is a surprise: its traceback goes to a file that
the line names.
"""

import builtins
import errno
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from glance.paths import BUILD

PACKAGE = Path(__file__).resolve().parent
HELD, NOT_LOSSLESS, BAD_INPUT, SURPRISE, INTERRUPTED = 0, 1, 2, 3, 130


class NotLossless(AssertionError):
    """A claim that must hold did not: some output differs from the target's own greedy text."""


def exit_code(work: Callable[[], Any], command: str, *, resumes: bool = False) -> int:
    """Run a command's work; return its exit code, with one line on standard error where it is not 0.

    Args:
        work: returns None or an exit code.
        command: its name, for the file with a traceback.
        resumes: whether the same command goes on where an interrupt stopped it.
    """
    try:
        return int(work() or HELD)
    except NotLossless as error:
        return _say(NOT_LOSSLESS, f"NOT LOSSLESS: {one_line(error)}")
    except KeyboardInterrupt:
        after = "the same command resumes" if resumes else "the same command starts again"
        return _say(INTERRUPTED, f"interrupted; {after}")
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except Exception as error:
        if is_bad_input(error):
            return _say(BAD_INPUT, f"error: {one_line(error)}")
        path = write_traceback(error, command)
        return _say(SURPRISE, f"stopped: {type(error).__name__}: {one_line(error)} (traceback: {path})")


def is_bad_input(error: BaseException) -> bool:
    """Tell what a user can mend from a surprise."""
    if isinstance(error, ModuleNotFoundError):
        return not (error.name or "glance").startswith("glance")
    if isinstance(error, OSError):
        return not isinstance(error, ConnectionError | ChildProcessError)
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and bool(frames) and is_ours(frames[-1].filename)


def is_ours(filename: str) -> bool:
    """Say whether a file is one of this package's."""
    return Path(filename).expanduser().resolve().is_relative_to(PACKAGE)


def notebook_error(name: str, traceback_lines: Sequence[str]) -> type[Exception] | None:
    """Say what a notebook's error is here, by its name and its printed traceback: None for a surprise.

    Returns:
        `NotLossless`, `ValueError` for bad input, or None.
    """
    if name == "NotLossless":
        return NotLossless
    kind = ValueError if name == "Missing" else getattr(builtins, name, Exception)
    if issubclass(kind, ConnectionError | ChildProcessError):
        return None
    if issubclass(kind, OSError | ModuleNotFoundError):
        return ValueError
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(traceback_lines))
    places = re.findall(r"^(?:File (.+?):\d+|(Cell) In\[)", plain, flags=re.MULTILINE)
    raised = places[-1] if places else ("", "Cell")
    ours = bool(raised[1]) or is_ours(raised[0])
    return ValueError if issubclass(kind, ValueError) and ours else None


def one_line(error: BaseException) -> str:
    """Return an error's message on one line."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left on the disk{f' for {error.filename}' if error.filename else ''}"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install 'glance-companion[decode,notebooks]'"
    return " ".join(str(error).split()) or type(error).__name__


def write_traceback(error: BaseException, command: str) -> Path | None:
    """Write a traceback under `build/`, or in the temporary folder where that cannot be written; None in neither."""
    text = "".join(traceback.format_exception(error))
    for folder in (BUILD, Path(tempfile.gettempdir())):
        path = folder / f"glance-{command}-error.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError:
            continue
        return path
    print(text, file=sys.stderr)
    return None


def _say(code: int, line: str) -> int:
    print(line, file=sys.stderr)
    return code
