"""Generation by real vLLM servers in processes of their own, as `rlft-fast serve` starts them."""

import asyncio
import contextlib
import http.server
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch

from rlft_fast.engine import Piece
from rlft_fast.rollout import RolloutError, SamplingParams
from rlft_fast.rollout.vllm import asking as asking_servers
from rlft_fast.rollout.vllm import weight_sender
from rlft_fast.rollout.vllm.nccl_sender import AllServers
from tests.support.machine.distributed import run_distributed
from tests.support.runs.servers import TOKEN, free_port, rollout_of
from tests.support.runs.vllm_rollouts import HEADS, OF_VLLM, PROMPTS, check_logprobs, make_engine, sample, update
from tests.support.tiny_models import save_tiny_model
from tests.trainer.toy import read_lines

pytestmark = OF_VLLM


def two_ranks(rank: int, model: Path, urls: tuple[str, ...]) -> None:
    """Both ranks ask both servers; the first sends the weights that both gather."""
    os.environ["VLLM_API_KEY"] = TOKEN
    torch.set_num_threads(1)
    share = [PROMPTS[:4], PROMPTS[4:]][rank]
    engine = make_engine(model)
    rollout = rollout_of(engine, urls)
    for seed in range(2):
        rollout.sync()  # compares checksums
        groups = sample(rollout, share)
        assert {span.weight_version for group in groups for x in group for span in x.spans} == {seed + 1}
        check_logprobs(engine, share, groups)
        assert sample(rollout, share) == groups
        update(engine, seed)
    own = share if rank == 0 else []
    top = rollout.generate(own, SamplingParams(n=8, max_new_tokens=4, temperature=0.7, top_k=6, min_p=0.2, top_p=0.9))
    sizes = [(x.support >= 0).sum(1) for group in top for x in group]
    assert all(1 <= size.min() <= size.max() <= 6 for size in sizes)


@pytest.mark.dist
def test_samples_are_those_of_the_policy(served):
    run_distributed(two_ranks, 2, served.model, served.urls)


def added(rank: int, model: Path, urls: tuple[str, ...], names: Path) -> None:
    """Servers are added and taken away between syncs; one that does not answer, or a missing file, ends nothing."""
    os.environ["VLLM_API_KEY"] = TOKEN
    torch.set_num_threads(1)
    engine = make_engine(model)
    names.write_text(urls[0])
    rollout = rollout_of(engine, (str(names),))

    def asked() -> list[str]:
        rollout.sync()
        check_logprobs(engine, PROMPTS, sample(rollout, PROMPTS))
        return [server.url for server in rollout.generator.asking.pool.servers]

    assert asked() == [urls[0]]
    names.write_text(f"# both\n{urls[0]}\n\n{urls[1]}\n")
    assert asked() == [*urls]
    names.write_text(f"{urls[1]}\nhttp://127.0.0.1:{free_port()}\n")
    with pytest.warns(UserWarning, match="does not answer.*goes on with 1 other"):
        assert asked() == [urls[1]]
    names.unlink()
    with pytest.warns(UserWarning, match="goes on with the servers before"):
        assert asked() == [urls[1]]


@pytest.mark.dist
def test_servers_come_and_go(served, tmp_path):
    run_distributed(added, 1, served.model, served.urls, tmp_path / "servers")


def broken(rank: int, model: Path, urls: tuple[str, ...]) -> None:
    """An update breaks off inside a layer. The next update must not join weights of both."""
    os.environ["VLLM_API_KEY"] = TOKEN
    torch.set_num_threads(1)
    engine = make_engine(model)
    rollout = rollout_of(engine, urls)
    rollout.sync()
    update(engine, 0)
    content, sent = weight_sender._content, []

    def breaking(piece: Piece) -> tuple[bytes, memoryview]:
        sent.append(piece.name)
        if piece.name.endswith("layers.1.self_attn.k_proj.weight") and sent.count(piece.name) == 1:
            raise ConnectionError("the trainer's network is down")
        return content(piece)

    weight_sender._content = breaking
    rollout.sync()  # fails, starts again, and sends all weights
    assert len(sent) > len({*sent})
    check_logprobs(engine, PROMPTS, sample(rollout, PROMPTS))


@pytest.mark.dist
def test_an_update_that_breaks_off(served):
    run_distributed(broken, 1, served.model, served.urls)


def killed(rank: int, model: Path, urls: tuple[str, ...], pids: tuple[int, ...]) -> None:
    """A server is lost while it samples: its samples go on at the other one, from the tokens they have.

    Then the engine of the other server dies, and its server does not close its connections.
    """
    os.environ["VLLM_API_KEY"] = TOKEN
    torch.set_num_threads(1)
    engine = make_engine(model)
    rollout = rollout_of(engine, urls)
    rollout.sync()
    asked, all_events, ask = [], asking_servers._events, rollout.generator.asking._ask
    asked_by: dict[asyncio.Task, str] = {}

    async def noting(session, one, fields, server) -> None:
        asked_by[asyncio.current_task()] = server.url
        asked.append((id(one), server.url, len(one.token_ids)))
        await ask(session, one, fields, server)

    async def killing(content, max_bytes):
        async for event in all_events(content, max_bytes):
            if asked_by[asyncio.current_task()] == urls[1]:  # the first event of a sample has one token
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pids[1], signal.SIGKILL)
            yield event

    rollout.generator.asking._ask = noting
    asking_servers._events = killing
    prompts = PROMPTS[:3] + PROMPTS[4:]
    with pytest.warns(UserWarning, match=f"the server {urls[1]} .*; the server is lost until the next new weights"):
        groups = rollout.generate(prompts, SamplingParams(n=32, max_new_tokens=180, temperature=0.7))
    assert [len(group) for group in groups] == [32] * 4
    check_logprobs(engine, prompts, groups)
    moved = [(url, num_tokens) for i, (one, url, num_tokens) in enumerate(asked) if one in {x[0] for x in asked[:i]}]
    assert {url for url, _ in moved} == {urls[0]}
    assert any(num_tokens > 0 for _, num_tokens in moved)
    update(engine, 0)
    with pytest.warns(UserWarning, match="does not answer.*goes on with 1 other"):
        rollout.sync()
    (engine_process,) = (p for p in psutil.Process(pids[0]).children() if "EngineCore" in " ".join(p.cmdline()))
    engine_process.kill()
    started = time.monotonic()
    with pytest.raises(RolloutError):
        rollout.sync()
    assert time.monotonic() - started < 60


@pytest.mark.dist
@pytest.mark.long
def test_a_lost_server_loses_no_sample(served):
    run_distributed(killed, 1, served.model, served.urls, tuple(process.pid for process in served.processes))
    for place in range(len(served.processes)):
        served.kill(place)
    served.start_lost()
    run_distributed(two_ranks, 2, served.model, served.urls)  # with the new servers


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_run(max_staleness, served, tmp_path):
    """Two processes of torchrun, and one that trains beside the sampling; the servers are named in a file."""
    names = tmp_path / "servers"
    names.write_text("# of the tests\n" + "\n".join(served.urls) + "\n")
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "-m"]
    command = [
        *([sys.executable, "-m"] if max_staleness else torchrun), "rlft_fast", "train",
        str(served.config), "--output_dir", str(tmp_path / "run"), "--rollout.servers", json.dumps([str(names)]),
        "--rollout.max_prompt_tokens", "8", "--rollout.max_new_tokens", "6", "--steps", "4",
        "--rollout.max_staleness", str(max_staleness),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    staleness = [row.get("staleness_max", 0) for row in rows]
    assert staleness == ([0, 1, 2, 1] if max_staleness else 4 * [0])
    assert [row["mismatch_max"] < 1e-3 for row in rows] == [number == 0 for number in staleness]
    assert TOKEN not in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/weight_info", "/collective_rpc", "/update_weights", "/init_weight_transfer_engine", "/pause"],
)
def test_no_route_answers_without_the_token(served, path):
    for headers in ({}, {"Authorization": "Bearer another"}):
        request = urllib.request.Request(served.urls[0] + path, data=b"{}", headers=headers)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=30)


def test_a_server_listens_on_loopback_alone(served):
    listening = {
        connection.laddr.ip
        for process in [psutil.Process(served.processes[0].pid)]
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == served.ports[0]
    }
    assert listening == {"127.0.0.1"}


def refused(rank: int, served_model: Path, url: str, folder: Path) -> None:
    os.environ["VLLM_API_KEY"] = TOKEN
    engine = make_engine(served_model)
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RolloutError, match=f"the server {nowhere} does not answer"):
        rollout_of(engine, (nowhere,))
    with pytest.raises(ValueError, match="expected a URL such as"):
        rollout_of(engine, ("ftp://127.0.0.1",))
    with pytest.raises(ValueError, match="neither a URL nor a file"):
        rollout_of(engine, (str(folder / "missing"),))
    os.environ["VLLM_API_KEY"] = "another secret"
    with pytest.raises(ValueError, match="refuses the token of VLLM_API_KEY"):
        rollout_of(engine, (url,))
    del os.environ["VLLM_API_KEY"]
    with pytest.raises(ValueError, match="needs a token: set the environment variable VLLM_API_KEY"):
        rollout_of(engine, (url,))
    os.environ["VLLM_API_KEY"] = TOKEN
    other = make_engine(save_tiny_model("llama", folder / "other", **HEADS))
    with pytest.raises(ValueError, match="has another model: model_type is 'qwen2', not 'llama'"):
        rollout_of(other, (url,))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(ValueError, match="has no route /v1/models: start it with rlft-fast serve"):
        rollout_of(engine, (f"http://127.0.0.1:{server.server_address[1]}",))
    server.shutdown()


def test_what_cannot_be_used_is_refused(served, tmp_path):
    run_distributed(refused, 1, served.model, served.urls[0], tmp_path)


def test_vllm_has_the_interfaces_of_nccl():
    """What `NCCLSender` calls, which takes GPUs."""
    from vllm.distributed.weight_transfer import base, factory, nccl_common, nccl_engine

    info = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 3}
    inspect.signature(nccl_engine.NCCLTrainerInitInfo).bind(**info, rank=0)
    inspect.signature(nccl_common.NCCLWeightTransferInitInfo).bind(**info, rank_offset=1)
    trainer_init = factory.WeightTransferTrainerFactory.trainer_init
    inspect.signature(trainer_init).bind(object(), client=AllServers([]), source=object())
    assert isinstance(AllServers([]), base.VLLMWeightSyncClient)
    assert hasattr(nccl_engine.NCCLTrainerWeightTransferEngine, "shutdown")
