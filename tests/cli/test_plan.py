"""``rlft-fast plan`` prints what a run needs; its exit status says whether the run fits."""

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlft_fast.cli import main
from rlft_fast.config import Config
from rlft_fast.engine.memory.run import most_micro_batches

ROOT = Path(__file__).parents[2]
CONFIG = {
    "output_dir": "runs/x", "steps": 1, "data": {"task": "chain_sum"},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_prompt_tokens": 30, "max_new_tokens": 34},
    "actor": {"max_tokens": 128, "workspace_mib": 16},
}  # fmt: skip


@pytest.fixture
def config_file(tiny_model, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"model": str(tiny_model("llama"))}))
    return str(path)


@pytest.mark.slow
def test_plan_of_every_mesh(config_file, capsys):
    assert main(["plan", config_file, "--gpus", "4", "--memory", "1", "--gpus-per-node", "2"]) == 0
    output = capsys.readouterr().out
    assert "1 copies of 4 shards, at most 2 micro-batches of 128 tokens" in output
    assert "2 copies of 2 shards" in output
    for part in ("parameters", "gradients", "optimizer", "activations", "logits workspace", "sent per step"):
        assert output.count(f"\n  {part:<22} ") == 2, part
    for phase in ("generate", "infer actor", "update actor"):
        assert output.count(f"\n  {phase:<22} ") == 2, phase
    assert output.count("largest max_tokens") == 2


@pytest.mark.slow
def test_every_model_of_the_run_has_a_column(config_file, tiny_model, capsys):
    models = [
        "--reward.model",
        str(tiny_model("llama-reward")),
        "--algorithm.kl_coef",
        "0.1",
        "--rollout.backend",
        "vllm",
    ]
    models += ["--algorithm.advantage", "gae", "--critic.max_tokens", "64", "--critic.cpu_offload", "true"]
    assert main(["plan", config_file, "--gpus", "1", "--memory", "1", *models]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{tiny_model('llama')} on 1 GPUs of 1 GB\n")
    assert "critic: 0.00 billion parameters" in output
    header = next(line for line in output.splitlines() if line.startswith("  GB of a phase"))
    assert header.split()[4:] == ["actor", "reference", "critic", "reward", "vLLM", "in", "all"]
    phases = ["generate", "score", "infer actor", "infer reference", "infer critic", "update critic", "update actor"]
    for phase in [*phases, "sync"]:
        assert f"\n  {phase:<22} " in output, phase
    assert "  CPU memory at most" in output


def test_more_gpus_than_there_are(config_file, capsys):
    with pytest.raises(SystemExit):
        main(["plan", config_file, "--gpus", str(10**12), "--memory", "80"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("--gpus must be at most 1000000, got 1000000000000")


def test_plan_that_does_not_fit(config_file, capsys):
    saving = "--actor.activation_checkpointing full --actor.reduce_every_micro_batch true --actor.cpu_offload true"
    assert main(["plan", config_file, "--gpus", "1", "--memory", "0.00001", *saving.split()]) == 1
    output = capsys.readouterr().out
    assert output.count("does not fit into 0.0") == 3
    assert "\nNothing fits. No other settings are enough: the phase 'update actor' takes at least 0.0 GB of" in output
    assert output.endswith(", shorter sequences or a smaller model\n")
    assert "largest max_tokens             0  below the longest sequence, 64" in output


@pytest.mark.slow
def test_settings_that_would_fit_are_named(config_file, capsys):
    named = ["--actor.activation_checkpointing", "none"]  # else memory decides
    main(["plan", config_file, "--gpus", "1", "--memory", "1", *named])
    (needed,) = re.findall(r"at most +([\d.]+) GB", capsys.readouterr().out)
    arguments = ["plan", config_file, "--gpus", "1", "--memory", str(float(needed)), *named]  # of which 90 % are usable
    assert main(arguments) == 1
    advice = capsys.readouterr().out.splitlines()[-1]
    assert advice.startswith("Nothing fits. It fits with ")
    assert main([*arguments, *advice.removeprefix("Nothing fits. It fits with ").split()]) == 0


@pytest.mark.parametrize("option", ["--gpus=0", "--gpus=-2", "--memory=0", "--memory=nan", "--gpus-per-node=0"])
def test_a_machine_without_anything_is_wrong_usage(option, config_file, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["plan", config_file, "--gpus", "2", "--memory", "1", option])
    assert exit_info.value.code == 2
    assert f"{option.partition('=')[0]} must be more than 0" in capsys.readouterr().err


@pytest.mark.slow
def test_nodes_that_do_not_divide_the_gpus_are_left_out(config_file, capsys):
    assert main(["plan", config_file, "--gpus", "3", "--memory", "1", "--gpus-per-node", "2"]) == 0
    assert capsys.readouterr().out.count("largest max_tokens") == 1


def test_plan_takes_configuration_keys(config_file, capsys):
    main(["plan", config_file, "--gpus", "1", "--memory", "1", "--actor.max_tokens", "64"])
    assert "at most 16 micro-batches of 64 tokens" in capsys.readouterr().out


# 16 sequences of at most 64 tokens: a micro-batch of 128 tokens holds two, a micro-batch of 127 holds one. A rank
# without sequences still steps. Two ranks that share a micro-batch get the same sequences. Their number may be capped.
@pytest.mark.parametrize(
    ("max_tokens", "world_size", "sequence_parallel", "micro_batch_size", "expected"),
    [
        (128, 1, 1, None, 8), (127, 1, 1, None, 16), (128, 3, 1, None, 3), (64, 99, 1, None, 1), (128, 4, 2, None, 4),
        (128, 4, 4, None, 8), (128, 1, 1, 1, 16), (512, 1, 1, 3, 6), (128, 1, 1, 4, 8),
    ],
)  # fmt: skip
def test_num_micro_batches(max_tokens, world_size, sequence_parallel, micro_batch_size, expected):
    actor = {"max_tokens": max_tokens, "sequence_parallel": sequence_parallel, "micro_batch_size": micro_batch_size}
    config = Config.parse(CONFIG | {"model": "x", "actor": actor})
    assert most_micro_batches(config, world_size) == expected


# A field of the wrong type, fields that contradict each other, and values that raise errors in a configuration class.
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": "32"}, "Field 'hidden_size' expected int, got str (value: '32')"),
        ({"num_attention_heads": 3}, "The hidden size (32) is not a multiple of the number of attention heads (3)"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected 1"),
        ({"rope_scaling": {"type": "dynamic"}}, "Missing required keys in `rope_parameters`"),
        ({"dtype": "nonsense"}, "'nonsense'"),
    ],
)
def test_a_model_configuration_that_transformers_refuses(change, reason, config_file, tiny_model, tmp_path, capsys):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    assert main(["plan", config_file, "--gpus", "2", "--memory", "1", "--model", str(folder)]) == 1
    error = capsys.readouterr().err.splitlines()[0]
    assert error.startswith(f"error: {folder} is not a model folder: transformers ")
    assert reason in error
    assert error.endswith(": correct it, or give another folder")


def test_code_in_a_model_folder_is_not_run(config_file, tiny_model, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("it asks"))
    assert main(["plan", config_file, "--gpus", "2", "--memory", "1", "--model", str(folder)]) == 1
    assert "contains custom code" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
def test_the_plan_of_a_large_model_takes_seconds():
    """Of 80 layers a few are simulated, and the others inferred from them.

    16 s of CPU instead of 92 on a fast machine, and 41 s on a slow one: the bound lies below what the fast one would
    take for all layers.
    """
    command = [sys.executable, "-m", "rlft_fast", "plan", "examples/plan_70b.yaml", "--gpus", "1024", "--memory", "141"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "on 1024 GPUs of 141 GB" in result.stdout, result.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 80
