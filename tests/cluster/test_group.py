"""Worker groups on a real Ray: the numbers of one process, and how the end of a worker is told."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig

from rlft_fast.cluster import (
    DP_COMPUTE_PROTO,
    ActorRolloutRefWorker,
    Generators,
    RemoteEngine,
    TotalUsage,
    Worker,
    WorkerError,
    WorkerGroup,
    connect,
    register,
    require_sendable,
)
from rlft_fast.data import Batch, Share
from rlft_fast.engine import Engine, FSDPEngine, results
from rlft_fast.models import load_tokenizer
from rlft_fast.plugins import load_function
from rlft_fast.rl import PolicyLoss
from rlft_fast.rollout import RolloutError, SamplingParams, sample_seeds
from rlft_fast.rollout.vllm import model_fingerprint
from rlft_fast.trainer.models import build_models
from rlft_fast.world import World
from tests.rollout.vllm.lying_server import LyingServer
from tests.support.batches import make_batch
from tests.trainer.toy import toy_config, toy_values

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray: make test-ray"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    import ray

    connect(num_cpus=8)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def config(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    changes = {"algorithm__kl_coef": 0.1, "algorithm__advantage": "gae", "critic": {"max_tokens": 64}}
    return toy_config(tiny_model("llama"), folder, **changes)


@pytest.fixture(scope="module")
def actor(config):
    with WorkerGroup(ActorRolloutRefWorker, config, 2) as group:
        group.init_model(10)
        yield group


@pytest.fixture(scope="module")
def alone(config):
    return FSDPEngine(config.model, config.actor, num_training_steps=10).initialize()


@pytest.mark.parametrize("num_sequences", [1, 2, 5, 17])
def test_log_probs_are_those_of_one_process(actor, alone, num_sequences):
    batch = make_batch(num_sequences)
    found = actor.compute_log_prob(batch)
    for name, values in alone.infer(batch, ("logprob", "entropy")).items():
        torch.testing.assert_close(found[f"{name}_T"], values, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        actor.compute_ref_log_prob(batch)["ref_logprob_T"], found["logprob_T"], rtol=0, atol=1e-5
    )


class Plain(Worker):
    """A worker without a model: a function of each token, one of each sequence, and a method that tells when it ran."""

    @staticmethod
    def engine_configs(config):
        return {"plain": config.actor}

    @register(DP_COMPUTE_PROTO, engine="plain")
    def compute(self, share):
        batch = share.batch
        return {"value_T": batch.input_ids_T.float() + batch.position_ids_T / 100, "reward_B": batch.reward_B * 2}

    @register(DP_COMPUTE_PROTO)
    def work(self, rows, *, seconds, fails=False):
        started = time.time()
        torch.ones(self.world.rank, 2**28 * len(rows)).sum()  # GiB for each row, of the second worker alone
        time.sleep(seconds)
        self.busy_seconds = seconds / 2 * (1 + self.world.rank)
        if fails and self.world.rank == 1:
            raise ValueError(f"row {rows[0]} cannot be worked on")
        return {"row": rows, "begin": [started] * len(rows), "end": [time.time()] * len(rows)}


@pytest.fixture(scope="module")
def groups(config):
    """Of two workers and of one."""
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have the tests
    with WorkerGroup(Plain, config, 2) as first, WorkerGroup(Plain, config, 1) as second:
        yield first, second


def check_batches_of_any_size(group):
    for num_sequences in range(1, 18):
        batch = make_batch(num_sequences)
        found, expected = group.compute(batch), Plain.compute(None, Share(batch, np.array([0, num_sequences])))
        assert all(torch.equal(found[name], values) for name, values in expected.items())


def test_a_batch_of_any_size(groups):
    for group in groups:
        check_batches_of_any_size(group)


@pytest.mark.long
def test_a_batch_of_any_size_on_three_workers(config):
    with WorkerGroup(Plain, config, 3) as group:
        check_batches_of_any_size(group)


def test_groups_work_at_the_same_time(groups):
    first, second = groups
    found = results({"a": first.work.submit([5, 6, 7], seconds=2), "b": second.work.submit([8], seconds=2)})
    assert (found["a"]["row"], found["b"]["row"]) == ([5, 6, 7], [8])
    times = [found[name] for name in found]
    assert max(max(x["begin"]) for x in times) < min(min(x["end"]) for x in times)
    fails = {"a": first.work.submit([5, 6], seconds=0, fails=True), "b": second.work.submit([9], seconds=0)}
    with pytest.raises(ValueError, match="row 6 cannot be worked on") as raised:
        results(fails)
    assert raised.value.__notes__ == ["raised by worker 1 of Plain"]
    assert fails["b"].result()["row"] == [9]  # the other call's result is still there
    first.take_usage()
    assert first.work(rows=[1, 2], seconds=0.5)["row"] == [1, 2]
    assert first.work(rows=[1, 2], seconds=0.5)["row"] == [1, 2]
    usage = first.take_usage()
    assert 1 < usage.peak_bytes / 2**30 < 2  # the peak of the second worker, in these calls alone
    assert usage.seconds > 1
    assert usage.busy_seconds == pytest.approx([0.5, 1.0])
    assert first.take_usage() == TotalUsage()
    with pytest.raises(TypeError, match=r"Plain\.work: missing a required argument: 'seconds'"):
        first.work.submit([1])


def test_a_killed_worker_is_named_within_ten_seconds(groups):
    _, group = groups  # which no later test needs
    (pid,) = group.pids()
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerError, match="worker 0 of Plain died"):
        group.work(rows=[1], seconds=0)
    assert time.monotonic() - started < 10
    with pytest.raises(WorkerError, match="the group has ended"):
        group.work(rows=[1], seconds=0)


class Surprise:
    """-log π, the mean over all sampled tokens."""

    aggregation, max_response_tokens = "token-mean", None
    fields = ("loss_weight_T",)
    needs_sequences = False

    def per_token(self, fields):
        return -fields["loss_weight_T"] * fields["logprob_T"]

    def metrics(self, fields):
        return {"least_max": -fields["logprob_T"].detach().min(), "weight": fields["loss_weight_T"].sum()}


def by_hand(engine: Engine, first: Batch, last: Batch) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """An optimizer step of two calls: the sums of the second call, and the metrics of the step."""
    engine.zero_grad()
    engine.forward_backward(first, Surprise(), is_last=False)
    return engine.forward_backward(last, Surprise()), engine.optimizer_step()


def test_updates_are_those_of_one_process(actor, alone, config, tmp_path):
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    for num_sequences in (1, 6):
        batch = make_batch(num_sequences)
        batch = batch.replace(
            old_logprob_T=actor.compute_log_prob(batch)["logprob_T"],
            advantage_T=batch.input_ids_T.float().cos() * batch.loss_mask_T,
        )
        found, expected = actor.update_actor(batch, loss=PolicyLoss()), alone.train_step(batch, PolicyLoss())
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    remote = RemoteEngine(actor, "actor", config.actor, actor.facts()["actor"])
    first, last = (make_batch(count).replace(advantage_T=None) for count in (4, 3))
    remote.forward_backward(first, Surprise())
    with pytest.raises(ValueError, match="sequence 0 has 120 tokens"):  # drops what the first call has left
        remote.forward_backward(Batch.from_samples([[1] * 60], [[2] * 60]), Surprise())
    with pytest.raises(ValueError, match="there was no forward_backward since the last step"):
        remote.optimizer_step()
    with pytest.raises(ValueError, match="on Ray fills no outputs"):
        remote.forward_backward(first, Surprise(), outputs={})
    (sums, metrics), (own_sums, own_metrics) = (by_hand(engine, first, last) for engine in (remote, alone))
    assert {name: x.item() for name, x in sums.items()} == pytest.approx(
        {name: x.item() for name, x in own_sums.items()}, rel=1e-3
    )
    assert metrics == pytest.approx(own_metrics, rel=1e-3, abs=1e-5)
    actor.save_checkpoint(str(tmp_path), 2, {"note": "kept"})
    before = actor.compute_log_prob(batch)["logprob_T"]
    actor.update_actor(batch, PolicyLoss())
    assert not torch.equal(actor.compute_log_prob(batch)["logprob_T"], before)
    assert [state["note"] for state in actor.load_checkpoint(str(tmp_path))] == ["kept", "kept"]
    assert torch.equal(actor.compute_log_prob(batch)["logprob_T"], before)


def test_samples_do_not_depend_on_the_number_of_workers(actor, config):
    prompts, params = [[1, 2], [3], [4, 5, 6]], SamplingParams(n=2, max_new_tokens=5)
    seeds = sample_seeds(0, 0, range(3), 2)
    two = actor.generate_sequences(prompts, params, seeds)
    assert two.row_B.tolist() == [0, 0, 1, 1, 2, 2]
    assert actor.weight_version() >= 1
    again = actor.generate_sequences(prompts[:1], params, seeds[:1])  # fewer prompts than workers
    assert again.token_ids() == two.token_ids()[:2]


def test_a_failing_method_leaves_the_group_alive(actor):
    with pytest.raises(ValueError, match="the loss reads old_logprob_T"):  # raised by the workers
        actor.update_actor(make_batch(5), PolicyLoss())
    with pytest.raises(ValueError, match="sequence 0 has 120 tokens"):  # raised by the driver
        actor.compute_log_prob(Batch.from_samples([[1] * 60], [[2] * 60]))
    assert len(actor.compute_log_prob(make_batch(1))["logprob_T"])


def test_what_the_cluster_cannot_give_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match="ActorRolloutRefWorker 9 CPUs, and the cluster has 8 CPUs"):
        WorkerGroup(ActorRolloutRefWorker, config, 9)
    with pytest.raises(ValueError, match="ActorRolloutRefWorker 1 GPU, and the cluster has 0 GPUs"):
        WorkerGroup(ActorRolloutRefWorker, config, 1, gpus=1)
    generators = {"rollout__backend": "vllm", "cluster": {"generators": {"num_workers": 9, "cpus": 1}}}
    with pytest.raises(ValueError, match="generators 9 CPUs, and the cluster has 8 CPUs"):
        Generators(toy_config(Path(config.model), tmp_path, **generators))


def test_the_example_runs(tiny_model, tmp_path):
    values = toy_values(tiny_model("llama"), tmp_path, algorithm__advantage="gae", critic={"max_tokens": 64})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    command = [sys.executable, str(ROOT / "examples" / "ray_ppo.py"), str(path), "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["step 1", "step 2"]
    assert (tmp_path / "run" / "hf" / "config.json").exists()


def test_what_cannot_be_sent_is_named(actor, tmp_path):
    (tmp_path / "locked.py").write_text(
        "import threading\nLOCK = threading.Lock()\n"
        "def scale():\n    with LOCK:\n        return 1.0\n"
        "def own(logprob_T, advantage_T):\n    return -advantage_T * logprob_T * scale()\n"
    )
    own = load_function("policy loss", f"{tmp_path}/locked.py:own")
    message = "policy loss cannot be sent to the workers on Ray: scale -> LOCK is of type lock, which cannot be pickled"
    with pytest.raises(ValueError, match=message):
        require_sendable("policy loss", own)
    with pytest.raises(ValueError, match=r"\[1\] -> loss -> scale -> LOCK is of type lock"):
        actor.update_actor(make_batch(3), PolicyLoss(loss=own))


def test_a_loss_from_a_file_reaches_the_workers(actor, tmp_path):
    (tmp_path / "own.py").write_text("def own(logprob_T, advantage_T):\n    return -advantage_T * logprob_T\n")
    loss = PolicyLoss(loss=load_function("policy loss", f"{tmp_path}/own.py:own"))
    connect()
    batch = make_batch(3)
    batch = batch.replace(
        old_logprob_T=torch.zeros(batch.num_tokens), advantage_T=batch.loss_mask_T.float(), ref_logprob_T=None
    )
    assert actor.update_actor(batch, loss)["grad_norm"] > 0


def test_models_that_close_end_what_the_driver_asks(tiny_model, tmp_path, monkeypatch):
    """A server of others outlives the run, and would go on to sample for it."""
    monkeypatch.setenv("VLLM_API_KEY", "a secret of the tests")
    asked, ended = threading.Event(), threading.Event()

    def hang(server: LyingServer, body: dict) -> bytes:
        asked.set()
        ended.wait(60)
        return b""

    server = LyingServer({"/inference/v1/generate": hang})
    changes = {"backend": "vllm", "servers": [server.url], "max_staleness": 1}
    values = {f"rollout__{name}": value for name, value in changes.items()}
    config = toy_config(tiny_model("llama"), tmp_path, **values, cluster={"actor": {"num_workers": 1}})
    fingerprint = model_fingerprint(AutoConfig.from_pretrained(config.model))
    server.facts |= {"model": fingerprint, "max_model_len": config.longest_sequence}
    models = build_models(config, load_tokenizer(config.model), World(), 1)
    with ThreadPoolExecutor(1) as thread:
        try:
            models.rollout.sync()
            models.rollout.restarts = False
            answer = thread.submit(models.rollout.generate, [[1, 2]], SamplingParams(n=1, max_new_tokens=4))
            assert asked.wait(30)
            models.close()
            with pytest.raises(RolloutError, match="the generator was closed"):
                answer.result(timeout=10)
        finally:
            ended.set()
    server.shutdown()
    server.server_close()
