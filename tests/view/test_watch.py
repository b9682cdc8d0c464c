"""A run in the terminal: what is drawn, and that it is drawn again while the run goes on."""

import io
import os
import pty
import re
import subprocess
import sys
import time

import pytest
import yaml
from rich.console import Console

from rlft_fast.cli import main
from rlft_fast.run.lock import NAME, locked
from rlft_fast.view.watch import seconds_per_step, sparkline, watch_run
from tests.support.runs.configs import MINIMAL
from tests.support.runs.run_folders import HOSTILE, sample, write_lines, write_run


def test_a_curve_is_the_means_of_neighbours():
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 7.0, 7.0], 2) == "▁█"
    assert sparkline([2.0], 8) == sparkline([2.0, 2.0, 2.0], 1) == "▁"
    assert sparkline([*range(16)], 8) == "▁▂▃▄▅▆▇█"


def test_seconds_of_a_step_are_those_of_steps_alone():
    """An evaluation after each second step takes 30 s, a step 100 s. The run was stopped for a day after step 2."""
    rows, now = [{"step": 0, "time": 0.0, "accuracy": 0.5}], 0.0
    for step in range(1, 15):
        now += 100 + (step == 3) * 86_400
        rows.append({"step": step, "time": now, "seconds": 100.0})
        if step % 2 == 0:
            now += 30
            rows.append({"step": step, "time": now, "accuracy": 0.5})
    assert seconds_per_step(rows[:2], 0.0) == 100
    assert seconds_per_step(rows[:4], 0.0) == 115
    assert seconds_per_step(rows, 0.0) == 115  # the newest ten steps
    started = rows[3]["time"] + 60
    assert seconds_per_step(rows[:5], started) is None  # a single step since then
    assert seconds_per_step(rows[:6], started) == 100
    assert seconds_per_step([{"step": 1}, {"step": 2, "time": None}], 0.0) is None


def test_a_run_that_has_stopped(tmp_path):
    rows = [
        {"step": i, "time": 10.0 * i, "reward_mean": i / 8, "seconds_rollout": 2.5, "entropy": 1.0, "loss": None}
        for i in range(1, 9)
    ]
    rows.append({"step": 8, "time": 90.0, "accuracy": 0.5})  # an evaluation after the last step
    write_run(tmp_path / "run", [sample(8, "[bold]an answer[/]", prompt=" ".join(HOSTILE))], rows)
    written = io.StringIO()
    watch_run(tmp_path / "run", 1.0, Console(file=written, width=120))
    text = written.getvalue()
    assert "run does not run: step 8" in text
    assert re.search("Reward, mean +▁▂▃▄▅▆▇█", text)
    assert "Entropy [nats/token]" in text
    assert "rollout 2.5 s" in text
    assert "[bold]an answer[/]" in text
    assert "\x1b" not in text


def test_no_run(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 1
    assert "has no metrics.jsonl: give the output_dir" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path), "--every", "0"])


def test_it_is_drawn_again_until_the_run_ends(tmp_path):
    """In a terminal of its own, while this process holds the lock of the run."""
    run = tmp_path / "run"
    run.mkdir()
    own, its = pty.openpty()
    command = [sys.executable, "-m", "rlft_fast", "watch", str(run), "--every", "0.1"]
    with locked(run):
        watching = subprocess.Popen(command, stdout=its, stderr=its, env=os.environ | {"COLUMNS": "400"})
        os.close(its)
        read_until(own, b"runs: it has not finished a step yet")
        for step in (1, 2):
            with (run / "metrics.jsonl").open("a") as file:
                file.write(f'{{"step": {step}, "reward_mean": 0.5}}\n')
            read_until(own, b"runs: step %d" % step)
        (run / "config.yaml").write_text(yaml.safe_dump(MINIMAL | {"steps": 5}))
        started = (run / NAME).stat().st_mtime
        times = ((1, started - 9e4), (2, started + 50), (2, started + 80), (3, started + 150), (4, started + 220))
        write_lines(run / "new", [{"step": step, "time": at, "reward_mean": 0.5} for step, at in times])
        (run / "new").replace(run / "metrics.jsonl")
        read_until(own, b"runs: step 4 of 5, 70 s per step, 1 min left")
    read_until(own, b"does not run: step 4 of 5")
    assert watching.wait(timeout=60) == 0
    os.close(own)


def read_until(terminal: int, wanted: bytes) -> None:
    found, within_s = b"", time.monotonic() + 60
    while wanted not in found:
        assert time.monotonic() < within_s, found
        found += os.read(terminal, 4096)
