"""Whole runs in every way that an engine can be configured: killed, resumed, exported."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlft_fast.cli import main
from rlft_fast.config import Config
from rlft_fast.trainer import train
from tests.support.machine.distributed import run_distributed
from tests.support.runs.vllm_rollouts import HEADS, needs_vllm
from tests.support.tiny_models import save_tiny_model
from tests.trainer.struck import assert_same_result, write_config
from tests.trainer.toy import HERE, comparable

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {
    "steps": 4,
    "reward__function": f"{HERE}:even_share_until_struck",
    "algorithm": {"kl_coef": 0.01, "kl_in": "reward", "mini_batches": 2},
    "checkpoint": {"every": 2, "asynchronous": False},
}
# Of the reward function: 1 evaluation, 2 and 3 steps 1 and 2, before the checkpoint.
IN_STEP_3 = 4


def killed_run(folder: Path, world_size: int) -> None:
    """One process of the run in the folder ends by SIGKILL in step 3."""
    (folder / "strike").write_text(f"SIGKILL {IN_STEP_3} {world_size - 1}")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)] if world_size > 1 else []
    command = [sys.executable, *torchrun, "-m", "rlft_fast", "train", str(folder / "config.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode != 0
    assert (folder / "run" / "checkpoints").is_dir(), ended.stderr
    assert "step_00000002" in [path.name for path in (folder / "run" / "checkpoints").iterdir()], ended.stderr
    assert not (folder / "run" / "summary.json").exists()


def train_whole_and_resume(rank: int, whole: Path, killed: Path) -> None:
    train(Config.load(whole / "config.yaml"))
    train(Config.load(killed / "config.yaml"), resume=True)


def check_export(run: Path, output: Path) -> None:
    """A command of its own writes the folder that the run has written, which transformers loads."""
    assert main(["export", str(run), "--output", str(output)]) == 0
    written, exported = (load_file(folder / "model.safetensors") for folder in (run / "hf", output))
    assert written.keys() == exported.keys()
    for (
        name,
        weight,
    ) in written.items():  # two processes may merge a part's adapter by other kernels than one: two roundings
        torch.testing.assert_close(exported[name], weight, rtol=0, atol=float(2**-22 * weight.abs().max()))
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    assert "lora" not in " ".join(written)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "options", "world_size"),
    [
        ("llama", {"actor__lora": {"rank": 2}, "actor__optimizer__learning_rate": 0.05}, 2),
        ("llama", {"actor__sequence_parallel": 2}, 2),
        ("llama", {"actor__shard_size": 1, "actor__compute_dtype": "bfloat16", "actor__param_dtype": "bfloat16"}, 2),
        ("llama", {"actor__optimizer__moment_dtype": "int8", "actor__optimizer__learning_rate": 0.05}, 2),
        ("llama", {"actor__cpu_offload": True}, 2),
        ("llama", {"actor__offload_between_phases": True}, 1),
        ("qwen3.5", {"actor__lora": {"rank": 2}, "actor__optimizer__learning_rate": 0.05}, 2),
        ("gpt-oss", {"actor__activation_checkpointing": "full", "actor__max_tokens": 32}, 2),
    ],
    ids=[
        "lora",
        "sequence_parallel",
        "hybrid",
        "moments_in_8_bits",
        "cpu_offload",
        "offload_between_phases",
        "padded_recurrent",
        "sinks",
    ],
)
def test_killed_resumed_and_exported(name, options, world_size, tiny_model, tmp_path):
    model, (whole, killed) = tiny_model(name), (tmp_path / "whole", tmp_path / "killed")
    for folder in (whole, killed):
        write_config(model, folder, OPTIONS | options)
    killed_run(killed, world_size)
    run_distributed(train_whole_and_resume, world_size, whole, killed)
    assert_same_result(killed / "run", whole / "run")
    check_export(whole / "run", tmp_path / "exported")


@pytest.mark.long
@needs_vllm
def test_with_vllm(tmp_path):
    """vLLM's samples depend on how requests were batched, so that the steps are counted, not their numbers."""
    model = save_tiny_model("llama", tmp_path / "model", **HEADS)
    options = OPTIONS | {"rollout__backend": "vllm", "rollout__vllm__cpu_cache_gib": 0.1}
    write_config(model, tmp_path, options)
    killed_run(tmp_path, 1)
    assert main(["train", str(tmp_path / "config.yaml"), "--resume"]) == 0
    rows = comparable(tmp_path / "run")
    assert [row["step"] for row in rows if "ratio_max" in row] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4
    check_export(tmp_path / "run", tmp_path / "exported")
