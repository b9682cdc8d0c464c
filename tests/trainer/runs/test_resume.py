"""A run that was interrupted, whichever way, ends with the same numbers as a run that was not."""

import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from rlft_fast.cluster import WorkerError
from rlft_fast.errors import Interrupted
from rlft_fast.rewards import RewardError
from rlft_fast.rollout import RolloutError
from rlft_fast.run.folder import MARKER, claim
from rlft_fast.trainer import Run
from tests.run.counting import (
    CountingTrainer,
    Strikes,
    by_signal,
    checkpoints,
    count,
    counting_config,
    raising,
    result_of,
    rows_of,
)
from tests.support.machine.distributed import run_distributed
from tests.support.runs.curves import without_matplotlib
from tests.trainer.toy import read_lines


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What the uninterrupted run leaves."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    count(folder)
    return result_of(folder)


def resumed(folder: Path, resume: bool | str = True, **changes) -> dict:
    count(folder, resume=resume, **changes)
    return result_of(folder)


# ---- a named checkpoint ---------------------------------------------------------------------------------------------


def test_going_back_to_a_named_checkpoint(expected, tmp_path, capsys):
    """The finished run becomes a run of its own; the steps after the checkpoint come again as they were."""
    count(tmp_path, checkpoint__best="accuracy", log_tokens_mib=1)
    run, before = tmp_path / "run", result_of(tmp_path)
    best, tokens = (run / "best/total.json").read_text(), sorted(path.name for path in (run / "tokens").iterdir())
    again = resumed(tmp_path, resume="step_3", checkpoint__best="accuracy", log_tokens_mib=1)
    assert {**again, "summary.json": ""} == {**expected, "summary.json": ""}
    assert again == before
    assert f"everything of later steps, such as step_00000006, is kept in {run / 'later.1'}" in capsys.readouterr().out
    assert result_of(tmp_path, "run/later.1") == before
    assert (run / "later.1/best/total.json").read_text() == best
    assert sorted(path.name for path in (run / "later.1/tokens").iterdir()) == tokens[3:]
    assert checkpoints(tmp_path) == ["step_00000003", "step_00000006"]
    ids = [json.loads((folder / MARKER).read_text())["id"] for folder in (run, run / "later.1")]
    assert ids[0] != ids[1]  # trackers get the other steps as another run
    assert resumed(tmp_path, resume=str(run / "checkpoints/step_00000006"), steps=7)["newest"] == "step_00000007"
    assert not (run / "later.2").exists()  # nothing came after it
    loaded = CountingTrainer(counting_config(tmp_path / "later", output_dir=str(run / "later.1"), steps=7))
    with without_matplotlib():
        Run(loaded).run(resume=True)  # the earlier run goes on where it was
    assert result_of(tmp_path, "run/later.1")["hf/total.json"] == (run / "hf/total.json").read_text()


def test_going_back_where_checkpoints_lie_on_another_disk(expected, tmp_path):
    """Where the first disk became too small. A folder cannot be renamed to another disk."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one disk")
    count(tmp_path)
    run = tmp_path / "run"
    with tempfile.TemporaryDirectory(dir=shared) as other:
        shutil.move(run / "checkpoints", other)
        (run / "checkpoints").symlink_to(Path(other, "checkpoints"))
        assert resumed(tmp_path, resume="step_3") == expected
        assert checkpoints(tmp_path) == ["step_00000003", "step_00000006"]
    assert result_of(tmp_path, "run/later.1") == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("step_4", "there is no checkpoint step_4 in {}/run/checkpoints: it has step_3, step_6"),
        ("step20", "'step20' is no checkpoint: give its name, such as step_00000020 or step_20"),
        ("other/step_3", "other/step_3 is no checkpoint of this run, whose checkpoints lie in {}/run/checkpoints: set"),
    ],
)
def test_a_checkpoint_that_does_not_exist_changes_nothing(name, message, tmp_path):
    count(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=re.escape(message.format(tmp_path))):
        count(tmp_path, resume=name)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


# ---- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_saves(number, expected, tmp_path, capsys):
    with pytest.raises(Interrupted, match=number.name) as interrupted:
        count(tmp_path, {("train_step", 4): by_signal(number)})
    assert interrupted.value.signal == number
    out, name = capsys.readouterr().out, "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"{name}: stopping after this step, then saving (Ctrl-C again stops at once)\n" in out
    assert f"stopped after step 5: step 5 is saved in {tmp_path / 'run'}, continue with --resume; `rlft-fast exp" in out
    assert checkpoints(tmp_path) == ["step_00000003", "step_00000005"]
    assert not (tmp_path / "run" / "summary.json").exists()
    assert resumed(tmp_path) == expected


def test_a_signal_before_the_first_step_saves_nothing(tmp_path, capsys):
    with pytest.raises(Interrupted):
        count(tmp_path, {("evaluate", 0): by_signal(signal.SIGINT)})
    assert "stopped after step 0: nothing was learned yet, so nothing is saved" in capsys.readouterr().out
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("step", [2, 6])
def test_a_signal_ends_an_evaluation_at_once(step, expected, tmp_path, capsys):
    with pytest.raises(Interrupted):
        count(tmp_path, {("evaluate", step): by_signal(signal.SIGTERM)})
    out = capsys.readouterr().out
    assert "SIGTERM: leaving this evaluation, then saving the last step (a run that goes on evaluates again)" in out
    assert f"stopped after step {step}: step {step} is saved" in out
    assert [row["step"] for row in rows_of(tmp_path) if "accuracy" in row] == [*range(0, step, 2)]
    assert resumed(tmp_path) == expected


def test_a_second_ctrl_c_stops_at_once(expected, tmp_path):
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as stopped:
        count(tmp_path, {("train_step", 4): twice})
    assert not isinstance(stopped.value, Interrupted)
    assert checkpoints(tmp_path) == ["step_00000003"]
    assert resumed(tmp_path) == expected


def test_an_ignored_sighup_is_left_alone(expected, tmp_path):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        count(tmp_path, {("train_step", 4): by_signal(signal.SIGHUP)})
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result_of(tmp_path) == expected


# torchrun kills its processes soon after a signal: a step is left unless it has changed the weights.
@pytest.mark.parametrize(
    ("place", "says", "stopped"),
    [
        (("evaluate", 0), "SIGTERM: leaving this evaluation, then saving the last step", 0),
        (("train_step", 1), "SIGTERM: leaving this step, then saving the last complete one", 1),
        (("added", 2), "takes longer, the newest checkpoint is missing: none was saved yet", 2),
        (("added", 5), "SIGTERM: finishing this step, which has changed the weights, then saving", 5),
        (("added", 5), "if it takes longer, the newest checkpoint is step_00000003", 5),
    ],
)
def test_under_torchrun(place, says, stopped, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "as under torchrun")
    with pytest.raises(Interrupted, match="SIGTERM"):
        count(tmp_path, {place: by_signal(signal.SIGTERM)}, checkpoint__asynchronous=False)
    out = capsys.readouterr().out
    assert says in out
    assert f"stopped after step {stopped}: {f'step {stopped}' if stopped else 'nothing was learned yet'}" in out
    assert resumed(tmp_path) == expected


# ---- a step that fails, and a process that dies ---------------------------------------------------------------------


# An evaluation that fails is made up for. A generator may fail when the weights are those of the next step already.
@pytest.mark.parametrize(
    ("place", "error", "says", "newest"),
    [
        (("train_step", 4), RewardError("no"), "the reward function failed after step 4: step 4 is saved", 4),
        (("evaluate", 4), RewardError("no"), "the reward function failed after step 4: step 4 is saved", 4),
        (("added", 5), RolloutError("no"), "the generator failed after step 4: step 3 is saved", 3),
        (("train_step", 0), RewardError("no"), "failed after step 0: nothing was learned yet, so nothing is saved", 0),
    ],
)
def test_a_step_that_fails_loses_nothing(place, error, says, newest, expected, tmp_path, capsys):
    with pytest.raises(type(error), match="no"):
        count(tmp_path, {place: raising(error)})
    assert says in capsys.readouterr().out
    assert checkpoints(tmp_path)[-1:] == [f"step_{newest:08d}"] * bool(newest)
    if newest:  # again: what is saved stays as it is
        before = written(tmp_path)
        with pytest.raises(RewardError):
            count(tmp_path, {("train_step", newest): raising(RewardError("no"))}, resume=True)
        assert written(tmp_path) == before
    assert resumed(tmp_path) == expected


def written(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in (folder / "run" / "checkpoints").rglob("*"))


# Before the first checkpoint; after the second step's lines; in the last evaluation.
@pytest.mark.parametrize("place", [("train_step", 1), ("added", 5), ("evaluate", 6)])
def test_death_without_saving(place, expected, tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        count(tmp_path, {place: raising(KeyboardInterrupt())})
    capsys.readouterr()
    assert resumed(tmp_path) == expected
    message = f"no checkpoint in {tmp_path / 'run' / 'checkpoints'}: starting from the beginning"
    assert (message in capsys.readouterr().out) == (place[1] == 1)


def losses(*places: tuple[str, int]) -> Strikes:
    return {place: raising(WorkerError(f"worker {i} died")) for i, place in enumerate(places)}


# Before any checkpoint, in an evaluation, twice in a row; and four of them, with a checkpoint after the second.
@pytest.mark.parametrize(
    "places",
    [
        [("train_step", 2), ("evaluate", 4), ("train_step", 4)],
        [("train_step", 1), ("added", 2), ("train_step", 3), ("added", 5)],
    ],
)
def test_lost_workers_are_replaced(places, expected, tmp_path, capsys):
    count(tmp_path, losses(*places), checkpoint__asynchronous=False)
    assert result_of(tmp_path) == expected
    out = capsys.readouterr().out
    assert out.count("Starting new workers") == len(places)
    for step in (0, 3):
        assert f"new workers continue after step {step}" in out


def test_workers_that_are_lost_again_and_again_end_the_run(expected, tmp_path):
    four = losses(("train_step", 3), ("added", 4), ("train_step", 4), ("added", 5))
    with pytest.raises(WorkerError, match="worker 3 died"):
        count(tmp_path, four, checkpoint__asynchronous=False)
    assert checkpoints(tmp_path) == ["step_00000003"]
    assert resumed(tmp_path) == expected


# ---- saves that fail ------------------------------------------------------------------------------------------------


def obstruct(folder: Path, *steps: int) -> None:
    """Files where the folders of checkpoints should be."""
    claim(folder / "run")
    (folder / "run" / "checkpoints").mkdir()
    for step in steps:
        (folder / "run" / "checkpoints" / f"step_{step:08d}.incomplete").touch()


def test_what_could_not_be_written_in_the_background_is_not_called_saved(tmp_path, capsys):
    """It does not hide the error that ends the run, either."""
    obstruct(tmp_path, *range(1, 6))
    with pytest.warns(UserWarning, match="could not save checkpoint"), pytest.raises(RewardError, match="no"):
        count(tmp_path, {("train_step", 3): raising(RewardError("no"))})
    out = capsys.readouterr().out
    assert "the reward function failed after step 3: could not save checkpoint" in out
    assert "is saved" not in out


def test_a_save_that_failed_is_told_once_and_the_next_is_tried(expected, tmp_path, capsys):
    obstruct(tmp_path, 3)
    until_written = lambda: trainer_run.checkpoints._writing and trainer_run.checkpoints._writing.exception()  # noqa: E731
    trainer_run = Run(CountingTrainer(counting_config(tmp_path), {("train_step", 3): until_written}))
    with pytest.warns(UserWarning, match="Since then .*step_00000006 was saved"):
        trainer_run.run()
    assert capsys.readouterr().out.count("The next checkpoint is tried all the same") == 1
    assert result_of(tmp_path) == expected


# ---- resuming without an interruption -------------------------------------------------------------------------------


def test_resuming_a_finished_run_does_not_train(expected, tmp_path):
    count(tmp_path)
    before = written(tmp_path)
    (tmp_path / "run" / "summary.json").unlink()
    assert resumed(tmp_path) == expected
    assert written(tmp_path) == before


def test_a_run_goes_on_where_it_ended(expected, tmp_path):
    count(tmp_path, steps=2)
    assert resumed(tmp_path) == expected


def test_an_evaluation_that_is_new_when_resuming_is_of_that_step(tmp_path):
    count(tmp_path, steps=2, evaluation=None)
    count(tmp_path, steps=3, resume=True, evaluation__every=1)
    assert [row["step"] for row in rows_of(tmp_path) if "accuracy" in row] == [2, 3]


# ---- two processes --------------------------------------------------------------------------------------------------


def stop_together(rank: int, folder: Path) -> None:
    """A signal on the second process alone, and under torchrun in a step, which both leave; then resumed."""

    def run(name: str, strikes: Strikes | None = None, *, resume: bool | str = False) -> None:
        trainer = CountingTrainer(counting_config(folder / name), strikes if rank else None)
        with without_matplotlib():
            Run(trainer).run(resume)

    def stopped(name: str, place: tuple[str, int]) -> None:
        with pytest.raises(Interrupted, match="SIGTERM"):
            run(name, {place: by_signal(signal.SIGTERM)})
        assert checkpoints(folder / name)[-1] == "step_00000005"

    run("whole")
    run("back")
    run("back", resume="step_3")
    with pytest.raises(ValueError, match="there is no checkpoint step_4"):
        run("back", resume="step_4")
    stopped("finished", ("train_step", 4))
    os.environ["TORCHELASTIC_RUN_ID"] = "as under torchrun"
    stopped("left", ("train_step", 5))
    for name in ("finished", "left"):
        run(name, resume=True)


@pytest.mark.dist
def test_two_processes_stop_together(tmp_path):
    for name in ("whole", "back", "finished", "left"):
        counting_config(tmp_path / name)  # writes the data
    run_distributed(stop_together, 2, tmp_path)
    results = [result_of(tmp_path / name) for name in ("whole", "finished", "left", "back")]
    assert results[0] == results[1] == results[2] == results[3] == result_of(tmp_path / "back", "run/later.1")
    assert len(read_lines(tmp_path / "whole" / "run" / "samples.jsonl")) == 15  # from one of the processes
