"""A run with everything that has a state, which its reward function can interrupt at any of its calls."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.trainer.toy import HERE, WORDS, comparable, read_lines, toy_values, write_rows

# Everything that has a state: an adaptive coefficient, moments of rewards, critic, reference, several optimizer steps
# per rollout, a schedule, evaluations.
OPTIONS = {
    "steps": 6,
    "reward__function": f"{HERE}:even_share_until_struck",
    "reward__normalize": "standardize",
    "algorithm": {
        "advantage": "gae", "kl_coef": 0.01, "kl_in": "reward", "kl_target": 0.01, "kl_horizon": 64, "epochs": 2,
        "mini_batches": 2,
    },
    "critic": {"max_tokens": 64},
    "actor__optimizer__schedule": "cosine",
    "checkpoint__every": 3,
    "evaluation__every": 2,
}  # fmt: skip
FEWER_OPTIONS = {name: value for name, value in OPTIONS.items() if name not in ("algorithm", "critic")}  # for speed
# Calls of the reward function: 1 evaluation, 2 and 3 steps 1 and 2, 4 evaluation, 5 and 6 steps 3 and 4 (with the
# checkpoint after step 3 between them), 7 evaluation, 8 and 9 steps 5 and 6, 10 evaluation.
IN_STEP_5 = 8


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
