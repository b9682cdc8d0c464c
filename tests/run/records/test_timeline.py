"""When the parts of a run worked: what is noted, idle shares, and the picture."""

import json
import threading
import time

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from rlft_fast.cli import main
from rlft_fast.run.phases import Phases
from rlft_fast.run.records.timeline import PHASE_COLORS, draw_timeline, merged, read_timeline
from rlft_fast.world import SPANS, Span, World
from tests.support.runs.run_folders import HOSTILE, write_lines, write_run


@pytest.fixture(autouse=True)
def without_curves() -> None:
    """Here they are drawn."""


def line(step: int, start: float, end: float, *spans) -> dict:
    return {"step": step, "start": start, "end": end, "spans": [*map(list, spans)]}


# Ten seconds of downtime lie between the first two steps.
LINES = [
    line(1, 100.0, 104.0, ("generate", "rank 0", 100.0, 103.0), ("update", "rank 0", 103.0, 104.0)),
    line(2, 114.0, 118.0, ("generate", "rank 0", 114.0, 116.0), ("generate", "rank 0", 115.0, 117.0)),
    line(3, 118.0, 122.0, ("update", "rank 0", 117.0, 118.5), ("sync", "rank 0", 119.0, 120.0),
         ("logprobs", "rank 0", 118.5, 119.0), ("generate", "rank 1", 119.0, 123.0)),
]  # fmt: skip


def test_work_is_noted_in_any_thread_and_taken_once():
    SPANS.take()
    with SPANS.noted("reward"):
        thread = threading.Thread(target=lambda: SPANS.add(Span("generate", "copy", 1.0, 2.0)))
        thread.start()
        thread.join()
        time.sleep(0.02)
    with pytest.raises(ValueError, match="wrong"), SPANS.noted("environment"):
        raise ValueError("wrong")
    of_thread, reward, environment = SPANS.take()
    assert of_thread == ("generate", "copy", 1.0, 2.0)
    assert reward[:2] == ("reward", "")
    assert 0.02 <= reward.end - reward.start < 1
    assert abs(reward.end - time.time()) < 5
    assert environment.phase == "environment"
    assert SPANS.take() == []


def test_phases_note_the_training_alone():
    """Others note their own work, which may be less than the phase, as of a generator beside environments."""
    SPANS.take()
    phases = Phases(World())
    for name in ("generate", "logprobs", "update", "wait"):
        with phases.timed(name):
            pass
    assert [span.phase for span in SPANS.take()] == ["logprobs", "update"]


def test_spans_that_overlap_become_one():
    spans = [Span("a", "", 0, 2), Span("a", "", 1, 1.5), Span("a", "", 2, 3), Span("b", "", 2, 3), Span("a", "", 4, 5)]
    assert merged(spans) == [("a", "", 0, 3), ("a", "", 4, 5), ("b", "", 2, 3)]
    assert merged(spans, pause=1) == [("a", "", 0, 5), ("b", "", 2, 3)]


def test_rows_of_the_newest_steps_and_idle_shares_of_all(tmp_path):
    run = write_run(tmp_path / "run")
    assert read_timeline(run) is None
    write_lines(run / "timeline.jsonl", LINES)
    found = read_timeline(run)
    assert (found.steps, found.seconds, found.num_rows) == ((2, 3), 8.0, 4)
    rows = {row.name: row for row in found.rows}
    assert [*rows] == ["generation, rank 0", "generation, rank 1", "training", "sync"]
    assert rows["generation, rank 0"].spans == [("generate", 0.0, 3.0)]
    assert rows["generation, rank 1"].spans == [("generate", 5.0, 8.0)]
    assert rows["training"].spans == [("logprobs", 4.5, 5.0), ("update", 3.0, 4.5)]
    idle = {name: row.idle for name, row in rows.items()}  # of 12 s
    assert idle == pytest.approx(
        {"generation, rank 0": 0.5, "generation, rank 1": 8 / 12, "training": 0.75, "sync": 11 / 12}
    )


def test_damaged_lines_and_spans_are_left_out(tmp_path):
    run = write_run(tmp_path / "run")
    spans = [["update"], ["unknown", "rank 0", 1, 2], ["update", 3, 1, 2], ["update", "rank 0", 2, 1], None,
             ["update", "rank 0", "1", 2], ["update", "rank 0", 1, float("nan")]]  # fmt: skip
    damaged = ["", "{", "[1]", json.dumps({"step": 1}), json.dumps({**line(1, 5, 4)}), '{"step": 1e999}']
    write_lines(run / "timeline.jsonl", [*damaged, line(2, 0, 4, *filter(None, spans), ("update", "rank 0", 1, 3))])
    assert read_timeline(run).rows == [("training", [("update", 1.0, 3.0)], 0.5)]
    write_lines(run / "timeline.jsonl", damaged)
    assert read_timeline(run) is None
    assert not draw_timeline(run, run / "timeline.png")


def count_pixels(path, phase: str) -> int:
    return int((abs(imread(path)[..., :3] - to_rgb(PHASE_COLORS[phase])).max(axis=-1) < 0.02).sum())


def test_the_picture_has_the_colours_of_the_phases(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    write_lines(run / "timeline.jsonl", LINES)
    assert main(["plot", str(run)]) == 0
    assert capsys.readouterr().out.split() == [str(run / "curve.png"), str(run / "timeline.png")]
    pixels = {phase: count_pixels(run / "timeline.png", phase) for phase in PHASE_COLORS}
    assert pixels["generate"] > pixels["update"] > pixels["logprobs"] > 100
    assert pixels["sync"] > 100
    assert pixels["environment"] == pixels["reward"] == pixels["teacher"] == 0


def test_odd_names_and_many_workers_are_drawn(tmp_path):
    run = write_run(tmp_path / "$run")
    many = [("environment", f"{name} {i}", 119.0, 121.0) for i, name in enumerate(["$x$", *HOSTILE] * 6)]
    write_lines(run / "timeline.jsonl", [*LINES, line(4, 122.0, 123.0, *many)])
    assert draw_timeline(run, run / "timeline.png")
    assert count_pixels(run / "timeline.png", "environment") > 100
    found = read_timeline(run)
    assert len(found.rows) == 40 < found.num_rows == 4 + len(many)
