"""Functions in worker processes: a failure costs its own sample, and all other samples have rewards."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlft_fast.isolation.guard import MARK, Guard
from rlft_fast.rewards import IsolatedReward
from rlft_fast.rewards.isolated import _is_answer
from rlft_fast.rewards.scoring import FAILED
from tests.support.machine.processes import assert_ends, is_running

HERE = Path(__file__).parent / "misbehaving.py"


@pytest.fixture
def isolated():
    made = []

    def make(name: str, path: Path = HERE, **options) -> IsolatedReward:
        made.append(IsolatedReward(f"{path}:{name}", **options))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def ask(reward: IsolatedReward, completions: list[str]) -> list[float | None]:
    prompts = ["p"] * len(completions)
    return reward(prompts=prompts, completions=completions, completion_ids=[[1, 2]] * len(prompts), answer=[5] * 10)


def test_a_worker_has_no_token_of_servers(isolated, monkeypatch):
    """What the function itself may need is left."""
    names = ["VLLM_API_KEY", "REWARD_API_KEY", "OPENAI_API_KEY"]
    for name in names:
        monkeypatch.setenv(name, "a secret of the tests")
    assert ask(isolated("has_token", timeout_s=9.0, num_workers=2), names) == [0.0, 0.0, 1.0]
    assert [os.environ[name] for name in names] == ["a secret of the tests"] * 3


def test_a_worker_imports_what_it_needs(isolated):
    """The configuration alone would take 0.3 s of each worker."""
    assert ask(isolated("has_imported", timeout_s=9.0), ["json", "pydantic", "torch"]) == [1.0, 0.0, 0.0]


# Two workers: while one hangs, the other scores.
def test_a_failure_costs_its_sample_alone(isolated):
    reward = isolated("obey", timeout_s=2.0, num_workers=2)
    started = time.perf_counter()
    with pytest.warns(UserWarning, match=r"3 of 10 samples have no reward from .*:obey: no answer within 2 s"):
        rewards = ask(reward, ["a", "hang", "bb", "exit", "ccc", "raise", "none", "dddd", "ctrl-c", "terminate"])
    assert rewards == [6.2, FAILED, 7.2, FAILED, 8.2, FAILED, None, 9.2, 11.2, 14.2]
    assert time.perf_counter() - started < 30


def test_workers_work_at_the_same_time(isolated, tmp_path):
    reward = isolated("meet", timeout_s=60.0, num_workers=2)
    assert ask(reward, [str(tmp_path / "a"), str(tmp_path / "b")]) == [1.0, 1.0]


def test_each_failure_says_how(isolated):
    reward = isolated("obey", timeout_s=5.0)
    with pytest.warns(UserWarning, match="its process ended with exit code 3"):
        assert ask(reward, ["exit"]) == [FAILED]
    with pytest.warns(UserWarning, match="reward function obey raised KeyError"):
        assert ask(reward, ["raise"]) == [FAILED]


def test_a_function_may_have_a_process_pool(isolated):
    assert ask(isolated("in_a_pool", timeout_s=30.0), ["a", "bb"]) == [1.0, 2.0]


def test_a_worker_goes_on_from_sample_to_sample_until_closed(isolated):
    reward = isolated("count_calls", timeout_s=5.0)
    assert ask(reward, ["a", "b"]) == [1.0, 2.0]
    assert ask(reward, ["a"]) == [3.0]
    reward.close()
    assert ask(reward, ["a"]) == [1.0]
    assert ask(reward, []) == []


def test_a_worker_that_cannot_start_costs_its_sample_at_once(isolated, tmp_path):
    path = tmp_path / "exits.py"
    path.write_text(
        "import multiprocessing as m, os\nif m.parent_process():\n    os._exit(4)\ndef f(**_): return [1.0]\n"
    )
    started = time.perf_counter()
    with pytest.warns(UserWarning, match="its process ended with exit code 4"):
        assert ask(isolated("f", path, timeout_s=5.0), ["a"]) == [FAILED]
    assert time.perf_counter() - started < 60


def test_a_worker_that_ends_between_two_questions_is_replaced(isolated):
    reward = isolated("answer_and_exit", timeout_s=5.0)
    for _ in range(2):
        assert ask(reward, ["a"]) == [1.0]
        time.sleep(0.5)


def test_a_process_that_a_function_forks_answers_nothing(isolated):
    reward = isolated("answer_twice", timeout_s=5.0)
    assert ask(reward, ["fork"]) == [1.0]
    time.sleep(0.5)
    assert ask(reward, ["a", "b"]) == [1.0, 1.0]


def test_processes_that_a_function_starts_end_with_their_worker(isolated, tmp_path):
    reward = isolated("start_others", timeout_s=2.0)
    with pytest.warns(UserWarning, match="no answer within 2 s"):
        assert ask(reward, [str(tmp_path / "pids")]) == [FAILED]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert_ends(pids)


@pytest.mark.parametrize("what", ["answer", "exit"])
def test_processes_in_sessions_of_their_own_end_with_their_worker(what, isolated, tmp_path):
    reward = isolated("start_another_session", timeout_s=30.0)
    with warnings.catch_warnings(action="ignore"):
        assert ask(reward, [f"{tmp_path / 'pids'} {what}"]) == [1.0 if what == "answer" else FAILED]
    pid = int((tmp_path / "pids").read_text().split()[0])
    if what == "answer":
        assert is_running(pid)
        reward.close()
    assert_ends([pid])
    assert ask(isolated("count_calls", timeout_s=30.0), ["a"]) == [1.0]  # the trainer's own processes live


TRAINER = """
import sys
from rlft_fast.rewards import IsolatedReward
from rlft_fast.rewards.isolated import _is_answer
if __name__ == "__main__":
    reward = IsolatedReward(sys.argv[1], timeout_s=100.0)
    print(reward(prompts=["p"], completions=[sys.argv[2]], completion_ids=[[1, 2]], answer=[5]), flush=True)
"""


def start_trainer(tmp_path: Path, name: str, completion: str) -> subprocess.Popen[bytes]:
    """Starts a process that scores one sample and does not close its worker."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    command = [sys.executable, str(tmp_path / "trainer.py"), f"{HERE}:{name}", completion]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def wait_for_pids(path: Path) -> list[int]:
    deadline = time.perf_counter() + 60.0
    while not path.exists() or len(path.read_text().split()) < 2:
        assert time.perf_counter() < deadline
        time.sleep(0.05)
    return [int(pid) for pid in path.read_text().split()]


def test_a_busy_worker_ends_with_its_killed_trainer(tmp_path):
    trainer = start_trainer(tmp_path, "never_rest", str(tmp_path / "pids"))
    pids = wait_for_pids(tmp_path / "pids")
    assert all(is_running(pid) for pid in pids)
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
    assert_ends(pids)


def test_a_trainer_that_closes_nothing_ends(tmp_path):
    """The workers ignore SIGTERM, by which multiprocessing would end them at the exit of the trainer."""
    trainer = start_trainer(tmp_path, "obey", "a")
    assert trainer.communicate(timeout=60)[0].endswith(b"[6.2]\n")
    assert trainer.returncode == 0


def test_closing_ends_a_worker_that_is_busy(isolated, tmp_path):
    reward = isolated("never_rest", timeout_s=100.0)

    def close() -> None:
        reward.close()
        asking.exception(10.0)  # waits for the thread that warns

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ask, reward, [str(tmp_path / "pids")])
        pids = wait_for_pids(tmp_path / "pids")
        with pytest.warns(UserWarning, match="its process ended with exit code -9"):
            close()
    assert asking.result() == [FAILED]
    assert_ends(pids)


def test_a_function_can_terminate_its_processes(isolated):
    (seconds,) = ask(isolated("terminate_a_child", timeout_s=20.0), ["a"])
    assert seconds < 10


def test_what_is_no_answer_costs_its_sample_alone(isolated):
    """Messages behind their length: an answer that no worker gives, no JSON, and the header of a message of 2 GB."""
    reward = isolated("scribble", timeout_s=5.0)
    for text in ("\0\0\0\17" + '{"reward": NaN}', "\0\0\x7f\x7f" + "[" * 0x7F7F, "\x7f\x7f\x7f\x7f"):
        with pytest.warns(UserWarning, match="it wrote something that is no answer"):
            assert ask(reward, [text]) == [FAILED]
    assert ask(reward, [""]) == [1.0]


def test_only_what_a_worker_gives_is_an_answer():
    refused = ("[]", '{"reward": NaN}', '{"reward": 1e300}', '{"reward": "1"}', '{"failure": 1}', '{"other": 1}')
    assert [_is_answer(json.loads(text)) for text in refused] == [False] * 6
    assert [_is_answer(answer) for answer in ({}, {"reward": None}, {"reward": 0.5}, {"failure": "it"})] == [True] * 4


def test_an_answer_that_stays_incomplete_costs_its_sample_alone(isolated):
    """The header of a message of 127 bytes: only the next answer follows."""
    reward = isolated("scribble", timeout_s=1.0)
    with pytest.warns(UserWarning, match="its process ended with exit code -9"):
        assert ask(reward, ["\0\0\0\x7f"]) == [FAILED]
    assert ask(reward, [""]) == [1.0]


def test_a_long_error_is_shortened(isolated):
    with pytest.warns(UserWarning, match="raised ValueError on a batch of 1 samples: aaa") as caught:
        assert ask(isolated("obey", timeout_s=5.0), ["shout"]) == [FAILED]
    assert len(str(caught[0].message)) < 3000


def test_an_unknown_function_is_refused():
    with pytest.raises(ValueError, match=r"has no function 'obeys' \(did you mean obey"):
        IsolatedReward(f"{HERE}:obeys", timeout_s=1.0)


def test_a_guard_that_dies_while_it_is_told_is_started_again(monkeypatch):
    """It has ended, and is not known to have ended: the pipe breaks."""
    guard, mark = Guard(), secrets.token_hex(16)
    monkeypatch.setenv(MARK, mark)  # as in the moment in which another thread starts a worker
    command = ["sh", "-c", "exec <&-; echo; exec sleep 60"]
    with subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as deaf:
        deaf.stdout.read(1)
        guard._process = deaf
        worker = subprocess.Popen(["sleep", "60"], start_new_session=True, env={MARK: mark})
        guard.watch(worker.pid, mark)
        assert guard._process is not deaf
        deaf.kill()
    guard._process.stdin.close()  # as at the end of the trainer
    assert worker.wait(10) == -signal.SIGKILL
    assert guard._process.wait(10) == 0  # it has not the mark of the worker that it kills
