"""Weights that change within answers, at real vLLM servers and in a vLLM beside the training."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlft_fast.engine import FSDPEngine, Piece
from rlft_fast.rollout import Completion, Rollout, RolloutError, SamplingParams
from rlft_fast.rollout.vllm import weight_sender
from rlft_fast.run import read_rollout
from rlft_fast.trainer import train
from tests.support.machine.distributed import run_distributed
from tests.support.runs.servers import TOKEN, rollout_of
from tests.support.runs.vllm_rollouts import OF_VLLM, PROMPTS, kill_generator, make_engine, make_rollout, update
from tests.trainer.toy import read_lines, toy_config

pytestmark = OF_VLLM
LONG = SamplingParams(n=6, max_new_tokens=200, temperature=0.7)


class Policies:
    """The policy of each version of the weights in float64, as plain transformers runs it."""

    def __init__(self, engine: FSDPEngine, rollout: Rollout) -> None:
        self.engine, self.rollout = engine, rollout
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.model = AutoModelForCausalLM.from_pretrained(engine.path, dtype=torch.float64)
        self.first = [parameter.detach().clone() for parameter in engine.model.parameters()]

    def update(self) -> None:
        """Updates the first policy in a new way. The next sync gives the generator its weights.

        After dozens of updates in turn, logits are so large that float32 tells log-probabilities apart by 1e-3.
        """
        with torch.no_grad():
            for parameter, first in zip(self.engine.model.parameters(), self.first, strict=True):
                parameter.copy_(first)
        update(self.engine, len(self.weights))
        with self.engine.eval_mode():
            own = {name: tensor.clone() for name, tensor in self.engine.weight_stream(torch.float32).tensors()}
        self.weights[self.rollout.weight_version + 1] = own

    @torch.no_grad()
    def logprobs(self, version: int, prompt: list[int], sample: Completion) -> torch.Tensor:
        """Of a sample's tokens, each after all tokens before it."""
        self.model.load_state_dict(self.weights[version], strict=False)  # a tied head is not there
        ids = torch.tensor([prompt + sample.token_ids])
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1] / LONG.temperature
        return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]

    def check(self, prompt: list[int], sample: Completion) -> float:
        """Each token has the log-probability of the policy that its span names.

        Returns:
            How far the policy of the first token is from the log-probabilities at most.
        """
        told = torch.tensor(sample.logprobs, dtype=torch.float64)
        assert sum(span.num_tokens for span in sample.spans) == len(told)
        versions = [span.weight_version for span in sample.spans]
        assert versions == sorted({*versions})
        start = 0
        for span in sample.spans:
            part = slice(start, start + span.num_tokens)
            expected = self.logprobs(span.weight_version, prompt, sample)[part]
            torch.testing.assert_close(told[part], expected, rtol=0, atol=2e-4)
            start = part.stop
        return float((told - self.logprobs(versions[0], prompt, sample)).abs().max())


@contextmanager
def asking(rollout: Rollout) -> Iterator[tuple[Future[None], list[tuple[list[int], Completion]]]]:
    """Inside, a thread asks again and again, so that answers are under way. Gives its future, prompts and samples."""
    until = threading.Event()
    samples: list[tuple[list[int], Completion]] = []

    def ask() -> None:
        while not until.is_set():
            groups = rollout.generate(PROMPTS[:3], LONG)
            samples.extend((prompt, one) for prompt, group in zip(PROMPTS, groups, strict=False) for one in group)

    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask)
        time.sleep(0.2)
        try:
            yield asked, samples
        finally:
            until.set()


def changed(rank: int, model: Path, urls: tuple[str, ...]) -> None:
    """The weights change again and again while answers of up to 200 tokens are sampled; then a vLLM dies meanwhile."""
    os.environ["VLLM_API_KEY"] = TOKEN
    torch.set_num_threads(1)
    engine = make_engine(model)
    rollout = rollout_of(engine, urls[:1]) if urls else make_rollout(engine, process="separate", check_weights=True)
    policies = Policies(engine, rollout)
    policies.update()
    rollout.sync()
    with asking(rollout) as (asked, samples):
        until = time.monotonic() + 120
        # Until weights have come within an answer: on a busy machine, answers may end before the first ones come.
        while not (any(len(sample.spans) > 1 for _, sample in [*samples]) or asked.done()):
            assert time.monotonic() < until
            policies.update()
            rollout.sync()
            time.sleep(0.2)  # in which tokens are sampled, however busy the machine is
    asked.result()
    mixed = []
    for prompt, sample in samples:
        distance = policies.check(prompt, sample)
        mixed += [distance] if len(sample.spans) > 1 else []
    assert mixed
    assert min(mixed) > 0.01  # so the check tells the weights apart
    if not urls:
        check_death_beside(rollout, policies)
    rollout.close()


def check_death_beside(rollout: Rollout, policies: Policies) -> None:
    """A vLLM that dies while it is paused: the requests under way fail, and the update starts it again."""
    rollout.restarts = False  # as in a run whose sampling goes on while it trains
    content = weight_sender._content

    def killing(piece: Piece) -> tuple[bytes, memoryview]:
        weight_sender._content = content
        kill_generator()
        return content(piece)

    policies.update()
    with asking(rollout) as (asked, _):
        weight_sender._content = killing
        rollout.sync()
    with pytest.raises(RolloutError, match="vLLM failed: "):
        asked.result()
    generator = rollout.generator
    policies.update()
    rollout.sync()
    assert rollout.generator is generator  # it was started again once
    for prompt, group in zip(PROMPTS, rollout.generate(PROMPTS[:3], LONG), strict=False):
        assert [policies.check(prompt, sample) for sample in group]


@pytest.mark.dist
def test_each_token_has_the_policy_that_sampled_it(served):
    run_distributed(changed, 1, served.model, served.urls)


@pytest.mark.dist
def test_each_token_has_the_policy_of_a_vllm_beside(served):
    run_distributed(changed, 1, served.model, ())


def test_a_run(served, tmp_path):
    """No token is older than the bound, answers have tokens of several versions, and each prompt is trained once."""
    command = [
        sys.executable, "-m", "rlft_fast", "train", str(served.config), "--output_dir", str(tmp_path / "run"),
        "--rollout.servers", json.dumps([*served.urls]), "--steps", "10", "--log_samples", "true",
        "--rollout.max_prompt_tokens", "8", "--rollout.max_new_tokens", "150",
        "--rollout.max_staleness", "2", "--rollout.update", "in-flight",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    mixed = 0
    rows = read_lines(tmp_path / "run/metrics.jsonl")
    for step, row in enumerate(rows, 1):
        kept = read_rollout(tmp_path / "run", step)
        age_T = step - kept["weight_version_T"]
        assert 0 <= age_T.min() <= age_T.max() <= 2
        for age in range(3):
            assert row[f"staleness_share_{age}"] == pytest.approx((age_T == age).double().mean().item())
        mixed += sum(len(own.unique()) > 1 for own in age_T.split(kept["length_B"].tolist()))
    assert mixed
    assert rows[0]["staleness_max"] == 0
    assert rows[0]["mismatch_max"] < 1e-3
    train(toy_config(served.model, tmp_path / "in turn", steps=10))
    asked = [
        [(row["step"], row["prompt"]) for row in read_lines(tmp_path / f"{name}run/samples.jsonl")]
        for name in ("", "in turn/")
    ]
    assert asked[0] == asked[1]


def killed(rank: int, model: Path, urls: tuple[str, ...], pids: tuple[int, ...]) -> None:
    """Servers are killed while they are paused: the samples of the first go on at the other, until that one dies."""
    os.environ["VLLM_API_KEY"] = TOKEN
    torch.set_num_threads(1)
    engine = make_engine(model)
    rollout = rollout_of(engine, urls)
    rollout.restarts = False  # as in a run whose sampling goes on while it trains
    policies = Policies(engine, rollout)
    policies.update()
    rollout.sync()
    content = weight_sender._content
    doomed: list[int] = []

    def killing(piece: Piece) -> tuple[bytes, memoryview]:
        while doomed:
            os.killpg(doomed.pop(), signal.SIGKILL)
        return content(piece)

    weight_sender._content = killing
    policies.update()
    with asking(rollout) as (asked, samples):
        doomed.append(pids[0])
        with pytest.warns(UserWarning, match=f"{urls[0]}.*; the server is lost until the next new weights"):
            rollout.sync()
    asked.result()
    assert [policies.check(*one) >= 0 for one in samples]
    policies.update()
    started = time.monotonic()
    with asking(rollout) as (asked, _):
        doomed.append(pids[1])
        with pytest.raises(RolloutError, match=urls[1]), pytest.warns(UserWarning, match="the server is lost"):
            rollout.sync()
    with pytest.raises(RolloutError, match="failed"):
        asked.result()
    assert time.monotonic() - started < 60
    rollout.close()
    for thread in [thread for thread in threading.enumerate() if thread.name == "servers"]:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.dist
def test_servers_that_die_while_they_are_paused(served):
    """In the last module that has servers, and its last test: no server is left."""
    run_distributed(killed, 1, served.model, served.urls, tuple(process.pid for process in served.processes))
