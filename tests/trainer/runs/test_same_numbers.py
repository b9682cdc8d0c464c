"""Six tiny runs whose numbers are recorded: a change of the code's structure changes none of their bits.

`python -m tests.trainer.runs.test_same_numbers` records them anew, which a change of bits has to declare.
"""

import hashlib
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.machine.distributed import run_distributed
from tests.support.tiny_models import save_tiny_model
from tests.trainer.ranks import train_in_process
from tests.trainer.toy import comparable, toy_config

RECORDED = Path(__file__).with_name("same_numbers.json")
TWICE = {"algorithm__mini_batches": 2, "algorithm__kl_coef": 0.01}
PPO = {
    "algorithm__advantage": "gae",
    "algorithm__epochs": 2,
    "algorithm__kl_in": "reward",
    "critic": {"max_tokens": 64},
}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "on-policy GRPO": (1, {"algorithm__entropy_coef": 0.01}),
    "PPO with a critic": (1, PPO | TWICE),
    "GSPO": (1, {"algorithm__policy_loss": "gspo", "algorithm__aggregation": "sequence-mean"} | TWICE),
    "LoRA with the head": (1, {"actor__lora": {"rank": 2, "target_modules": ("all-linear", "lm_head")}} | TWICE),
    "top_k": (1, {"rollout__top_k": 8} | TWICE),
    "2 processes": (2, TWICE),
}


def machine() -> dict[str, str]:
    """What the bits of a run depend on besides the code."""
    names = ("model name", "cpu family", "model", "stepping", "cache size")  # libraries choose their kernels by these
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    cpu = {name.strip(): value.strip() for name, _, value in reversed(lines) if name.strip() in names}
    return {
        "cpu": " ".join(f"{name} {cpu[name]}" for name in names if name in cpu) or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def run(name: str, folder: Path) -> dict[str, Any]:
    """Lines of metrics.jsonl without times, and a digest of the exported weights."""
    world_size, changes = RUNS[name]
    folder.mkdir(parents=True)
    model = save_tiny_model("llama", folder / "model")
    run_distributed(train_in_process, world_size, toy_config(model, folder, **changes))
    weights = (folder / "run" / "hf" / "model.safetensors").read_bytes()
    return {"metrics": comparable(folder / "run"), "weights": hashlib.sha256(weights).hexdigest()}


@pytest.mark.dist
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.thin(2)
def test_numbers_are_the_recorded_ones(name, tmp_path):
    """To the bit on the kind of machine that recorded them; elsewhere GEMMs round differently."""
    recorded = json.loads(RECORDED.read_text())
    expected, actual = recorded["runs"][name], json.loads(json.dumps(run(name, tmp_path / "it")))
    if machine() == recorded["machine"]:
        assert actual == expected
        return
    # Its first step alone: AdamW and clipping make large differences of small ones.
    assert actual["metrics"][0] == pytest.approx(expected["metrics"][0], rel=1e-3, abs=1e-5)


def record() -> None:
    """Runs all of them and writes their numbers."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: run(name, Path(folder) / str(i)) for i, name in enumerate(RUNS)}
    RECORDED.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    record()
