"""How far a long stage is: one live line in a terminal, plain lines in a log, with what is left and about how long.

A notebook's kernel has no terminal: the runner names a file in GLANCE_PROGRESS, the kernel appends to it what it has done,
and the runner shows it. Remaining time is measured from what was done so far in this process; what an earlier run left
finished does not count as speed.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any, TypeVar

from tqdm import tqdm

CHANNEL = "GLANCE_PROGRESS"
EVERY = 20.0  # seconds between two lines of a log
POLL = 0.5  # seconds between two looks at the file

Item = TypeVar("Item")


class Progress:
    """The prompts of one stage, counted as they are done.

    Args:
        stage: its name, as it is shown.
        total: how many prompts it has.
        done: how many an earlier run finished.
    """

    def __init__(self, stage: str, total: int, done: int = 0):
        self.stage = stage
        self.total = total
        self.before = done
        self.done = done
        self._began = monotonic()
        self._file = os.environ.get(CHANNEL)
        hidden = True if self._file else None  # None: shown where there is a terminal
        self._bar = tqdm(desc=stage, total=total, initial=done, unit="prompt", leave=False, disable=hidden)
        self._tell()

    def step(self) -> None:
        """Count one more prompt."""
        self.done += 1
        self._bar.update()
        self._tell()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def _tell(self) -> None:
        if self._file:
            state = {"stage": self.stage, "done": self.done, "total": self.total, "fresh": self.done - self.before}
            state["seconds"] = monotonic() - self._began
            with Path(self._file).open("a", encoding="utf-8") as file:
                file.write(json.dumps(state) + "\n")


def watched(items: Iterable[Item], stage: str, total: int) -> Iterator[Item]:
    """Yield a stage's items, each counted as done when the next is asked for."""
    progress = Progress(stage, total)
    try:
        for item in items:
            yield item
            progress.step()
    finally:
        progress.close()


def remaining(state: Mapping[str, Any], stages: Mapping[str, tuple[int, float]]) -> tuple[float | None, float | None]:
    """Estimate seconds left of a stage, and of it and all that follow.

    Args:
        state: what `Progress` last told of the stage.
        stages: the run's stages in order: how many prompts each has, and what a prompt costs beside the others'.

    Returns:
        Both None until a prompt has been done; the second None for a stage that is not in `stages`.
    """
    if not state["fresh"]:
        return None, None
    each = state["seconds"] / state["fresh"]
    here = each * (state["total"] - state["done"])
    names = list(stages)
    if state["stage"] not in stages:
        return here, None
    later = names[names.index(state["stage"]) + 1 :]
    cost = each / stages[state["stage"]][1]
    return here, here + sum(cost * stages[name][0] * stages[name][1] for name in later)


def line(state: Mapping[str, Any], stages: Mapping[str, tuple[int, float]]) -> str:
    """Say in one line how far a stage is."""
    left = state["total"] - state["done"]
    here, in_all = remaining(state, stages)
    said = f"{state['stage']}: {state['done']} of {state['total']} prompts, {left} left"
    if here is None:
        return said
    said += f", {duration(here)}"
    return said if in_all is None or in_all == here else f"{said}; {duration(in_all)} to the end of the run"


def duration(seconds: float) -> str:
    """Say an estimate as people do: "about 40 s", "about 7 min", "about 2 h 10 min"."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60} min"


class Shown:
    """Shows what a kernel tells through a file: a live line where `out` is a terminal, else a line now and then.

    It is also the stream that the kernel's own output goes to, so that neither tears the other's lines.

    Args:
        path: the file; emptied first.
        stages: as `remaining` takes them.
        out: a stream; default standard output.
    """

    def __init__(self, path: Path, stages: Mapping[str, tuple[int, float]], out: Any = None):
        self.path = path
        self.path.write_text("", encoding="utf-8")
        self.stages = stages
        self.out = out or sys.stdout
        self.live = self.out.isatty()
        self._bar = tqdm(file=self.out, bar_format="{desc}", leave=False, disable=not self.live)
        self._last: dict[str, Any] = {}
        self._said = -EVERY
        self._stop = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Shown":
        self._before = os.environ.get(CHANNEL)
        os.environ[CHANNEL] = str(self.path)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self._bar.close()
        if self._before is None:
            os.environ.pop(CHANNEL, None)
        else:
            os.environ[CHANNEL] = self._before

    def write(self, text: str) -> int:
        """Write the kernel's own text, above the live line where there is one."""
        if self.live:
            tqdm.write(text, file=self.out, end="")
        else:
            self.out.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream below."""
        self.out.flush()

    def _watch(self) -> None:
        while not self._stop.wait(POLL):
            self.look(monotonic())

    def look(self, now: float) -> None:
        """Read what is new, and show it if it is time to."""
        told = [part for part in self.path.read_text(encoding="utf-8").split("\n")[:-1] if part]
        state = json.loads(told[-1]) if told else {}
        if not state or state == self._last:
            return
        if self.live:
            self._bar.set_description_str(line(state, self.stages))
        elif state["stage"] != self._last.get("stage") or now - self._said >= EVERY:
            self._say(line(state, self.stages))
            self._said = now
        self._last = state

    def _say(self, text: str) -> None:
        self.out.write(text + "\n")
        self.out.flush()
