"""Whatever is wrong with the input, the command line says it once, without a traceback, before work is lost."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from rlft_fast.cli import main
from rlft_fast.run.folder import claim
from tests.support.tiny_models import ROPE_LIMIT, save_tiny_model
from tests.trainer.toy import HERE, comparable, read_lines, toy_values, write_rows


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def run(model, tmp_path, capsys):
    """Runs `train` on the toy task with changed values; returns the exit code, stdout, and the error message."""

    def call(**changes) -> tuple[int, str, str]:
        values = toy_values(changes.pop("model", model), tmp_path, **changes)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
        capsys.readouterr()
        code = main(["train", str(tmp_path / "config.yaml")])
        captured = capsys.readouterr()
        before, _, message = captured.err.partition("error: ")
        assert "error" not in before.lower()
        return code, captured.out, message

    return call


def test_a_support_that_the_head_has_no_room_for(run):
    code, _, error = run(rollout__top_k=100_000, actor__workspace_mib=1)
    assert code == 1
    assert "rollout.top_k is 100000" in error
    assert "set actor.workspace_mib to 16" in error


# ---- models ---------------------------------------------------------------------------------------------------------


def test_missing_model(run, tmp_path):
    code, _, error = run(model=tmp_path / "nowhere")
    assert code == 1
    assert error.startswith(f"model folder {tmp_path / 'nowhere'} does not exist: give a local folder")
    assert not (tmp_path / "run").exists()


def without_config(folder):
    (folder / "config.json").unlink()


def with_broken_config(folder):
    (folder / "config.json").write_text("{")


def with_unknown_type(folder):
    (folder / "config.json").write_text('{"model_type": "no-such-type", "architectures": ["NoneForCausalLM"]}')


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def with_cut_off_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def without_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def with_missing_layer(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_headless_weights(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage",
    [
        without_config, with_broken_config, with_unknown_type, without_weights, without_tokenizer,
        with_cut_off_weights,
        with_missing_layer,
        with_headless_weights,
    ],
)  # fmt: skip
def test_unreadable_model(damage, run, tmp_path):
    folder = save_tiny_model("llama", tmp_path / "model")
    damage(folder)
    code, _, error = run(model=folder)
    assert code == 1
    assert str(folder) in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["model", "critic.model"])
def test_weights_that_are_not_finite(key, run, model, tmp_path):
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    critic = {"algorithm__advantage": "gae", "critic": {"model": str(folder), "max_tokens": 64}}
    code, _, error = run(**critic if key == "critic.model" else {"model": folder})
    assert code == 1
    prefix = "backbone" if key == "critic.model" else "model.model"
    assert error.splitlines()[0] == (
        f"{key} is {folder}, whose weights are not finite ({prefix}.layers.1.mlp.up_proj.weight): save or download it "
        "again"
    )
    assert not (tmp_path / "run").exists()


def test_an_end_token_that_is_none(run, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [[1]]}')
    code, _, error = run(model=folder)
    assert code == 1
    assert "eos_token_id" in error
    assert len(error.splitlines()) <= 2


def test_model_without_lm_head(run, model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    AutoModel.from_config(AutoConfig.from_pretrained(model)).save_pretrained(tmp_path / "model")
    code, _, error = run(model=tmp_path / "model")
    assert code == 1
    assert "is LlamaModel and has no lm_head: a policy must be a causal language model" in error
    assert not (tmp_path / "run").exists()


def test_a_critic_of_another_vocabulary(run, tmp_path):
    folder = save_tiny_model("llama", tmp_path / "critic")
    text = (folder / "tokenizer.json").read_text()
    file = json.loads(text)
    vocabulary = file["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(file))
    options = {"algorithm__advantage": "gae", "critic": {"model": str(folder), "max_tokens": 64}}
    code, _, error = run(**options)
    assert code == 1
    assert error.startswith(f"critic.model is {folder}, whose tokenizer has other numbers for 2 of the policy's tokens")
    (folder / "tokenizer.json").write_text(text)
    assert run(**options, steps=1)[0] == 0


def test_a_critic_whose_rotary_embeddings_change_at_the_lengths_of_the_run(run, tiny_model, tmp_path):
    """Before the run begins, however short the first sequences are."""
    critic = {"algorithm__advantage": "gae", "critic": {"model": str(tiny_model("phi3")), "max_tokens": 64}}
    code, _, error = run(**critic, rollout__max_prompt_tokens=ROPE_LIMIT - 5)
    assert code == 1
    assert error.startswith(
        f"sequences have up to {ROPE_LIMIT + 1} tokens, but the longrope rotary embeddings of Phi3Model change beyond "
        f"{ROPE_LIMIT} tokens"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["model", "critic.model"])
def test_embeddings_for_fewer_tokens_than_the_prompts_have(key, run, tmp_path):
    folder = save_tiny_model("llama", tmp_path / "small", vocab_size=60, pad_token_id=0)
    critic = {"algorithm__advantage": "gae", "critic": {"model": str(folder), "max_tokens": 64}}
    code, _, error = run(**critic if key == "critic.model" else {"model": folder})
    assert code == 1
    assert error.startswith(f"{key} has embeddings of 60 tokens, but the prompts have the token ")
    assert not (tmp_path / "run").exists()


# ---- data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ('{"prompt": "a"}\n{"answer": "b"}\n', "rows 1 (counted from 0) have no 'prompt'"),
        (
            '{"prompt": "a"}\n{"prompt": "too long a prompt"}\n',
            "rows 1 (counted from 0) are longer than rollout.max_pr",
        ),
        ('{"prompt": "a"}\n{"prompt": "b"\n', "line 2 is not JSON"),
        (
            json.dumps({"prompt": "a " * 25_000_000}) + "\n",
            "row 0 (counted from 0) has 50000000 characters, more than 1000 for each of rollout.max_prompt_tokens=",
        ),
    ],
)
def test_unusable_data(text, message, run, tmp_path):
    (tmp_path / "data.jsonl").write_text(text)
    code, _, error = run()
    assert code == 1
    assert error.startswith(str(tmp_path / "data.jsonl"))
    assert message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("endless", ["pipe", "device"])
def test_data_that_never_ends(endless, run, tmp_path):
    path = Path("/dev/zero") if endless == "device" else tmp_path / "pipe"
    if endless == "pipe":
        os.mkfifo(path)
    code, _, error = run(data__path=str(path))
    assert code == 1
    assert error.startswith(f"cannot read the data {path}: {path} is no regular file")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 / 0 }}", "cannot be applied to row 0 (counted from 0): division by zero"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "cannot be applied to row 0"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "cannot be applied to row 0"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "cannot be applied to row 0 (counted from 0): it takes more than 1.5 seconds of CPU time",
        ),
        ("", "row 0 (counted from 0): the chat template does not show message 0, of the role 'user'"),
    ],
)
def test_templates_that_fail_or_say_nothing(template, message, run, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    code, _, error = run(model=folder, data__chat=True)
    assert code == 1
    assert message in error
    assert len(error.splitlines()) <= 2


def test_data_is_checked_before_the_reward_model_is_loaded(run, tiny_model, tmp_path):
    """Which takes minutes where it is large; this one cannot be loaded at all."""
    reward_model = shutil.copytree(tiny_model("llama-reward"), tmp_path / "reward")
    (reward_model / "model.safetensors").unlink()
    code, _, error = run(reward={"model": str(reward_model)})
    assert code == 1
    assert "cannot load the model" in error
    (tmp_path / "images.jsonl").write_text('{"prompt": "<image>what?", "images": ["a.png"]}')
    code, _, error = run(reward={"model": str(reward_model)}, data__path=str(tmp_path / "images.jsonl"))
    assert code == 1
    assert "rows 0 (counted from 0) have images, videos or audio beside their 'prompt'" in error


def test_unusable_held_out_data(run, tmp_path):
    write_rows(tmp_path / "held_out.jsonl", [{"prompt": "a"}, {"prompt": "too long a prompt"}])
    code, _, error = run(evaluation__path=str(tmp_path / "held_out.jsonl"))
    assert code == 1
    assert error.startswith(f"{tmp_path / 'held_out.jsonl'}: rows 1")
    assert not (tmp_path / "run").exists()


def test_no_chat_template(run):
    code, _, error = run(data__chat=True)
    assert code == 1
    assert "data.chat: false" in error


def test_dataset_folder(run, tmp_path):
    Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]).save_to_disk(tmp_path / "dataset")
    code, _, _ = run(data__path=str(tmp_path / "dataset"), steps=1)
    assert code == 0
    assert {row["prompt"] for row in read_lines(tmp_path / "run" / "samples.jsonl")} == {"a", "b"}


def test_reasoning_gym_task(run, tmp_path):
    changes = {"data": {"task": "chain_sum", "task_size": 5, "chat": False}, "reward": {}}
    lengths = {"rollout__max_prompt_tokens": 200, "actor__max_tokens": 300}
    code, _, error = run(**changes, **lengths, steps=1)
    assert code == 0, error
    assert all(0 <= row["reward"] <= 1 for row in read_lines(tmp_path / "run" / "samples.jsonl"))


def test_unknown_reasoning_gym_task(run):
    code, _, error = run(data={"task": "chain_summ"}, reward={})
    assert code == 1
    assert "no task 'chain_summ' (did you mean chain_sum" in error


# ---- reward functions -----------------------------------------------------------------------------------------------


def test_a_reward_function_that_is_no_python(run, tmp_path):
    (tmp_path / "no_python.py").write_text("import json\ndef reward(:\n")
    code, _, error = run(reward__function=f"{tmp_path / 'no_python.py'}:reward")
    assert code == 1
    assert error.startswith(f"{tmp_path / 'no_python.py'}, line 2 is no Python: ")
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:reward", "there is no module 'no_such_module'"),
        (f"{HERE}:even_shar", "has no function 'even_shar' (did you mean even_share"),
        (f"{HERE.parent / 'toi.py'}:even_share", "toi.py' (did you mean toy.py?)"),
        ("even_share", "expected 'module:function'"),
    ],
)
@pytest.mark.parametrize("key", ["reward__function", "evaluation"])
def test_missing_reward_function(key, function, message, run, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "fog", "answer": 3}])
    evaluation = {"path": str(held_out), "function": function}
    code, _, error = run(**{key: evaluation if key == "evaluation" else function})
    assert code == 2
    assert message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "reward function raises raised KeyError on a batch of 16 samples: 'solution'"),
        ("one_too_few", "reward function one_too_few returned 15 rewards for 16 samples"),
        ("nan", "reward function nan returned nan for sample 15 (prompt '"),
    ],
)
def test_failing_reward_function(function, message, run, tmp_path):
    code, out, error = run(reward__function=f"{HERE}:{function}")
    assert code == 1
    assert error.startswith(message)
    assert "failed after step 0: nothing was learned yet" in out
    assert not (tmp_path / "run" / "checkpoints").exists()  # nothing stands in the way of the next try


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward__function": "rlft_fast.rewards:regex_match"}, "the training data, ['answer']: missing a required"),
        ({"evaluation__path": "held_out.jsonl", "evaluation__function": "rlft_fast.rewards:last_number"}, "held-out"),
        ({"data__prompt_column": "question"}, "has a column named 'prompts'"),
    ],
)
def test_data_that_the_reward_function_cannot_read(changes, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "held_out.jsonl", [{"prompt": "fog"}])
    if "data__prompt_column" in changes:
        write_rows(tmp_path / "data.jsonl", [{"question": "fog", "prompts": 3}])
    without_weights(save_tiny_model("llama", tmp_path / "model"))  # refused before they are looked for
    code, _, error = run(model=tmp_path / "model", **changes)
    assert code == 1
    assert message in error


def test_none_leaves_a_sample_out(run, tmp_path):
    code, out, _ = run(reward__function=f"{HERE}:not_for_sun", **sun_and_moon(tmp_path))
    assert code == 0
    assert "warning" not in out
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    assert all((row["reward"] is None) == (row["prompt"] == "sun") for row in samples)
    rows = comparable(tmp_path / "run")
    assert [row["left_out_share"] for row in rows] == [0.5] * 3
    assert all(row["grad_norm"] > 0 for row in rows)


def test_none_leaves_a_held_out_problem_out(run, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": word} for word in ("sun", "moon", "star")])
    code, out, _ = run(reward__function=f"{HERE}:not_for_sun", evaluation__path=str(held_out), steps=1)
    assert code == 0
    assert "on 2 problems" in out


def sun_and_moon(folder) -> dict:
    """Two prompts, both in every step, and more mini-batches than the samples that are left."""
    path = write_rows(folder / "two.jsonl", [{"prompt": "sun"}, {"prompt": "moon"}])
    return {"data__path": str(path), "rollout__prompts_per_step": 2, "algorithm__mini_batches": 6}


def test_all_none(run, model, tmp_path):
    code, out, _ = run(reward__function=f"{HERE}:nothing")
    assert code == 0
    for step in (1, 2, 3):
        assert f"warning: step {step}: the reward function left out every sample; nothing is learned" in out
    trained, initial = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run" / "hf", model))
    assert all(torch.equal(trained[name], initial[name]) for name in initial)
    rows = comparable(tmp_path / "run")
    assert [(row["left_out_share"], row["reward_mean"]) for row in rows] == [(1.0, None)] * 3


def test_all_rewards_equal(run, tmp_path):
    code, out, _ = run(reward__function=f"{HERE}:constant")
    assert code == 0
    for step in (1, 2, 3):
        assert f"warning: step {step}: all rewards are 0.25, which tells no answer from another" in out
    assert [row["step"] for row in comparable(tmp_path / "run")] == [1, 2, 3]


# ---- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor__max_tokens": 13}, "actor.max_tokens is 13, but a sequence may have 14 tokens"),
        ({"rollout__temperature": 0}, "rollout.temperature: Input should be greater than 0, got 0"),
        ({"rollout__temprature": 1}, "unknown key rollout.temprature: did you mean rollout.temperature?"),
        ({"reward": {}}, "reward.function is needed"),
        ({"timeout_minutes": 1e300}, "timeout_minutes: Input should be less than or equal to 525600"),
        ({"actor__lora": {"rank": 10**6}}, "actor.lora.rank: Input should be less than or equal to 16384"),
    ],
)
def test_wrong_configuration(changes, message, run, tmp_path):
    code, _, error = run(**changes)
    assert code == 2
    assert error.startswith(message)
    assert not (tmp_path / "run").exists()


# ---- the disk -------------------------------------------------------------------------------------------------------


def test_output_folder_that_cannot_be_made(run, tmp_path):
    (tmp_path / "run").write_text("a file")
    code, _, error = run()
    assert code == 1
    assert str(tmp_path / "run") in error


def test_checkpoint_that_cannot_be_written(run, tmp_path):
    claim(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "step_00000003.incomplete").touch()  # a file where the folder should be
    code, _, error = run()
    assert code == 1
    assert error.startswith(f"could not save checkpoint {tmp_path / 'run' / 'checkpoints' / 'step_00000003'}")
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3


# ---- runs that diverge ----------------------------------------------------------------------------------------------


def steep(**optimizer: float) -> dict:
    optimizer = {"learning_rate": 1e30, "max_grad_norm": 1.0} | optimizer
    return {"actor__optimizer": optimizer, "checkpoint__every": 1}


def test_logits_that_overflow(run, tmp_path):
    """Weights of 1e30 are finite, what is computed with them is not; the newest checkpoint has them."""
    code, shown, error = run(**steep())
    assert code == 1
    assert error.splitlines()[0] == (
        "the policy's logits are not finite after step 1: the run has diverged. Lower actor.optimizer.learning_rate "
        "(1e+30) or actor.optimizer.max_grad_norm (1.0)"
    )
    newest = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert f"failed after step 1: {newest} has the weights of that step, remove it to continue from an older" in shown


def test_weights_that_are_too_large(run, model, tmp_path):
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 1e38
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    code, shown, error = run(model=folder)
    assert code == 1
    assert error.splitlines()[0] == (
        f"the policy's logits are not finite before the first step, although the weights in {folder} are: they are too "
        "large, or of another model than config.json says"
    )
    assert "the generator failed after step 0: nothing was learned yet, so nothing is saved" in shown


def test_weights_that_overflow_are_not_saved(run, tmp_path):
    code, _, error = run(**steep(weight_decay=1e30))
    assert code == 1
    assert error.startswith("step 1 is not saved, because weights of the actor are not finite (")
    cause = error.splitlines()[0].partition("): ")[2]
    assert cause == (
        "the run has diverged. Lower actor.optimizer.learning_rate (1e+30) or actor.optimizer.max_grad_norm (1.0); "
        "nothing was learned yet, so nothing is saved"
    )
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert not (tmp_path / "run" / "hf").exists()
