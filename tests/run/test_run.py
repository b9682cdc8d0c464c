"""What a run leaves in its folder: logs, checkpoints, the best policy, the model and the summary."""

import json
import math
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from rlft_fast.errors import Interrupted, StepError
from rlft_fast.rewards import RewardError
from rlft_fast.run.folder import MARKER
from rlft_fast.run.progress import Progress
from rlft_fast.run.records import RunLog, trackers
from rlft_fast.run.run import DivergedError
from rlft_fast.trainer import Run
from tests.run.counting import (
    CountingTrainer,
    by_signal,
    checkpoints,
    count,
    counting_config,
    raising,
    result_of,
    rows_of,
)
from tests.support.runs.curves import without_matplotlib
from tests.trainer.toy import FILES, read_lines


@pytest.fixture(autouse=True)
def without_curves() -> None:
    """Here they may be drawn."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> tuple[Path, dict]:
    """Folder and summary of a run that draws its curve."""
    folder = tmp_path_factory.mktemp("counted")
    return folder, count(folder, draws=True, log_tokens_mib=1)


# ---- a run that ends as planned -------------------------------------------------------------------------------------


def test_files(counted):
    noted = {"timeline.png"}  # the counting trainer notes no work
    assert {path.name for path in (counted[0] / "run").iterdir()} == FILES - noted | {"tokens"}
    assert imread(counted[0] / "run" / "curve.png").std() > 0.01  # a blank picture has none
    assert sorted(os.listdir(counted[0] / "run" / "tokens")) == [f"step_{i:08d}.safetensors" for i in range(1, 7)]


def test_lines(counted):
    """A step takes two prompts or three from the stream, in turn. An evaluation is one line, after its step."""
    rows = rows_of(counted[0])
    assert [(row["step"], "accuracy" in row) for row in rows] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True), (5, False), (6, False),
        (6, True),
    ]  # fmt: skip
    samples = read_lines(counted[0] / "run" / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [1] * 2 + [2] * 3 + [3] * 2 + [4] * 3 + [5] * 2 + [6] * 3
    assert [sample["prompt"] for sample in samples] == [f"prompt {i}" for i in range(15)]


def test_the_model_and_the_last_evaluation_are_of_the_last_step(counted):
    torch.manual_seed(1)
    total = 0.0
    for step, first_prompt in enumerate((0, 2, 5, 7, 10, 12)):
        total = total / 2 + torch.rand(()).item() + first_prompt + step
    assert json.loads((counted[0] / "run" / "hf" / "total.json").read_text()) == total
    steps = [row for row in rows_of(counted[0]) if "seconds" in row]
    assert steps[-1]["total"] == counted[1]["accuracy_after"] == total


def test_summary(counted):
    """Six steps of 3 s, with 8 tokens a second for each prompt."""
    folder, summary = counted
    assert json.loads((folder / "run" / "summary.json").read_text()) == summary
    assert summary == {
        "accuracy_before": 0.0, "accuracy_after": rows_of(folder)[-1]["accuracy"], "steps": 6, "minutes": 0.3,
        "tokens_per_second": 20.0,
    }  # fmt: skip


def test_what_is_shown(tmp_path, capsys):
    count(tmp_path, accuracy={0: 0.125, 2: 0.5, 4: 0.5, 6: 0.75})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["this run counts", "step 0  accuracy 0.125", "step 1  tokens_per_second 16"]
    assert lines.index("warning: step 3: three") + 1 == lines.index("step 3  tokens_per_second 16")
    for prompt, before, after in (("sun", "0 after 0", "0 after 6"), ("moon", "1 after 0", "1 after 6")):
        assert any(prompt in line and before in line and after in line for line in lines)
    assert lines[-2:] == [
        "held-out accuracy 0.125 -> 0.750 on 2 problems, 0.3 minutes of training",
        f"the model is in {tmp_path / 'run' / 'hf'}, numbers and samples of each step beside it",
    ]


def test_a_run_without_a_held_out_set(tmp_path, capsys):
    assert count(tmp_path, evaluation=None) == {"steps": 6, "minutes": 0.3, "tokens_per_second": 20.0}
    assert "held-out" not in capsys.readouterr().out


def test_numbers_that_are_not_finite_are_saved_as_none(tmp_path, capsys):
    """As a held-out loss of a model that overflows. JSON has no such number, so no checkpoint was written."""
    with pytest.raises(Interrupted):
        count(tmp_path, {("train_step", 4): by_signal(signal.SIGTERM)}, accuracy={0: math.inf, 2: math.nan, 4: 1.0})
    summary = count(tmp_path, accuracy={6: math.nan}, checkpoint__best="accuracy", resume=True)
    assert checkpoints(tmp_path)[-1] == "step_00000006"
    text = (tmp_path / "run" / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == summary
    assert [summary[name] for name in ("accuracy_before", "accuracy_after")] == [None, None]
    assert "held-out accuracy unknown -> unknown" in capsys.readouterr().out


def test_a_curve_that_cannot_be_drawn_costs_nothing(tmp_path):
    in_the_way = tmp_path / "run" / "curve.png"
    with pytest.warns(UserWarning, match=r"^curve\.png cannot be drawn: .* is a folder, .* \(rlft-fast plot "):
        count(tmp_path, {("train_step", 1): in_the_way.mkdir}, draws=True)
    assert (tmp_path / "run" / "summary.json").is_file()


def test_numbers_of_tokens_that_cannot_be_written_cost_nothing(tmp_path, capsys):
    count(tmp_path, {("train_step", 0): (tmp_path / "run" / "tokens").touch}, steps=2, log_tokens_mib=1)
    assert "warning: step 1: numbers of its tokens are not kept: " in capsys.readouterr().out


def test_lines_that_cannot_be_written_cost_nothing_else(tmp_path, capsys):
    """As on a disk that is full for a step: here no file may grow. Half a line is none."""
    metrics, (soft, hard) = tmp_path / "run" / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    strikes = {("train_step", 1): lambda: limit(metrics.stat().st_size + 10), ("train_step", 2): lambda: limit(soft)}
    try:
        count(tmp_path, strikes, steps=3, evaluation=None)
    finally:
        limit(soft)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 3]
    assert capsys.readouterr().out.count("warning: step 2: lines of metrics.jsonl are not kept: ") == 1
    assert checkpoints(tmp_path) == ["step_00000003"]


def test_text_that_is_no_unicode_is_written(tmp_path):
    log = RunLog(tmp_path, 1, 0)
    log.sample(1, completion="half \ud83d")
    assert read_lines(tmp_path / "samples.jsonl") == [{"step": 1, "completion": "half \ud83d"}]


def test_the_last_evaluation_is_of_the_model_where_steps_were_lowered(tmp_path):
    """Below the steps that the run has made: it ends at once."""
    with pytest.raises(Interrupted):
        count(tmp_path, {("train_step", 4): by_signal(signal.SIGTERM)})
    summary = count(tmp_path, steps=3, resume=True)
    assert summary["steps"] == 5
    assert summary["accuracy_after"] == total_in(tmp_path, "hf") == totals(tmp_path)[5]


class OtherRows(CountingTrainer):
    """Of another held-out set, by another name: with the same name it would not continue without force."""

    def identity(self) -> Mapping[str, Any]:
        return {**super().identity(), "data": {"held_out_other": {"checksum": 2}}}


def test_numbers_of_another_measure_are_not_compared(tmp_path, capsys):
    """Where the held-out file is moved, they are."""
    path = str(tmp_path / "held_out.jsonl")
    others = {
        "moved": (CountingTrainer, {"path": str(tmp_path / "elsewhere.jsonl")}),
        "shorter": (CountingTrainer, {"path": path, "max_new_tokens": 3}), "rows": (OtherRows, {"path": path}),
    }  # fmt: skip
    for name, (kind, evaluation) in others.items():
        folder = tmp_path / name
        count(folder, steps=2, accuracy={0: 0.125, 2: 0.25}, evaluation={"path": path})
        config = counting_config(folder, steps=4, evaluation=evaluation)
        capsys.readouterr()
        with without_matplotlib():
            summary = Run(kind(config, accuracy={2: 0.5, 4: 1.0})).run(True)
        before = 0.125 if name == "moved" else 0.5
        assert (summary["accuracy_before"], summary["accuracy_after"]) == (before, 1.0)
        told = "the numbers before training are those of step 2" in capsys.readouterr().out
        assert told == (name != "moved")


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "kept"), [(0, [6]), (1, [5, 6]), (2, [4, 6]), (4, [4, 6]), (6, [6])])
def test_checkpoints_that_are_kept(every, kept, tmp_path):
    count(tmp_path, checkpoint__every=every)
    assert checkpoints(tmp_path) == [f"step_{step:08d}" for step in kept]


def test_the_lines_that_a_checkpoint_counts_are_durable_before_it(tmp_path, monkeypatch):
    synced: list[str] = []

    def noting(descriptor: int, sync=os.fsync) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    count(tmp_path, steps=2, checkpoint={"every": 1, "asynchronous": False})
    first, last = synced.index("manifest.json"), len(synced) - synced[::-1].index("manifest.json")
    for part in (synced[:first], synced[first:last]):  # before either checkpoint
        assert {"metrics.jsonl", "samples.jsonl", "run"} <= {*part}


class LogitsError(StepError):
    part = "policy"
    is_divergence = True


def test_weights_that_are_not_finite_are_not_saved(tmp_path, capsys):
    trainer = CountingTrainer(counting_config(tmp_path))
    trainer.strikes = {("added", 6): lambda: trainer.counter.total.fill_(torch.inf)}
    message = (
        r"^step 6 is not saved, because weights of the counter are not finite \(total\): the counter has diverged; "
    )
    with pytest.raises(DivergedError, match=message + "step 3 is saved"):
        Run(trainer).run()
    assert checkpoints(tmp_path) == ["step_00000003"]
    assert not (tmp_path / "run" / "hf").exists()


def test_a_step_that_finds_a_divergence_names_the_checkpoint_that_has_it(tmp_path, capsys):
    with pytest.raises(LogitsError):
        count(tmp_path, {("train_step", 3): raising(LogitsError())})
    newest = tmp_path / "run" / "checkpoints" / "step_00000003"
    words = (
        f"the policy failed after step 3: {newest} has the weights of that step, remove it to continue from an older"
    )
    assert words in capsys.readouterr().out
    with pytest.raises(LogitsError):  # a divergence is not saved, either
        count(tmp_path, {("train_step", 5): raising(LogitsError())}, resume=True)
    assert "the policy failed after step 5: step 3 is saved" in capsys.readouterr().out
    assert checkpoints(tmp_path) == ["step_00000003"]


# ---- the best policy ------------------------------------------------------------------------------------------------


def total_in(folder: Path, name: str) -> float:
    return json.loads((folder / "run" / name / "total.json").read_text())


def totals(folder: Path) -> dict[int, float]:
    return {0: 0.0} | {row["step"]: row["total"] for row in rows_of(folder) if "total" in row}


# The first of equals; none where no answer was judged; negative numbers; the model of the beginning.
@pytest.mark.parametrize(
    ("accuracy", "best"),
    [
        ({0: 0.25, 2: 0.75, 4: 0.75, 6: 0.5}, 2),
        ({0: None, 2: -2.0, 4: -1.0, 6: None}, 4),
        ({0: 0.5, 2: 0.25, 4: 0.25, 6: 0.25}, 0),
    ],
)
def test_the_best_policy_is_kept(accuracy, best, tmp_path):
    summary = count(tmp_path, accuracy=accuracy, checkpoint__best="accuracy")
    assert (summary["best_step"], summary["accuracy_best"]) == (best, accuracy[best])
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (accuracy[0], accuracy[6])
    assert total_in(tmp_path, "best") == totals(tmp_path)[best]


def test_the_best_loss_is_the_lowest_and_the_best_accuracy_the_highest():
    progress = Progress(best={"step": 1, "value": 0.5})
    for name, better in (("accuracy_glossary", 0.6), ("held_out_loss_sums", 0.4), ("held_out_pair_accuracy", 0.6)):
        assert progress.is_best(name, better)
        assert not progress.is_best(name, 1 - better)
        found = [Progress().is_best(name, value) for value in (None, math.nan, math.inf, -math.inf, -9.0)]
        assert found == [False, False, False, False, True]


def test_the_best_policy_survives_a_run_that_goes_on(tmp_path):
    accuracy = {0: 0.25, 2: 0.75, 4: 0.5, 6: 0.25}
    changes = {"accuracy": accuracy, "checkpoint__best": "accuracy"}
    count(tmp_path, steps=2, **changes)
    assert count(tmp_path, steps=4, resume=True, **changes)["best_step"] == 2
    assert total_in(tmp_path, "best") == totals(tmp_path)[2]
    # Another measure: the value of step 2 is not compared with it.
    changes["evaluation"] = {"path": str(tmp_path / "held_out.jsonl"), "max_new_tokens": 3}
    summary = count(tmp_path, steps=6, resume=True, force=True, **changes)
    assert (summary["best_step"], summary["accuracy_best"]) == (4, 0.5)
    assert total_in(tmp_path, "best") == totals(tmp_path)[4]


def test_a_best_policy_that_cannot_be_written_costs_nothing(tmp_path, capsys):
    config = counting_config(tmp_path, checkpoint__best="accuracy")
    trainer = CountingTrainer(config, full_disk=["best"])
    with without_matplotlib():
        summary = Run(trainer).run()
    assert summary["steps"] == 6
    assert "best_step" not in summary
    words = "warning: the best policy so far, of step 2, is not kept: the disk is full"
    assert words in capsys.readouterr().out


# ---- the folder -----------------------------------------------------------------------------------------------------


def test_starting_anew_replaces_the_run(tmp_path):
    """Its checkpoint is the older one by number."""
    accuracy = {0: 0.5, 2: 0.25, 4: 0.25, 6: 0.25}
    count(tmp_path, accuracy=accuracy, checkpoint__best="accuracy")
    count(tmp_path, steps=1, evaluation=None)
    assert [row["step"] for row in rows_of(tmp_path)] == [1]
    assert checkpoints(tmp_path) == ["step_00000001"]
    assert not (tmp_path / "run" / "best").exists()


def test_a_run_that_fails_has_no_summary_of_an_earlier_one(tmp_path):
    count(tmp_path, steps=1)
    with pytest.raises(RewardError):
        count(tmp_path, {("train_step", 0): raising(RewardError("no"))})
    assert not (tmp_path / "run" / "summary.json").exists()


def test_logs_of_a_run_without_a_checkpoint_are_kept(tmp_path, capsys):
    def dies(**options) -> None:
        with pytest.raises(KeyboardInterrupt):
            count(tmp_path, {("train_step", 2): raising(KeyboardInterrupt())}, log_tokens_mib=1, **options)

    run, names = tmp_path / "run", ("metrics.jsonl", "samples.jsonl")
    dies()
    first = {name: (run / name).read_bytes() for name in names}
    assert all(first.values())
    for number, resume in ((1, False), (2, True)):
        dies(resume=resume)
        kept = " and ".join(f"{x}.{number}.jsonl" for x in ("metrics", "samples", "timeline")) + f" and tokens.{number}"
        assert f"logs of a run that saved no checkpoint are kept as {kept}\n" in capsys.readouterr().out
    assert {name: (run / name.replace(".", ".1.")).read_bytes() for name in names} == first
    count(tmp_path)
    assert [row["step"] for row in rows_of(tmp_path) if "seconds" in row] == [1, 2, 3, 4, 5, 6]
    assert len([*run.glob("metrics*.jsonl")]) == 4


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted((folder / "run").rglob("*")) if path.is_file()}


def test_another_run_is_not_continued(tmp_path):
    count(tmp_path, steps=3)
    before = everything(tmp_path)
    message = f"cannot continue the run in {tmp_path / 'run'}, whose settings differ: seed was 1 and is 2"
    with pytest.raises(ValueError, match=message):
        count(tmp_path, seed=2, resume=True)
    assert everything(tmp_path) == before
    assert count(tmp_path, seed=2, resume=True, force=True, steps=4)["steps"] == 4
    assert count(tmp_path, seed=2, resume=True, steps=5)["steps"] == 5  # it is that run now
    assert [row["step"] for row in rows_of(tmp_path) if "seconds" in row] == [1, 2, 3, 4, 5]


def test_a_run_of_a_version_without_a_marker_is_continued(tmp_path):
    count(tmp_path / "whole")
    count(tmp_path / "early", steps=2)
    (tmp_path / "early" / "run" / MARKER).unlink()
    count(tmp_path / "early", resume=True)
    assert result_of(tmp_path / "early") == result_of(tmp_path / "whole")


# ---- trackers -------------------------------------------------------------------------------------------------------


def test_trackers_get_steps_in_order_and_texts_as_asked(tmp_path, monkeypatch):
    """After a resume they learn from which step on numbers may come again."""
    got: list[tuple] = []

    class Noting:
        def __init__(self, run: trackers.TrackedRun) -> None:
            got.append(("begins", run.first_step, run.id))

        def __enter__(self):
            return lambda step, numbers, texts: got.append((step, sorted(numbers), [text["prompt"] for text in texts]))

        def __exit__(self, kind, *_) -> None:
            got.append(("ends", kind is not None))

    monkeypatch.setitem(trackers._CONNECT, "tensorboard", Noting)
    changes = {"log": ["jsonl", "tensorboard"], "log_texts": 2, "steps": 5, "evaluation__every": 4}
    with pytest.raises(RewardError):
        count(tmp_path, {("train_step", 1): raising(RewardError("no"))}, **changes)
    count(tmp_path, resume=True, **changes | {"steps": 2})
    run_id = json.loads((tmp_path / "run" / MARKER).read_text())["id"]
    numbers = ["seconds", "tokens_per_second", "total"]
    assert got == [
        ("begins", 0, run_id), (0, ["accuracy"], []), (1, numbers, ["prompt 0", "prompt 1"]), ("ends", True),
        ("begins", 1, run_id), (2, numbers, ["prompt 2", "prompt 3"]), (2, ["accuracy"], []), ("ends", False),
    ]  # fmt: skip
