"""A run that was interrupted, whichever way, ends with the same numbers and weights as one that was not."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlft_fast.cli import main
from rlft_fast.config import Config
from rlft_fast.errors import Interrupted
from rlft_fast.rewards import RewardError
from rlft_fast.rl import AdvantageError
from rlft_fast.trainer import PPOTrainer, Run, train
from rlft_fast.trainer.folder import claim
from rlft_fast.trainer.log import RunLog
from tests.support.distributed import run_distributed
from tests.trainer.test_experience import check_gathering_on_two_ranks
from tests.trainer.toy import HERE, WORDS, comparable, read_lines, toy_config, toy_values, write_rows

# Everything that has a state: critic, reference, several optimizer steps per rollout, a schedule, evaluations.
OPTIONS = {
    "steps": 6,
    "reward__function": f"{HERE}:even_share_until_struck",
    "algorithm": {"advantage": "gae", "kl_coef": 0.01, "kl_in": "reward", "epochs": 2, "mini_batches": 2},
    "critic": {"max_tokens": 64},
    "actor__optimizer__schedule": "cosine",
    "checkpoint__every": 3,
    "evaluation__every": 2,
}
FEWER_OPTIONS = {name: value for name, value in OPTIONS.items() if name not in ("algorithm", "critic")}  # for speed
# Calls of the reward function: 1 evaluation, 2 and 3 steps 1 and 2, 4 evaluation, 5 and 6 steps 3 and 4 (with the
# checkpoint after step 3 between them), 7 evaluation, 8 and 9 steps 5 and 6, 10 evaluation.
BEFORE_THE_FIRST_CHECKPOINT, IN_STEP_4, IN_THE_THIRD_EVALUATION, IN_STEP_5, IN_THE_LAST_EVALUATION = 4, 6, 7, 8, 10


def write_config(model: Path, folder: Path, options: dict[str, Any] = OPTIONS) -> Path:
    """The run of this file, its data and its configuration in `folder`; `strike` there says when it is interrupted."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": word, "strike": str(folder / "strike")} for word in WORDS]
    write_rows(folder / "data.jsonl", rows[:7])
    held_out = write_rows(folder / "held_out.jsonl", rows[7:])
    values = toy_values(model, folder, **options, evaluation__path=str(held_out))
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


def assert_same_result(run: Path, expected: Path) -> None:
    assert comparable(run) == comparable(expected)
    assert read_lines(run / "samples.jsonl") == read_lines(expected / "samples.jsonl")
    weights, expected_weights = (load_file(folder / "hf" / "model.safetensors") for folder in (run, expected))
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
    summary, expected_summary = (json.loads((folder / "summary.json").read_text()) for folder in (run, expected))
    assert summary["accuracy_before"] == expected_summary["accuracy_before"]
    assert summary["accuracy_after"] == expected_summary["accuracy_after"]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert main(["train", str(write_config(model, folder))]) == 0
    return folder / "run"


def test_the_uninterrupted_run_has_every_line_once(uninterrupted):
    rows = comparable(uninterrupted)
    assert [row["step"] for row in rows if "accuracy" in row] == [0, 2, 4, 6]
    assert [row["step"] for row in rows if "accuracy" not in row] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_killed(model, uninterrupted, tmp_path):
    config = write_config(model, tmp_path, OPTIONS | {"checkpoint__asynchronous": False})  # complete when step 4 begins
    (tmp_path / "strike").write_text(f"SIGKILL {IN_STEP_5} 0")
    killed = subprocess.run([sys.executable, "-m", "rlft_fast", "train", str(config)], capture_output=True)
    assert killed.returncode == -9
    assert comparable(tmp_path / "run")[-1]["step"] == 4  # written after the checkpoint, so it must come again
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000003"]
    assert main(["train", str(config), "--resume"]) == 0
    assert_same_result(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_scheduler_that_ends_the_run_loses_no_step(name, status, model, tmp_path, capsys):
    config = write_config(model, tmp_path, FEWER_OPTIONS)
    (tmp_path / "strike").write_text(f"{name} {IN_STEP_5} 0")
    assert main(["train", str(config)]) == status
    out = capsys.readouterr().out
    assert f"{name}: stopping after this step, then saving" in out
    assert f"stopped after step 5: step 5 is saved in {tmp_path / 'run'}, continue with --resume" in out
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step_00000003", "step_00000005"}


def test_sighup_is_left_alone_under_nohup(model, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    (tmp_path / "strike").write_text("SIGHUP 1 0")
    try:
        assert main(["train", str(write_config(model, tmp_path, FEWER_OPTIONS | {"steps": 1}))]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not (tmp_path / "strike").exists()


def test_ctrl_c_finishes_the_step_and_saves(model, uninterrupted, tmp_path, capsys):
    config = write_config(model, tmp_path)
    (tmp_path / "strike").write_text(f"SIGINT {IN_STEP_5} 0")
    assert main(["train", str(config)]) == 130
    captured = capsys.readouterr()
    assert f"stopped after step 5: step 5 is saved in {tmp_path / 'run'}, continue with --resume" in captured.out
    assert f"`rlft-fast export {tmp_path / 'run'}` writes its model" in captured.out
    assert captured.err.endswith("interrupted\n")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert main(["train", str(config), "--resume"]) == 0
    assert_same_result(tmp_path / "run", uninterrupted)


# 1: in the evaluation before the first step.
def test_ctrl_c_before_the_first_step_saves_nothing(model, tmp_path, capsys):
    (tmp_path / "strike").write_text("SIGINT 1 0")
    assert main(["train", str(write_config(model, tmp_path))]) == 130
    assert "stopped after step 0: nothing was learned yet, so nothing is saved" in capsys.readouterr().out
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("call", [BEFORE_THE_FIRST_CHECKPOINT, IN_THE_LAST_EVALUATION])
@pytest.mark.thin(2)
def test_death_without_saving(call, model, uninterrupted, tmp_path, capsys):
    config = write_config(model, tmp_path)
    (tmp_path / "strike").write_text(f"die {call} 0")
    assert main(["train", str(config)]) == 130
    capsys.readouterr()
    assert main(["train", str(config), "--resume"]) == 0
    message = f"no checkpoint in {tmp_path / 'run' / 'checkpoints'}: starting from the beginning"
    assert (message in capsys.readouterr().out) == (call == BEFORE_THE_FIRST_CHECKPOINT)
    assert_same_result(tmp_path / "run", uninterrupted)


def test_a_reward_function_that_raises_loses_nothing(model, uninterrupted, tmp_path, capsys):
    config = write_config(model, tmp_path)
    (tmp_path / "strike").write_text(f"raise {IN_STEP_5} 0")
    assert main(["train", str(config)]) == 1
    captured = capsys.readouterr()
    assert (
        f"the reward function failed after step 4: step 4 is saved in {tmp_path / 'run'}, continue with --resume"
        in captured.out
    )
    assert "error: reward function even_share_until_struck raised RuntimeError on a batch of 16" in captured.err
    assert (tmp_path / "run" / "checkpoints" / "step_00000004").is_dir()
    # Again: what is saved already stays as it is.
    (tmp_path / "strike").write_text("raise 1 0")
    assert main(["train", str(config), "--resume"]) == 1
    assert main(["train", str(config), "--resume"]) == 0
    assert_same_result(tmp_path / "run", uninterrupted)


def test_what_could_not_be_written_in_the_background_is_not_called_saved(model, tmp_path, capsys):
    config = write_config(model, tmp_path)
    (tmp_path / "strike").write_text(f"raise {IN_STEP_4} 0")
    claim(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir()
    for step in range(1, 6):  # files where folders should be
        (tmp_path / "run" / "checkpoints" / f"step_{step:08d}.incomplete").touch()
    with pytest.warns(UserWarning, match="could not save checkpoint"):
        assert main(["train", str(config)]) == 1
    captured = capsys.readouterr()
    assert "is saved" not in captured.out
    assert "error: could not save checkpoint" in captured.err


def test_an_evaluation_that_the_reward_function_spoiled_is_made_up_for(model, uninterrupted, tmp_path):
    config = write_config(model, tmp_path)
    (tmp_path / "strike").write_text(f"raise {IN_THE_THIRD_EVALUATION} 0")
    assert main(["train", str(config)]) == 1
    assert main(["train", str(config), "--resume"]) == 0
    assert_same_result(tmp_path / "run", uninterrupted)


def test_an_evaluation_that_is_new_when_resuming_is_of_that_step(model, tmp_path):
    train(toy_config(model, tmp_path, steps=2))
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "fog", "answer": 3}])
    train(toy_config(model, tmp_path, steps=3, evaluation={"path": str(held_out), "every": 1}), resume=True)
    assert [row["step"] for row in comparable(tmp_path / "run") if "accuracy" in row] == [2, 3]


def test_a_checkpoint_of_another_model_leaves_no_worker_behind(model, tiny_model, tmp_path):
    train(toy_config(model, tmp_path, steps=1))
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "fog", "answer": 3}])
    changes = {"reward__timeout_s": 60, "reward__workers": 1, "evaluation": {"path": str(held_out)}}
    trainer = PPOTrainer(toy_config(tiny_model("qwen2"), tmp_path, **changes))
    trainer.evaluate()
    assert multiprocessing.active_children()
    with pytest.raises(ValueError, match=r"checksum\.model was"):
        Run(trainer).run(resume=True)
    assert not multiprocessing.active_children()


def test_resuming_a_finished_run_does_not_train(model, uninterrupted, tmp_path):
    config = write_config(model, tmp_path)
    assert main(["train", str(config)]) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000006" / "state.json"
    saved = checkpoint.stat().st_mtime_ns
    (tmp_path / "run" / "summary.json").unlink()
    assert main(["train", str(config), "--resume"]) == 0
    assert checkpoint.stat().st_mtime_ns == saved
    assert_same_result(tmp_path / "run", uninterrupted)


def test_a_run_is_not_overwritten_by_mistake(uninterrupted, capsys):
    before = comparable(uninterrupted)
    assert main(["train", str(uninterrupted.parent / "config.yaml")]) == 1
    message = f"error: {uninterrupted} holds a run with the checkpoint step_00000006: continue it with --resume"
    assert capsys.readouterr().err.startswith(message)
    assert comparable(uninterrupted) == before


def test_a_folder_that_holds_a_run_hides_no_other_mistake(uninterrupted, tmp_path, capsys):
    before = comparable(uninterrupted)
    options = ["--data.path", str(tmp_path / "none.jsonl"), "--reward.function", "no_module:f"]
    assert main(["train", str(uninterrupted.parent / "config.yaml"), *options]) == 1
    first, *others = capsys.readouterr().err.splitlines()[:4]
    assert first == "error: 3 mistakes:"
    messages = ("holds a run with the checkpoint", "no module 'no_module'", "cannot read the data")
    assert all(f" {i}. " in others[i - 1] and message in others[i - 1] for i, message in enumerate(messages, start=1))
    assert comparable(uninterrupted) == before


def test_starting_anew_from_python_replaces_the_run(model, tmp_path):
    train(toy_config(model, tmp_path, steps=3))
    train(toy_config(model, tmp_path, steps=1))  # its checkpoint is the older one by number
    assert [row["step"] for row in comparable(tmp_path / "run")] == [1]
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001"]


def test_a_run_that_fails_has_no_summary_of_an_earlier_one(model, tmp_path):
    train(toy_config(model, tmp_path, steps=1))
    with pytest.raises(RewardError):
        train(toy_config(model, tmp_path, steps=1, reward__function=f"{HERE}:raises"))
    assert not (tmp_path / "run" / "summary.json").exists()


def test_unusual_line_separators_in_samples_survive(tmp_path):
    log = RunLog(tmp_path, num_steps=2, rank=0)
    log.sample(1, completion="one\u2028two\x85three")
    sizes = log.num_bytes()
    log.sample(2, completion="after the checkpoint")
    log.rewind(1, sizes | {"metrics.jsonl": 99})  # which somebody has deleted
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    lines = (tmp_path / "samples.jsonl").read_text().split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [{"step": 1, "completion": "one\u2028two\x85three"}]


# ---- two processes --------------------------------------------------------------------------------------------------


def run_interrupted(rank: int, folders: dict[str, Path]) -> None:
    """A reward function that fails, and a signal, on the second process only; then resumed."""
    check_gathering_on_two_ranks(rank)
    configs = {how: Config.load(folder / "config.yaml") for how, folder in folders.items()}
    with pytest.raises(RewardError, match=f"{'rank 1: ' * (rank == 0)}.*the judge does not answer"):
        train(configs["raise"])
    assert (folders["raise"] / "run" / "checkpoints" / "step_00000004").is_dir()
    with pytest.raises(KeyboardInterrupt):
        train(configs["SIGINT"])
    os.environ["TORCHELASTIC_RUN_ID"] = "as under torchrun"
    with pytest.raises(Interrupted, match="SIGTERM"):
        train(configs["SIGTERM"])
    assert (folders["SIGTERM"] / "run" / "checkpoints" / "step_00000004").is_dir()  # step 5 was left
    for config in configs.values():
        train(config, resume=True)


@pytest.fixture(scope="module")
def by_torchrun(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "rlft_fast", "train"]
    config = write_config(model, folder, FEWER_OPTIONS)
    result = subprocess.run([*command, str(config)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder / "run"


@pytest.mark.dist
def test_torchrun_writes_everything_once(by_torchrun):
    names = {
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "summary.json",
        "checkpoints",
        "hf",
        "curve.png",
        "run.json",
    }
    assert {path.name for path in by_torchrun.iterdir()} == names
    rows = comparable(by_torchrun)
    assert [row["step"] for row in rows if "accuracy" in row] == [0, 2, 4, 6]
    assert [row["step"] for row in rows if "accuracy" not in row] == [1, 2, 3, 4, 5, 6]
    assert len(read_lines(by_torchrun / "samples.jsonl")) == 6 * 16
    assert rows[1]["ratio_max"] == 1.0  # the first step


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_stop_together(model, by_torchrun, tmp_path):
    folders = {how: tmp_path / how for how in ("raise", "SIGINT", "SIGTERM")}
    for how, folder in folders.items():
        write_config(model, folder, FEWER_OPTIONS)
        (folder / "strike").write_text(f"{how} {IN_STEP_5} 1")
    run_distributed(run_interrupted, 2, folders)
    for folder in folders.values():
        assert_same_result(folder / "run", by_torchrun)


def train_with_an_advantage_that_fails(rank: int, config: Config) -> None:
    message = f"{'rank 1: ' * (rank == 0)}.*fails_in_step_3 raised ZeroDivisionError: division by zero"
    with pytest.raises(AdvantageError, match=message):
        train(config)
    assert (Path(config.output_dir) / "checkpoints" / "step_00000002").is_dir()
    train(config, resume=True)


@pytest.mark.dist
@pytest.mark.slow
def test_an_own_advantage_that_fails_on_one_of_two_processes_loses_nothing(model, tmp_path):
    advantage = f"{HERE.with_name('my_methods.py')}:fails_in_step_3"
    config = toy_config(model, tmp_path, steps=4, algorithm__advantage=advantage)
    run_distributed(train_with_an_advantage_that_fails, 2, config)
    assert [row["step"] for row in comparable(tmp_path / "run")] == [1, 2, 3, 4]


def train_on_own_data(rank: int, folder: Path) -> None:
    """Every process in a folder of its own, as on machines that do not share their disks."""
    os.chdir(folder / str(rank))
    with pytest.raises(ValueError, match=r"disagree on the training data: .*checksum is .* on rank 1 and .* on rank 0"):
        train(Config.load(folder / "config.yaml"))


@pytest.mark.dist
def test_two_processes_with_other_data_refuse_it(model, tmp_path):
    for rank, words in enumerate((WORDS[1:5], WORDS[5:9])):  # as many rows, and tokens
        (tmp_path / str(rank)).mkdir()
        write_rows(tmp_path / str(rank) / "data.jsonl", [{"prompt": word} for word in words])
    values = toy_values(model, tmp_path, steps=1, data__path="data.jsonl")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    run_distributed(train_on_own_data, 2, tmp_path)


@pytest.mark.dist
@pytest.mark.slow
def test_a_killed_rank_is_named_and_torchrun_goes_on(model, by_torchrun, tmp_path):
    config = write_config(model, tmp_path, FEWER_OPTIONS | {"checkpoint__asynchronous": False})
    (tmp_path / "strike").write_text(f"SIGKILL {IN_STEP_5} 1")
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "rlft_fast", "train"]
    result = subprocess.run([*command, str(config), "--resume"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    # torchrun may end rank 0 before it can name rank 1 (tests/world/test_failures.py), and then does so itself.
    assert "(exitcode: -9) local_rank: 1" in result.stderr
    assert_same_result(tmp_path / "run", by_torchrun)
