"""`rlft-fast serve` before it becomes vLLM: its options, its token, and the command."""

import argparse
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from rlft_fast.cli import main
from rlft_fast.config import Config
from rlft_fast.rollout import server_command, token_from_environment
from tests.support.runs.configs import MINIMAL

TOKEN = "a secret of the tests"


@pytest.fixture
def run(tiny_model, tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {tiny_model('llama')}\noutput_dir: o\nsteps: 1\ndata: {{task: chain_sum}}")
    return path


@pytest.fixture
def vllm(monkeypatch):
    """What `serve` would become."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    started = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: started.append((command, environment)))
    return started


def taken() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *((["--port", port], "expected a port from 1 to 65535, got") for port in ("99999", "0", "8k", "", "٨٠")),
        (["--port=-1"], "expected a port from 1 to 65535, got '-1'"),
        (["--host", ""], "--host is empty"),
        (["--host", " "], "--host is empty"),
        (["--host", "nobody.invalid"], "cannot listen at --host 'nobody.invalid' --port 8000"),
        (["--host", "192.0.2.1"], "cannot listen at --host '192.0.2.1'"),
        (["--host", "a" * 300], "cannot listen at --host 'aaa"),
    ],
)
def test_wrong_addresses(run, vllm, monkeypatch, capsys, options, message):
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    try:
        status = main(["serve", str(run), *options])
    except SystemExit as error:  # of argparse
        status = error.code
    assert status in (1, 2)
    assert message in capsys.readouterr().err
    assert not vllm


def test_a_port_that_is_taken(run, vllm, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    with taken() as listener:
        port = listener.getsockname()[1]
        assert main(["serve", str(run), "--port", str(port)]) == 1
    assert f"cannot listen at --host '127.0.0.1' --port {port}: [Errno 98]" in capsys.readouterr().err
    assert main(["serve", str(run), "--port", str(port)]) is None
    assert len(vllm) == 1


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "needs a token"),
        (" \n", "needs a token"),
        ("x", "has 1 characters, which can be guessed"),
        ("seven77", "has 7 characters"),
        ("hunter2hunter2\nX: y", "a line break"),
        ("hunter2hunter2\x7f.", "control character"),
        ("hunter2hunter2é", "beyond ASCII"),
        ("hunter2hunter2\udcff", "beyond ASCII"),
    ],
)
def test_wrong_tokens_are_named_and_not_shown(run, vllm, monkeypatch, capsys, token, message):
    monkeypatch.setenv("VLLM_API_KEY", token)
    assert main(["serve", str(run)]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "VLLM_API_KEY" in said
    assert "hunter2" not in said
    assert "seven77" not in said
    assert not vllm


def test_blanks_around_a_token_are_cut(run, vllm, monkeypatch):
    """vLLM itself reads the variable, too."""
    monkeypatch.setenv("VLLM_API_KEY", f"\n {TOKEN}\r\n")
    assert token_from_environment() == TOKEN
    with taken() as listener:
        port = listener.getsockname()[1]
    main(["serve", str(run), "--port", str(port)])
    assert vllm[0][1]["VLLM_API_KEY"] == TOKEN


def test_a_tokenizer_that_vllm_cannot_use(run, vllm, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with taken() as listener:
        port = listener.getsockname()[1]
    assert main(["serve", str(run), "--port", str(port), "--model", str(folder)]) == 1
    assert f"cannot load a tokenizer from {folder}: tokenizer.json: model.vocab gives" in capsys.readouterr().err
    assert not vllm


def test_values_that_look_like_options(tiny_model, tmp_path, monkeypatch):
    rollout = Config.parse(MINIMAL).rollout
    monkeypatch.chdir(tmp_path)
    (tmp_path / "--trust-remote-code").symlink_to(tiny_model("llama"))
    command = server_command("--trust-remote-code", "float32", rollout, 64, host="-h", port=8000, on_cpu=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--host")
    parser.add_argument("--trust-remote-code", action="store_true")
    options, _ = parser.parse_known_args(command[3:])
    assert (options.model, options.host, options.trust_remote_code) == ("--trust-remote-code", "-h", False)


@pytest.mark.parametrize(("name", "needs_tokenizer"), [("llama", False), ("qwen2.5-vl", True)])
def test_the_processor_of_images_gets_a_tokenizer(name, needs_tokenizer, tiny_model):
    rollout = Config.parse(MINIMAL).rollout
    command = server_command(str(tiny_model(name)), "float32", rollout, 64, host="h", port=8000, on_cpu=True)
    assert ("--skip-tokenizer-init" in command) is not needs_tokenizer


@pytest.mark.parametrize(("options", "entry"), [({}, '{"quant_method": ""}'), ({"quantization": "fp8"}, "null")])
def test_a_server_has_plain_weights_where_the_folder_has_quantized_ones(options, entry, tiny_model, tmp_path):
    """The run dequantizes them. Without the flag, vLLM would quantize as config.json says."""
    rollout = Config.parse(MINIMAL | {"rollout": {"vllm": {"engine_options": options}}}).rollout
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    before = server_command(str(folder), "float32", rollout, 64, host="h", port=8000, on_cpu=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    command = server_command(str(folder), "float32", rollout, 64, host="h", port=8000, on_cpu=True)
    assert "--hf-overrides" not in before
    assert command[command.index("--hf-overrides") + 1] == f'{{"quantization_config": {entry}}}'


def test_options_of_the_engine_as_flags(tiny_model):
    options = {
        "max_num_batched_tokens": 64, "enforce_eager": False, "attention_config": {"backend": "x"},
        "cudagraph_capture_sizes": [1, 2, 4], "num_gpu_blocks_override": None,
    }  # fmt: skip
    rollout = Config.parse(MINIMAL | {"rollout": {"vllm": {"engine_options": options}}}).rollout
    command = " ".join(
        server_command(str(tiny_model("llama")), "float32", rollout, 64, host="h", port=8000, on_cpu=True)
    )
    assert '--max-num-batched-tokens 64 --attention-config {"backend": "x"}' in command
    assert "--cudagraph-capture-sizes 1 2 4" in command
    assert "num-gpu-blocks-override" not in command
    assert command.count("enforce-eager") == command.count("--no-enforce-eager") == 1  # it replaces the run's own
