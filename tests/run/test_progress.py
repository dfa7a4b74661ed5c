"""Progress: what is done and left, and an estimate that follows from what was done so far."""

import io
import json

import pytest

from glance.run import progress

STAGES = {"decode": (100, 1.0), "sweep": (20, 2.5), "audit": (10, 3.0)}


def state(stage="decode", done=40, total=100, fresh=40, seconds=80.0):
    return {"stage": stage, "done": done, "total": total, "fresh": fresh, "seconds": seconds}


def test_the_estimate_is_the_pace_so_far_times_what_is_left():
    assert progress.remaining(state(), STAGES) == (120.0, 120.0 + 2 * (20 * 2.5 + 10 * 3))
    assert progress.remaining(state("audit", 5, 10, 5, 15.0), STAGES) == (15.0, 15.0)
    assert progress.remaining(state("other", 5, 10, 5, 15.0), STAGES) == (15.0, None)


def test_what_an_earlier_run_finished_is_not_speed():
    assert progress.remaining(state(done=90, fresh=10, seconds=20.0), {"decode": (100, 1.0)})[0] == 20.0
    assert progress.remaining(state(done=90, fresh=0), STAGES) == (None, None)
    assert progress.line(state(done=90, fresh=0), STAGES) == "decode: 90 of 100 prompts, 10 left"


def test_a_line_says_stage_done_left_and_time():
    assert progress.line(state(), STAGES) == (
        "decode: 40 of 100 prompts, 60 left, about 2 min; about 5 min to the end of the run"
    )


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "about 1 s"), (40, "about 40 s"), (420, "about 7 min"), (7800, "about 2 h 10 min")]
)
def test_durations_are_said_as_people_do(seconds, said):
    assert progress.duration(seconds) == said


def test_a_kernel_tells_and_the_runner_shows(tmp_path, monkeypatch):
    path, out = tmp_path / "progress.jsonl", io.StringIO()
    shown = progress.Shown(path, STAGES, out)
    monkeypatch.setenv(progress.CHANNEL, str(path))
    assert list(progress.watched("abc", "decode", 3)) == ["a", "b", "c"]
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["done"] for row in told] == [0, 1, 2, 3]
    shown.look(0.0)
    assert out.getvalue().startswith("decode: 3 of 3 prompts, 0 left")
    with path.open("a") as file:
        file.write(json.dumps(state(done=50)) + "\n")
    shown.look(1.0)
    assert out.getvalue().count("\n") == 1, "a log gets a line now and then"
    with path.open("a") as file:
        file.write(json.dumps(state(done=60)) + "\n" + '{"half')
    shown.look(progress.EVERY + 1)
    assert "60 of 100 prompts, 40 left" in out.getvalue().splitlines()[-1]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_live_line_that_other_text_does_not_tear(tmp_path):
    path, out = tmp_path / "progress.jsonl", Terminal()
    with progress.Shown(path, STAGES, out) as shown:
        path.write_text(json.dumps(state()) + "\n")
        shown.look(0.0)
        shown.write("docvqa done\n")
    assert "\rdecode: 40 of 100 prompts, 60 left" in out.getvalue() and "docvqa done\n" in out.getvalue()
