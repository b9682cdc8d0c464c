"""Real runs that end in each way: as planned, by a signal, by a step that fails, by a kill; alone and by torchrun.

`test_resume` has every other way, with a trainer that counts.
"""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlft_fast.cli import main
from rlft_fast.config import Config
from rlft_fast.errors import Interrupted
from rlft_fast.rewards import RewardError
from rlft_fast.rl import AdvantageError, PolicyLossError
from rlft_fast.trainer import PPOTrainer, Run, train
from tests.support.machine.distributed import run_distributed
from tests.trainer.struck import FEWER_OPTIONS, IN_STEP_5, OPTIONS, assert_same_result, write_config
from tests.trainer.toy import FILES, HERE, WORDS, comparable, read_lines, toy_config, toy_values, write_rows


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("shallow")


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert main(["train", str(write_config(model, folder))]) == 0
    return folder / "run"


def test_the_uninterrupted_run_has_every_line_once(uninterrupted):
    rows = comparable(uninterrupted)
    assert [row["step"] for row in rows if "accuracy" in row] == [0, 2, 4, 6]
    steps = [row for row in rows if "accuracy" not in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    samples = read_lines(uninterrupted / "samples.jsonl")
    for row in steps:  # rewards are logged as they were, beside the moments that they are made relative to
        rewards = [sample["reward"] for sample in samples if sample["step"] <= row["step"]]
        assert 0 <= min(rewards) < max(rewards) <= 1
        assert row["reward_running_mean"] == pytest.approx(np.mean(rewards))
        assert row["reward_running_std"] == pytest.approx(np.std(rewards))


@pytest.mark.slow
@pytest.mark.long  # crash-test kills runs of two processes
def test_killed(model, uninterrupted, tmp_path):
    config = write_config(model, tmp_path, OPTIONS | {"checkpoint__asynchronous": False})  # complete when step 4 begins
    (tmp_path / "strike").write_text(f"SIGKILL {IN_STEP_5} 0")
    killed = subprocess.run([sys.executable, "-m", "rlft_fast", "train", str(config)], capture_output=True)
    assert killed.returncode == -9
    assert comparable(tmp_path / "run")[-1]["step"] == 4  # written after the checkpoint, so it must come again
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000003"]
    assert main(["train", str(config), "--resume"]) == 0
    assert_same_result(tmp_path / "run", uninterrupted)


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
    assert main(["train", str(config), "--resume"]) == 0
    assert_same_result(tmp_path / "run", uninterrupted)


def test_a_checkpoint_of_another_model_leaves_no_worker_behind(model, tiny_model, tmp_path):
    train(toy_config(model, tmp_path, steps=1))
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "fog", "answer": 3}])
    quick = HERE.parents[1] / "rewards" / "misbehaving.py"  # imports no torch
    changes = {
        "reward__function": f"{quick}:even_share", "reward__timeout_s": 60, "reward__workers": 1,
        "evaluation": {"path": str(held_out)},
    }  # fmt: skip
    trainer = PPOTrainer(toy_config(tiny_model("qwen2"), tmp_path, **changes))
    trainer.evaluate()
    assert multiprocessing.active_children()
    with pytest.raises(ValueError, match=r"checksum\.model was"):
        Run(trainer).run(resume=True)
    assert not multiprocessing.active_children()


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


# ---- two processes --------------------------------------------------------------------------------------------------


def run_interrupted(rank: int, folders: dict[str, Path]) -> None:
    """A reward function that fails, and a signal, on the second process only; then resumed."""
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


def train_here(rank: int, config: Config) -> None:
    train(config)


@pytest.fixture(scope="module")
def of_two_processes(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_processes")
    run_distributed(train_here, 2, Config.load(write_config(model, folder, FEWER_OPTIONS)))
    return folder / "run"


@pytest.mark.dist
def test_two_processes_write_everything_once(of_two_processes):
    assert {path.name for path in of_two_processes.iterdir()} == FILES
    rows = comparable(of_two_processes)
    assert [row["step"] for row in rows if "accuracy" in row] == [0, 2, 4, 6]
    assert [row["step"] for row in rows if "accuracy" not in row] == [1, 2, 3, 4, 5, 6]
    assert len(read_lines(of_two_processes / "samples.jsonl")) == 6 * 16
    assert rows[1]["ratio_max"] == 1.0  # the first step


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_stop_together(model, of_two_processes, tmp_path):
    folders = {how: tmp_path / how for how in ("raise", "SIGINT", "SIGTERM")}
    for how, folder in folders.items():
        write_config(model, folder, FEWER_OPTIONS)
        (folder / "strike").write_text(f"{how} {IN_STEP_5} 1")
    run_distributed(run_interrupted, 2, folders)
    for folder in folders.values():
        assert_same_result(folder / "run", of_two_processes)


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


# In the third step, whose only optimizer step has not begun; and in the second step, after the first of two.
@pytest.mark.parametrize(("mini_batches", "call", "done", "saved"), [(1, 9, 2, ["step_00000002"]), (2, 13, 1, [])])
def test_an_own_loss_that_fails_is_named_and_loses_no_step(mini_batches, call, done, saved, model, tmp_path):
    loss = f"{HERE.with_name('my_methods.py')}:fails_once"
    os.utime(HERE.with_name("my_methods.py"))  # the file runs again, and counts from 1
    options = {"algorithm__policy_loss": loss, "algorithm__mini_batches": mini_batches, "steps": 4}
    config = toy_config(model, tmp_path, **options, algorithm__loss_options={"call": call})
    with pytest.raises(PolicyLossError, match="policy loss fails_once raised ZeroDivisionError: division by zero"):
        train(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == saved
    assert [row["step"] for row in comparable(tmp_path / "run")] == [*range(1, done + 1)]
    if saved:
        train(config, resume=True)
        train(config.model_copy(update={"output_dir": str(tmp_path / "whole")}))
        assert comparable(tmp_path / "run") == comparable(tmp_path / "whole")


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
def test_a_killed_rank_is_named_and_torchrun_goes_on(model, of_two_processes, tmp_path):
    config = write_config(model, tmp_path, FEWER_OPTIONS | {"checkpoint__asynchronous": False})
    (tmp_path / "strike").write_text(f"SIGKILL {IN_STEP_5} 1")
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "rlft_fast", "train"]
    result = subprocess.run([*command, str(config), "--resume"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    # torchrun may end rank 0 before it can name rank 1 (tests/world/test_failures.py), and then does so itself.
    assert "(exitcode: -9) local_rank: 1" in result.stderr
    assert_same_result(tmp_path / "run", of_two_processes)
