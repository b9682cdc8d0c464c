"""A signal in a step: where torchrun would kill the run before the step's end, the step is left and nothing is lost."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlft_fast.cli import main
from rlft_fast.engine import FSDPEngine
from rlft_fast.rollout.hf import HFGenerator
from tests.trainer.struck import FEWER_OPTIONS, IN_STEP_5, OPTIONS, assert_same_result, write_config
from tests.trainer.toy import HERE, comparable

# The adaptive coefficient changes before the update that the signal may end.
UPDATES = OPTIONS | {
    "steps": 3, "checkpoint__every": 0, "evaluation__every": 0, "reward__function": f"{HERE}:even_share",
    "rollout__batch_size": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("shallow")


@pytest.fixture(scope="module")
def unstopped(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unstopped")
    assert main(["train", str(write_config(model, folder, UPDATES))]) == 0
    return folder / "run"


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Has SIGTERM come as a call of a method begins, as under torchrun; the list that it returns counts the calls."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "as under torchrun")

    def arm(owner: type, name: str, call: int) -> list[int]:
        calls: list[int] = []
        method = getattr(owner, name)

        def counting(self, *args, **kwargs):
            calls.append(len(calls) + 1)
            if len(calls) == call:
                signal.raise_signal(signal.SIGTERM)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counting)
        return calls

    return arm


def stop_and_resume(model: Path, folder: Path, unstopped: Path, capsys) -> str:
    """What the stopped run said; resumed, it ends as the unstopped one did."""
    config = write_config(model, folder, UPDATES)
    assert main(["train", str(config)]) == 143
    said = capsys.readouterr().out
    assert main(["train", str(config), "--resume"]) == 0
    assert_same_result(folder / "run", unstopped)
    return said


# A step asks three models once each, and then takes four optimizer steps of the critic and four of the policy.
@pytest.mark.parametrize(("method", "call"), [("infer", 3 + 2), ("train_step", 8 + 1)])
@pytest.mark.thin(3)
def test_before_the_first_optimizer_step_the_step_is_left(method, call, model, unstopped, signal_at, tmp_path, capsys):
    calls = signal_at(FSDPEngine, method, call)
    said = stop_and_resume(model, tmp_path, unstopped, capsys)
    assert "SIGTERM: leaving this step, then saving the last complete one" in said
    assert f"stopped after step 1: step 1 is saved in {tmp_path / 'run'}, continue with --resume" in said
    per_step = {"infer": 3, "train_step": 8}[method]
    assert len(calls) == call + 2 * per_step


@pytest.mark.parametrize(("method", "call"), [("_step_optimizer", 8 + 1), ("train_step", 8 + 2)])
@pytest.mark.thin(2)
def test_after_an_optimizer_step_the_step_is_finished(method, call, model, unstopped, signal_at, tmp_path, capsys):
    signal_at(FSDPEngine, method, call)
    said = stop_and_resume(model, tmp_path, unstopped, capsys)
    assert "SIGTERM: finishing this step, which has changed the weights, then saving" in said
    assert "if it takes longer, the newest checkpoint is missing: none was saved yet" in said
    assert "stopped after step 2: step 2 is saved" in said


def test_while_it_samples_the_step_is_left_at_once(model, unstopped, signal_at, tmp_path, capsys):
    """One call before the first step, then one per prompt: those of the third and fourth prompt are not made."""
    calls = signal_at(HFGenerator, "_generate", 1 + 4 + 3)
    assert "stopped after step 1: step 1 is saved" in stop_and_resume(model, tmp_path, unstopped, capsys)
    assert len(calls) == 8 + 2 * 4 + 1


def test_an_evaluation_is_left_at_once(model, unstopped, signal_at, tmp_path, capsys, monkeypatch):
    """Also where no torchrun would kill the run: the last of its evaluations, which the resumed run makes."""
    calls = signal_at(HFGenerator, "_generate", 1 + 3 * 4 + 1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert "stopped after step 3: step 3 is saved" in stop_and_resume(model, tmp_path, unstopped, capsys)
    assert len(calls) == 1 + 3 * 4 + 1 + 1


# ---- real ones ------------------------------------------------------------------------------------------------------


def start(command: list[str], log: Path, **options) -> subprocess.Popen[bytes]:
    with open(log, "wb") as output:
        return subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=output, **options)


def wait_for(condition: Callable[[], bool], log: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def waits_in_step_5(completion_ids: list[list[int]], strike: list[str], **_) -> list[float | None]:
    """Says that it is called for the seventh time, and then takes longer than torchrun waits."""
    waits_in_step_5.calls += 1
    if waits_in_step_5.calls == IN_STEP_5:
        (Path(strike[0]).parent / f"waiting_{os.environ['RANK']}").touch()
        time.sleep(120)
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


waits_in_step_5.calls = 0


def waits(strike: list[str], **_) -> list[float]:
    Path(strike[0]).with_name("waiting").touch()
    time.sleep(120)
    return [0.0] * len(strike)


@pytest.mark.slow
def test_a_second_ctrl_c_waits_for_no_reward(model, tmp_path):
    """A terminal sends it to the run's workers, too."""
    options = FEWER_OPTIONS | {"reward__function": f"{Path(__file__)}:waits", "reward__timeout_s": 120.0}
    config, log = write_config(model, tmp_path, options), tmp_path / "log"
    # An evaluation, with which the run would begin, is left at the first Ctrl-C.
    process = start(["rlft_fast", "train", str(config), "--evaluation", "null"], log, start_new_session=True)
    wait_for((tmp_path / "waiting").exists, log)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.killpg(process.pid, signal.SIGINT)
    wait_for(lambda: b"Ctrl-C: " in log.read_bytes(), log)
    time.sleep(1)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    started = time.monotonic()
    assert process.wait(60) == 130
    assert time.monotonic() - started < 10
    assert psutil.wait_procs(children, timeout=10)[1] == []


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_torchrun_is_done_long_before_it_kills(number, model, tmp_path):
    options = FEWER_OPTIONS | {"reward__function": f"{Path(__file__)}:waits_in_step_5"}
    config, log = write_config(model, tmp_path, options), tmp_path / "log"
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "-m", "rlft_fast", "train", str(config)]
    process = start(torchrun, log)
    wait_for(lambda: all((tmp_path / f"waiting_{rank}").exists() for rank in range(2)), log)
    children = psutil.Process(process.pid).children(recursive=True)
    started = time.monotonic()
    process.send_signal(number)
    assert process.wait(60) == 1  # torchrun's own
    assert time.monotonic() - started < 15
    assert f"stopped after step 4: step 4 is saved in {tmp_path / 'run'}, continue with --resume" in log.read_text()
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert comparable(tmp_path / "run")[-1]["step"] == 4


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system tells of a parent's end on Linux alone")
def test_torchrun_that_is_killed_leaves_no_process(model, tmp_path):
    config, log = (
        write_config(model, tmp_path, FEWER_OPTIONS | {"steps": 5000, "checkpoint__every": 0}),
        tmp_path / "log",
    )
    process = start(["torch.distributed.run", "--nproc-per-node", "2", "-m", "rlft_fast", "train", str(config)], log)
    wait_for(lambda: b"step 3" in log.read_bytes(), log)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    for child in alive:
        child.kill()
    assert alive == []


@pytest.mark.slow
def test_a_terminal_that_is_closed_loses_no_step(model, tmp_path):
    """What is written to it from then on is an error."""
    config, log = (
        write_config(model, tmp_path, FEWER_OPTIONS | {"steps": 500, "checkpoint__every": 0}),
        tmp_path / "log",
    )
    log.touch()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "rlft_fast", "train", str(config)])
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(comparable(tmp_path / "run")) > 5, log)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step_")) == comparable(tmp_path / "run")[-1]["step"] < 500
