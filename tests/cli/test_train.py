import json
import math
import os
import shutil

import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rlft_fast.cli import main
from rlft_fast.cli.commands import data, serve, train
from rlft_fast.cli.commands import eval as evaluate
from rlft_fast.cli.commands.train import _memory
from rlft_fast.cli.keys import FLAGS, key_reference, split_overrides
from rlft_fast.config import Config, ConfigError, sections
from rlft_fast.engine.memory import changed, plan_memory
from rlft_fast.engine.sharding import host_memory
from rlft_fast.run.records import write_rollout
from tests.support.tiny_models import save_tiny_model
from tests.trainer.toy import HERE, even_share, toy_values, write_rows

MINIMAL = {"model": "models/policy", "output_dir": "runs/first", "steps": 3, "data": {"task": "chain_sum"}}


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return str(path)


# Both spellings, before and after the file, a key of the top level, a negative-looking and a structured value.
@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["{config}", "--rollout.temperature", "0.7"], "rollout.temperature", 0.7),
        (["{config}", "--rollout.temperature=0.7"], "rollout.temperature", 0.7),
        (["--steps", "9", "{config}"], "steps", 9),
        (["--actor.optimizer.learning_rate", "1e-5", "{config}"], "actor.optimizer.learning_rate", 1e-5),
        (["{config}", "--data.system_prompt=--be-brief"], "data.system_prompt", "--be-brief"),
        (["{config}", "--data.system_prompt", "a=b"], "data.system_prompt", "a=b"),
        (["{config}", "--data.task_options", "{min_terms: -2}"], "data.task_options", {"min_terms": -2}),
        (["{config}", "--actor.optimizer.max_grad_norm", "null"], "actor.optimizer.max_grad_norm", None),
        (["{config}", "--seed", "1", "--seed", "2"], "seed", 2),  # the last one wins
    ],
)
def test_overrides(arguments, key, value, config_file):
    rest, overrides = split_overrides([config_file if a == "{config}" else a for a in arguments])
    assert rest == [config_file]
    resolved = Config.load(config_file, overrides)
    for part in key.split("."):
        resolved = getattr(resolved, part)
    assert resolved == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollout.temprature", "0.7"], "unknown key rollout.temprature: did you mean rollout.temperature?"),
        (["--learning_rate=1e-5"], "unknown key learning_rate: did you mean actor.optimizer.learning_rate?"),
        (["--steps", "0"], "steps: Input should be greater than 0, got 0"),
        (["--rollout.temperature"], "--rollout.temperature needs a value"),
        (["--rollout.temperature", "--resume"], "--rollout.temperature needs a value"),
        (["--.steps", "5"], "unknown key '.steps': a part between dots is empty"),
        (["--force"], "--force has no meaning without --resume"),
        (["--resume="], "--resume= names no checkpoint: give a name, such as step_00000020, or --resume alone"),
        (["--ray", "--cluster", "null"], "--ray asks for a cluster, and --cluster null for none"),
        (["--data.task_options", "{x"], "data.task_options: '{x' is no list or mapping in YAML: expected ',' or '}'"),
    ],
)
def test_bad_options_are_status_2_and_one_message(arguments, message, config_file, capsys):
    assert main(["train", config_file, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")


def test_every_wrong_key_is_named(config_file, capsys):
    assert main(["train", config_file, "--steps", "0", "--rollout.temprature", "1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line[:7] for line in lines] == ["error: ", " " * 7]
    assert {line[7:].split(":")[0] for line in lines} == {"steps", "unknown key rollout.temprature"}


@pytest.mark.parametrize("text", [None, "model: [", "- a", ""])
def test_unusable_file(text, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["train", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_split_overrides_keeps_flags_and_order():
    rest, overrides = split_overrides(["--a.b", "-1", "x.yaml", "--resume", "--c=", "-h", "--dry-run", "--help"])
    assert rest == ["x.yaml", "--resume", "-h", "--dry-run", "--help"]
    assert overrides == {"a.b": "-1", "c": ""}


def test_no_option_of_a_command_is_taken_for_a_configuration_key():
    parsers = [train._parser(None), data._parser(), evaluate._parser(), serve._parser()]
    actions = [action for parser in parsers for action in parser._actions]
    assert {option for action in actions for option in action.option_strings} == {*FLAGS}
    with pytest.raises(ConfigError, match=r"--a\.b needs a value: .* \(only .* stand alone\)") as raised:
        split_overrides(["x.yaml", "--a.b"])
    alone = str(raised.value).rpartition("(only ")[2].removesuffix(" stand alone)").split(", ")
    assert set(alone) == {option for action in actions if action.nargs in (0, "?") for option in action.option_strings}


@pytest.mark.parametrize("place", ["before", "behind"])
def test_resume_takes_the_name_of_a_checkpoint_but_no_configuration(place, config_file, capsys):
    """The configuration may stand behind it."""
    for resume in (["--resume"], ["--resume", "step_20"], ["--resume=x/step_20"]):
        arguments = [*resume, config_file] if place == "before" else [config_file, *resume]
        assert main(["train", *arguments, "--steps", "0"]) == 2
        assert capsys.readouterr().err == "error: steps: Input should be greater than 0, got 0\n"


def test_help_explains_every_key(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for name, field in sections(Config):
        assert f"{name}: " in words or f"--{name} " in words
        assert " ".join(field.description.split()) in words


def test_help_shows_types_bounds_and_defaults():
    lines = [line.split(None, 1) for line in key_reference(width=300).splitlines() if line.startswith("  --")]
    meaning = dict(lines)
    assert meaning["--model"].endswith("(text; required)")
    assert meaning["--seed"].endswith("(integer >= 0, <= 9223372036854775807; default 0)")
    assert meaning["--data.path"].endswith("(text or mapping or null; default null)")
    assert meaning["--data.chat"].endswith("(true or false; default true)")
    assert meaning["--algorithm.gamma"].endswith("(number >= 0, <= 1; default 1.0)")
    assert meaning["--algorithm.kl_in"].endswith("(loss | reward; default loss)")
    assert meaning["--actor.optimizer.betas"].endswith("([number, number]; default [0.9, 0.999])")
    assert meaning["--actor.optimizer.max_grad_norm"].endswith("(number >= 0 or null; default 1.0)")


# 80: the narrowest terminal in use; 120: the longest line of the help.
@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_the_terminal(width):
    assert max(map(len, key_reference(width).splitlines())) <= width


@pytest.mark.parametrize("arguments", [["--help", "rollout"], ["--help=rollout"]])
def test_help_of_one_section(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["train", *arguments])
    assert exit_info.value.code == 0
    keys = [line.split()[0][2:] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert set(keys) == {key for key, _ in sections(Config) if key.startswith("rollout.")} - {"rollout.vllm"}


def test_help_of_an_unknown_section(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["train", "--help", "rolout"])
    assert exit_info.value.code == 2
    assert "there is no section rolout: give one of profile, data, reward, " in capsys.readouterr().err


@pytest.fixture
def too_large(tiny_model, tmp_path):
    """A run with a token cap that needs more memory than any machine has."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(toy_values(tiny_model("llama"), tmp_path, actor__max_tokens=50_000_000)))
    return str(path)


def test_a_token_cap_that_does_not_fit_is_refused_before_the_run(too_large, tmp_path, capsys):
    assert main(["train", too_large]) == 1
    error = capsys.readouterr().err
    assert "error: the phase 'update actor' needs " in error
    largest = int(error.split("It fits with --actor.max_tokens ")[1].split()[0].rstrip("."))
    assert 10_000 < largest < 50_000_000  # 2^20 at most
    assert "--no-memory-check starts the run all the same" in error
    assert not (tmp_path / "run").exists()


def test_a_replay_needs_no_memory_of_the_generator(tiny_model, tmp_path, capsys):
    """The policy takes the place of vLLM, with its own cache, if the replay evaluates. Otherwise nothing is sampled."""
    vllm = {"backend": "vllm", "vllm": {"cpu_cache_gib": 1e6}, "batch_size": 10**9}
    values = toy_values(tiny_model("llama"), tmp_path)
    values["rollout"] |= vllm
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    start = ["train", str(tmp_path / "config.yaml"), "--dry-run"]
    assert main(start) == 1
    vllm_gib = float(capsys.readouterr().err.split("needs ")[1].split(" GiB")[0])
    assert vllm_gib > 1e6
    replay = [*start, "--replay", str(tmp_path / "kept")]
    assert main(replay) == 1
    assert f"{tmp_path / 'kept'} has no samples of step 1 of 3" in capsys.readouterr().err
    (tmp_path / "kept").mkdir()
    for step in range(1, 4):
        write_rollout(tmp_path / "kept", step, {})
    assert main(replay) == 0
    assert "memory: a rough estimate fits easily" in capsys.readouterr().out
    assert main([*replay, "--evaluation.path", values["data"]["path"]]) == 1
    error = capsys.readouterr().err
    assert "the phase 'generate' needs " in error
    assert float(error.split("needs ")[1].split(" GiB")[0]) < vllm_gib


def test_what_memory_decides_is_said_and_recorded(tiny_model, tmp_path, capsys, monkeypatch):
    values = toy_values(tiny_model("llama"), tmp_path, actor__max_tokens=4096, actor__workspace_mib=1)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    full = changed(Config.parse(values), {"actor.activation_checkpointing": "full"})
    memory = 1.01 * max(phase.total_bytes for phase in plan_memory(full, 1, 2**30, "cpu").phases) / 0.9
    monkeypatch.setattr("rlft_fast.engine.sharding.device_memory", lambda _: memory)
    assert main(["train", str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    chosen = "--actor.activation_checkpointing full --actor.reduce_every_micro_batch false"
    assert out.splitlines()[0] == f"# chosen by memory: {chosen}"
    assert yaml.safe_load(out)["actor"]["activation_checkpointing"] == "full"


def test_the_dtype_that_the_cpu_decides_is_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rlft_fast.trainer.dtypes.has_fast_bfloat16", lambda: True)  # on a CPU without AMX, too
    values = toy_values(save_tiny_model("llama", tmp_path / "model", hidden_size=256), tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["actor"]["compute_dtype"] == "bfloat16"


def test_fit_needs_gpus(too_large, tmp_path, capsys):
    assert main(["train", too_large, "--fit"]) == 1
    assert "--fit chooses settings for the memory of GPUs, and there is no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_fit_chooses_is_a_comment_of_the_configuration(too_large, capsys, monkeypatch):
    monkeypatch.setattr(train, "_memory", lambda _: (1, 2e9, "cuda", 64e9))
    assert main(["train", too_large, "--fit", "--dry-run"]) == 0
    out = capsys.readouterr().out
    options = out.splitlines()[0].removeprefix("# chosen by --fit: ").split()
    chosen = dict(zip(options[::2], options[1::2], strict=True))
    assert 10_000 < int(chosen["--actor.max_tokens"]) < 50_000_000
    assert yaml.safe_load(out)["actor"]["max_tokens"] == int(chosen["--actor.max_tokens"])


def test_workers_share_the_memory_of_their_machine():
    alone, workers = (
        _memory(Config.parse(MINIMAL | {"cluster": cluster})) for cluster in (None, {"actor": {"num_workers": 4}})
    )
    assert alone == (1, host_memory(), "cpu", host_memory())
    assert workers == (4, host_memory() // 4, "cpu", host_memory() // 4)


def test_without_the_memory_check_a_warning_remains(too_large, tmp_path, capsys):
    assert main(["train", too_large, "--no-memory-check", "--steps", "1"]) == 0
    assert "warning: the phase 'update actor' needs " in capsys.readouterr().err
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.fixture
def toy_file(tiny_model, tmp_path):
    """The configuration file of a run that can start; everything is in the folder `tmp_path`."""
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy_values(tiny_model("llama"), tmp_path)))
    return str(path)


@pytest.mark.parametrize("place", ["toy.yaml", "toy.yaml/run", "toy.yaml/runs/first"])
def test_an_output_dir_that_is_a_file_or_below_one(place, toy_file, tmp_path, capsys):
    assert main(["train", toy_file, "--output_dir", str(tmp_path / place)]) == 1
    message = f"error: output_dir {tmp_path / place} cannot be written: {toy_file} is a file: name another folder"
    assert message in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize(("mode", "reason"), [(0o500, "there is no permission to write to "), (0, "Permission denied")])
def test_an_output_dir_without_permission(mode, reason, toy_file, tmp_path, capsys):
    parent = tmp_path / "locked"
    parent.mkdir()
    parent.chmod(mode)
    assert main(["train", toy_file, "--output_dir", str(parent / "run")]) == 1
    assert f"cannot be written: {reason}" in capsys.readouterr().err


def test_a_dry_run_says_what_it_has_checked(toy_file, tiny_model, tmp_path, capsys):
    held_out = ["--evaluation.path", str(write_rows(tmp_path / "held_out.jsonl", [{"prompt": "fog", "answer": 3}]))]
    critic = ["--algorithm.advantage", "gae", "--critic", "{max_tokens: 64}"]
    model = tiny_model("llama")
    files = sorted(tmp_path.rglob("*"))
    assert main(["train", toy_file, "--dry-run", *held_out, *critic]) == 0
    out = capsys.readouterr().out
    changes = {"evaluation__path": held_out[1], "algorithm__advantage": "gae", "critic__max_tokens": 64}
    for name in ("actor", "critic"):  # memory decides, and there is enough
        changes |= {f"{name}__activation_checkpointing": "none", f"{name}__reduce_every_micro_batch": False}
    resolved = Config.parse(toy_values(model, tmp_path, **changes))
    assert yaml.safe_load(out) == resolved.model_dump(mode="json")
    with open(model / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    number = sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    head = header["lm_head.weight"]["shape"]
    word = AutoTokenizer.from_pretrained(model).encode("sun")
    assert out.split("# checked, without reading weights:\n")[1].splitlines() == [
        f"#   output_dir: {tmp_path / 'run'} can be written",
        f"#   model: LlamaForCausalLM with {number:,} parameters",
        f"#   critic.model: LlamaModel with {number - math.prod(head):,} parameters",
        "#   data: 10 prompts of 3 to 4 tokens",
        "#   held-out data: 1 prompts of 3 to 3 tokens",
        f"#   reward: {HERE}:even_share: {even_share([word])[0]:g} for the first prompt's own text as an answer",
        out.splitlines()[-1],
    ]
    assert out.splitlines()[-1].startswith("#   memory: a rough estimate fits easily into ")
    assert sorted(tmp_path.rglob("*")) == files


def test_a_dry_run_finds_what_a_run_would_find(toy_file, tiny_model, tmp_path, capsys):
    """Everything at once: the folder is not a run's, a weight, a judge and a function are missing, data is wrong."""
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    write_rows(tmp_path / "data.jsonl", [{"prompt": "a prompt that is longer than eight tokens"}])
    options = ["--model", str(folder), "--reward.model", str(tmp_path / "judge")]
    options += ["--reward.function", f"{HERE}:no_such_function"]
    options += ["--actor.optimizer.schedule", f"{HERE}:no_such_schedule"]
    options += ["--actor.optimizer.groups", "{'*.no_such_layer.*': {learning_rate: 0.1}}"]
    (tmp_path / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    assert main(["train", toy_file, "--dry-run", *options]) == 1
    error = " ".join(capsys.readouterr().err.split())
    for message in (
        "is not the folder of a run",
        "model.norm.weight",
        f"model folder {tmp_path / 'judge'} does not exist",
        "longer than rollout.max_prompt_tokens=8",
        "no_such_function",
        "no_such_schedule",
        "optimizer.groups has the pattern '*.no_such_layer.*', which no trained parameter is left for",
    ):
        assert message in error


@pytest.mark.parametrize("function", ["no_such", "no_such:one", "no_such.py:one", f"{HERE}:no_such"])
def test_a_reward_function_that_does_not_exist_is_wrong_usage(function, toy_file, capsys):
    assert main(["train", toy_file, "--reward.function", function, "--algorithm.policy_loss", "no_loss:loss"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 2 mistakes:")
    assert "no_such" in error.splitlines()[-1]


@pytest.mark.parametrize(
    ("function", "message"), [("raises", "raised KeyError"), ("one_too_few", "returned 0 rewards")]
)
def test_a_dry_run_calls_the_reward_function(function, message, toy_file, capsys):
    assert main(["train", toy_file, "--dry-run", "--reward.function", f"{HERE}:{function}"]) == 1
    assert message in capsys.readouterr().err


def test_a_dry_run_gives_messages_to_a_function_that_takes_them(toy_file, tiny_model, tmp_path, capsys):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    judge = tmp_path / "judge.py"
    judge.write_text("def length(completions, **_):\n    return [len(own[0]['content']) for own in completions]\n")
    options = ["--model", str(folder), "--data.chat", "true", "--reward.conversational", "true"]
    assert main(["train", toy_file, "--dry-run", *options, "--reward.function", f"{judge}:length"]) == 0
    assert f"{judge}:length: 3 for the first prompt's own text as an answer" in capsys.readouterr().out


def test_demo_refuses_an_output_that_is_a_file(tmp_path, capsys):
    (tmp_path / "demo").touch()
    assert main(["demo", "--output", str(tmp_path / "demo")]) == 1
    assert f"output_dir {tmp_path / 'demo'} cannot be written" in capsys.readouterr().err
