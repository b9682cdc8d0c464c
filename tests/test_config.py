"""Configuration: accepted values, refused values, the messages, and that code reads every key."""

import ast
import copy
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import rlft_fast
from rlft_fast.config import OBJECTIVES, AlgorithmConfig, Config, ConfigError, load_config, section_of, sections
from rlft_fast.config.schema import algorithm as algorithm_config
from rlft_fast.config.schema import model as model_config
from rlft_fast.engine.schedule import _DECAYS
from rlft_fast.rl import ADVANTAGES, CORRECTIONS, POLICY_LOSSES, Aggregation, KLEstimator
from rlft_fast.trainer.learn.objective import Objective
from tests.support.runs.configs import MINIMAL

FULL = MINIMAL | {
    "cluster": {"generators": {}, "critic": {}, "reference": {}, "teacher": {}, "reward": {}},
    "rollout": {"backend": "vllm"},
    "data": {"path": "train.jsonl", "system_prompt": "Only the number: 1e5"},
    "reward": {"function": "rewards.py:score", "model": "models/reward"},
    "algorithm": {"advantage": "gae", "kl_in": "reward", "kl_coef": 0.05},
    "reference": {"max_tokens": 999},
    "teacher": {"model": "models/teacher", "weight": 0.5},
    "critic": {"model": "models/critic", "optimizer": {"learning_rate": 1e-5}, "lora": {"rank": 4}},
    "evaluation": {"path": "test.jsonl", "every": 5},
}
LORA = MINIMAL | {"actor": {"lora": {"rank": 8}}}  # lora and reference exclude each other


def with_value(key: str, value: Any, base: dict = MINIMAL) -> dict:
    """A copy of ``base`` with one dotted key set."""
    values = section = copy.deepcopy(base)
    *parents, name = key.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[name] = value
    return values


def get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


# ---- accepted -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [MINIMAL, FULL, LORA], ids=["minimal", "full", "lora"])
def test_resolved_yaml_loads_to_the_same_configuration(values, tmp_path):
    config = Config.parse(values)
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert Config.load(tmp_path / "resolved.yaml") == config


def test_a_name_on_the_hub_is_the_folder_in_the_cache(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--team--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--team--tiny" / "refs").mkdir()
    (tmp_path / "models--team--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    names = {"team/tiny": str(snapshot), "team/other": "team/other", "a/b/c": "a/b/c", "x/..": "x/.."}
    assert {name: Config.parse(MINIMAL | {"model": name}).model for name in names} == names


def test_resolved_yaml_holds_every_key():
    played = MINIMAL | {"environment": {"name": "games:Guess"}}
    server = {"url": "http://h:1", "judge": {"model": "m", "prompt": "p"}}
    served = MINIMAL | {"reward": {"server": server}, "profile": {"steps": [1]}}
    all_values = FULL, LORA, played, served
    full, lora, episodes, scored = (yaml.safe_load(Config.parse(values).to_yaml()) for values in all_values)
    others = {"actor.lora": lora, "environment": episodes, "reward.server": scored, "profile": scored}
    for key, _ in sections(Config):
        value = next((own for prefix, own in others.items() if key.startswith(prefix)), full)
        for part in key.split("."):
            assert part in value, key
            value = value[part]


def test_given_values_replace_defaults():
    config = Config.parse(FULL)
    assert config.critic is not None
    assert config.critic.optimizer.learning_rate == 1e-5
    assert config.critic.optimizer.eps == config.actor.optimizer.eps == 1e-8
    assert config.actor.optimizer.learning_rate == 1e-6


def test_parsing_leaves_its_input_alone():
    values = copy.deepcopy(FULL)
    Config.parse(values)
    assert values == FULL


def test_configuration_is_immutable():
    with pytest.raises(ConfigError, match="temperature cannot be set: a RolloutConfig is immutable, so make a new"):
        Config.parse(MINIMAL).rollout.temperature = 0.5  # pyrefly: ignore


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("seed", "7", 7),
        ("rollout.temperature", "0.7", 0.7),
        ("actor.optimizer.betas", "[0.8, 0.95]", (0.8, 0.95)),
        ("actor.optimizer.max_grad_norm", "null", None),
        ("data.chat", "false", False),
        ("algorithm.kl_estimator", "k1", "k1"),
        ("data.task_options", "{min_terms: 2}", {"min_terms": 2}),  # keys inside are the task's, not ours
        ("evaluation.path", "test.jsonl", "test.jsonl"),  # a section that is not in the file
    ],
)
def test_dotted_overrides(key, text, value, config_file):
    config = Config.load(config_file, {key: text})
    assert get(config, key) == value
    assert get(Config.load(config_file), "steps") == 3


def test_an_override_leaves_a_section_of_the_same_anchor_alone(config_file):
    text = "actor: &engine {max_tokens: 999}\ncritic: *engine\nalgorithm: {advantage: gae}\n"
    config_file.write_text(config_file.read_text() + text)
    config = Config.load(config_file, {"actor.max_tokens": "1000"})
    assert config.critic is not None
    assert (config.actor.max_tokens, config.critic.max_tokens) == (1000, 999)


# YAML 1.1 reads the first two as texts, the last two as numbers.
@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001"])
def test_scientific_notation(text, tmp_path, config_file):
    assert Config.load(config_file, {"actor.optimizer.learning_rate": text}).actor.optimizer.learning_rate == 1e-6
    path = tmp_path / "in_file.yaml"
    path.write_text(f"{config_file.read_text()}actor:\n  optimizer:\n    learning_rate: {text}\n")
    assert Config.load(path).actor.optimizer.learning_rate == 1e-6


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "examples").glob("*.yaml")), ids=lambda p: p.stem
)
def test_examples(path):
    config = load_config(path)
    if not isinstance(config, Config):
        return
    Objective(config.algorithm, config.rollout.max_new_tokens, has_critic=config.critic is not None)


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("rollout.temprature", "rollout.temperature"),
        ("rolout.temperature", "rollout"),
        ("temperature", "rollout.temperature"),  # right name, section forgotten
        ("actor.learning_rate", "actor.optimizer.learning_rate"),  # right name, wrong section
        ("checkpoint.max_nun", "checkpoint.max_num"),
    ],
)
def test_unknown_key_suggests_the_right_one(key, suggestion, config_file):
    with pytest.raises(ConfigError, match="unknown key") as error:
        Config.load(config_file, {key: "1"})
    assert str(error.value).endswith(f"did you mean {suggestion}?")


def test_unknown_key_that_resembles_nothing():
    with pytest.raises(ConfigError, match=r"^unknown key zzzzqqqq$"):
        Config.parse(with_value("zzzzqqqq", 1))


def test_thousands_of_unknown_keys_are_counted():
    with pytest.raises(ConfigError) as error:
        Config.parse(with_value("model", "m") | {f"k{i}": 1 for i in range(20_000)})
    lines = str(error.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "and 19980 more wrong keys"


def test_an_alias_bomb_is_one_short_line(config_file):
    levels = "".join(
        f"{to}: &{to} [{', '.join(['*' + of] * 9)}]\n" for of, to in zip("abcdefg", "bcdefgh", strict=True)
    )
    bomb = f"a: &a [x, x, x]\n{levels}model: *h\n"
    Path(config_file).write_text(bomb)
    with pytest.raises(ConfigError) as error:
        Config.load(config_file)
    (line,) = [line for line in str(error.value).splitlines() if line.startswith("model:")]
    assert len(line) < 500


def test_brackets_without_end_are_one_line(config_file):
    Path(config_file).write_text("a: " + "[" * 1000)
    with pytest.raises(ConfigError, match=r"^cannot read the configuration .*: it is nested too deeply$"):
        Config.load(config_file)


def test_a_configuration_that_never_ends():
    with pytest.raises(ConfigError, match=r"/dev/zero is no regular file$"):
        Config.load("/dev/zero")


def test_all_problems_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        Config.parse({"model": "m", "data": {"task": "t", "chatt": 1}, "rollout": {"temperature": 0}})
    problems = str(error.value).splitlines()
    assert {problem.split(" ")[0] for problem in problems} == {"output_dir", "steps", "unknown", "rollout.temperature:"}


# A value beyond each bound, or at a bound that is excluded; wrong types; unknown choices.
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        ("steps", 1.5),
        ("steps", "many"),
        ("steps", True),
        ("actor.compile", "maybe"),
        ("actor.lora", True),
        ("output_dir", ""),
        ("reward.function", 3),
        ("reward.timeout_s", 1e10),
        ("actor.wrap", "Block"),
        ("actor.shard_size", "many"),
        ("seed", -1),
        ("data", None),
        ("data.chat", "perhaps"),
        ("rollout.temperature", 0),
        ("rollout.temperature", float("nan")),
        ("rollout.top_k", 0),
        ("rollout.min_p", 1.5),
        ("rollout.top_p", 0.0),
        ("rollout.max_new_tokens", -1),
        ("algorithm.gamma", 1.01),
        ("algorithm.lam", -0.01),
        ("algorithm.clip_low", 1.5),
        ("algorithm.clip_high", -0.1),
        ("algorithm.kl_coef", -1),
        ("algorithm.kl_estimator", "k4"),
        ("algorithm.advantage", "grpoo"),
        ("algorithm.policy_loss", "ppoo"),
        ("algorithm.rollout_correction", "tis"),
        ("algorithm.high_entropy_share", 0.0),
        ("actor.compute_dtype", "float8"),
        ("actor.optimizer.learning_rate", 0),
        ("actor.optimizer.betas", 0.9),
        ("actor.optimizer.max_grad_norm", -1),
        ("actor.optimizer.warmup_steps", -1),
        ("checkpoint.max_num", 0),
    ],
)
def test_value_of_wrong_type_or_range(key, value):
    with pytest.raises(ConfigError) as error:
        Config.parse(with_value(key, value))
    assert str(error.value).startswith(f"{key}: ")
    assert f"got {value!r}" in str(error.value)


# Unbounded, an entropy_coef of 1e300 has every step skipped, an eps of 1e-300 is 0 in float32, a clip_high of 1e300
# ends the run with words of torch, and a kl_horizon of 10^400 with words of Python.
def test_no_key_takes_numbers_that_are_too_large_or_too_small():
    told = set()
    for key, field in sections(Config):
        if section_of(field.annotation) is None and key not in (
            "data.task_options",
            "data.template_kwargs",
            "environment.options",
            "rollout.vllm.engine_options",
            "actor.optimizer.options",
            "critic.optimizer.options",
        ):
            holds_several = re.search(r"\b(tuple|dict)\[", str(field.annotation))
            for number in (1e31, 1e300, 1e-31, 5e-324, 10**400):
                for value in (number, [number, 0.5], {"m:f": number}) if holds_several else (number,):
                    with pytest.raises(ConfigError, match=rf"(?m)^{key}(\.m:f|\.\d)?: ") as error:
                        Config.parse(with_value(key, value))
                    told |= {(key, number)} if "in size" in str(error.value) else set()
    assert {("algorithm.entropy_coef", 1e31), ("actor.optimizer.eps", 1e-31), ("algorithm.kl_horizon", 10**400)} <= told
    assert {("actor.optimizer.betas", 5e-324), ("algorithm.loss_options", 1e300), ("reward.function", 1e-31)} <= told


def test_no_integer_is_so_large_that_products_overflow():
    integers = [key for key, field in sections(Config) if "int" in re.findall(r"\w+", str(field.annotation))]
    assert len(integers) > 50
    for key in integers:
        for value in (2**63, -(2**63) - 1, 10**400):
            with pytest.raises(ConfigError, match=rf"(^|\n){re.escape(key)}: "):
                Config.parse(with_value(key, value))
    assert Config.parse(with_value("seed", 2**63 - 1)).seed == 2**63 - 1  # as long as a time stamp
    assert Config.parse(with_value("steps", 2**31 - 1)).steps == 2**31 - 1
    assert Config.parse(with_value("actor.optimizer.max_grad_norm", 2**40)).actor.optimizer.max_grad_norm == 2**40


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("reward.function", 3, "reward.function: Input should be a valid string or a mapping, got 3"),
        ("actor.wrap", "Block", "actor.wrap: Input should be a list, got 'Block'"),
        ("critic", 3, "critic: Input should be a mapping, got 3"),
        (
            "reward.function", {"m:f": "much"},
            "reward.function.m:f: Input should be a valid number, unable to parse string as a number, got 'much'",
        ),
    ],
)  # fmt: skip
def test_messages_are_of_yaml_and_name_a_key_once(key, value, message):
    with pytest.raises(ConfigError) as error:
        Config.parse(with_value(key, value))
    assert str(error.value) == message


# Combinations: each value alone is accepted.
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.advantage": "gae"}, "needs a critic"),
        ({"critic": {}}, "other built-in advantages take no critic"),
        (
            {"algorithm.skip_equal_groups": True, "algorithm.advantage": "gae", "critic": {}},
            "that compares samples",
        ),
        ({"rollout.samples_per_prompt": 1}, "must be >= 2"),
        ({"rollout.servers": ["http://127.0.0.1:8000"]}, "servers are vLLM's, and backend is hf"),
        ({"cluster.generators": {}}, "set rollout.backend to vllm"),
        (
            {"cluster.generators": {"gpus": 2}, "rollout.backend": "vllm"},
            "gpus is 2, but rollout.vllm.tensor_parallel is 1",
        ),
        ({"cluster.critic": {}}, "cluster.critic is given, but the run has no critic"),
        ({"cluster.actor.gpus": 0.5}, r"actor\.gpus is 0\.5, a share of a GPU, and no other group takes the rest"),
        (
            {"cluster.actor": {"gpus": 0.5, "num_workers": 2}, "cluster.reference": {"gpus": 0.75}},
            "need the same number of workers, but actor has 2, reference has 1",
        ),
        (
            {"cluster.actor.gpus": 0.5, "cluster.reference.gpus": 0.75},
            r"gpus of actor and reference are 0\.5 \+ 0\.75 = 1\.25 of a GPU, expected at most 1: lower them",
        ),
        (
            {"rollout.temperature": 0.005, "rollout.backend": "vllm"},
            r"rollout\.temperature is 0\.005, but vLLM would sample at 0\.01",
        ),
        (
            {"evaluation": {"path": "x.jsonl", "temperature": 1e-3}, "rollout.backend": "vllm"},
            r"evaluation\.temperature is 0\.001, but vLLM would sample at 0\.01",
        ),
        (
            {"rollout.vllm.adapter": True, "actor.lora": {}},
            "adapter is for a vLLM in the processes that train or beside",
        ),
        (
            {"rollout.vllm.adapter": True, "rollout.backend": "vllm", "rollout.servers": ["http://h:1"]},
            "adapter is for a vLLM in the processes that train or beside",
        ),
        (
            {"rollout.vllm": {"adapter": True, "engine_options": {"quantization": "fp8"}}, "rollout.backend": "vllm"},
            "adapter has not run beside quantized weights: leave engine_options",
        ),
        (
            {"rollout.vllm.adapter": True, "rollout.backend": "vllm"},
            r"adapter sends the adapters of actor\.lora, which is not given",
        ),
        (
            {"rollout.vllm.adapter": True, "rollout.backend": "vllm", "actor.lora": {"rank": 513}},
            r"lora\.rank is 513, and vLLM takes at most 512: lower it, or leave rollout\.vllm\.adapter out",
        ),
        (
            {
                "rollout.vllm.adapter": True,
                "rollout.backend": "vllm",
                "actor.lora": {"target_modules": ["lm_head"]},
            },
            r"target_modules has lm_head, and vLLM is given no adapter of the head: leave",
        ),
        (
            {
                "rollout.vllm.adapter": True,
                "rollout.backend": "vllm",
                "actor.lora": {},
                "cluster.generators": {},
            },
            r"cluster\.generators are servers, which are given no adapters: leave",
        ),
        ({"rollout.structured": {"regex": "a"}, "rollout.top_k": 5}, "structured is for a vLLM in the processes that"),
        ({"rollout.structured": {"regex": "a"}, "rollout.backend": "vllm"}, "structured is given without a top_k"),
        (
            {
                "rollout.structured": {"regex": "a"},
                "rollout.backend": "vllm",
                "rollout.top_k": 5,
                "cluster.generators": {},
            },
            r"structured is for a vLLM in the processes that train, but cluster\.generators are servers",
        ),
        (
            {"rollout.structured": {"regex": {}}, "rollout.backend": "vllm", "rollout.top_k": 5},
            "structured has one of regex",
        ),
        ({"data": {"task": "chain_sum", "streaming": True}}, "streaming reads files, and a task is made in memory"),
        (
            {"data.streaming": True, "data.overlong": "filter"},
            r"data\.overlong: filter cannot leave any out: set overlong: refuse",
        ),
        (
            {"data": {"path": "x.jsonl", "streaming": True}, "environment": {"name": "games.py:Guess"}},
            r"environment looks at all rows before the run starts, which data\.streaming leaves out",
        ),
        ({"rollout.min_p": 0.1}, r"min_p is 0\.1 without a top_k"),
        ({"rollout.top_p": 0.9}, r"top_p is 0\.9 without a top_k"),
        ({"algorithm.advantage": "rloo", "rollout.samples_per_prompt": 1}, "rloo compares samples"),
        ({"algorithm.kl_target": 0.1}, "give a kl_coef to start from"),
        ({"algorithm.entropy_target": 0.1}, "give an entropy_coef to start from"),
        ({"algorithm.max_refills": 2}, "set skip_equal_groups, too"),
        ({"algorithm.filter_by": "chain_sum"}, "names what skip_equal_groups and curriculum compare: set one of"),
        ({"algorithm.first_samples": 4}, "first_samples leaves out samples of prompts that skip_equal_groups leaves"),
        (
            {"algorithm.first_samples": 8, "algorithm.skip_equal_groups": True},
            "first_samples is 8, but is only a part of rollout.samples_per_prompt, 8: lower it",
        ),
        (
            {"algorithm.curriculum": 0.5, "rollout.samples_per_prompt": 1, "algorithm.advantage": "reinforce++"},
            "curriculum compares samples of one prompt",
        ),
        ({"algorithm.curriculum": 0.1}, "curriculum is 0.1, which is not one prompt of rollout.prompts_per_step, 8"),
        (
            {"algorithm.skip_equal_groups": True, "algorithm.filter_by": "length"},
            "filter_by is 'length', expected a part of the reward: chain_sum",
        ),
        (
            {
                "algorithm.skip_equal_groups": True,
                "algorithm.filter_by": "m:h",
                "actor.max_tokens": 641,
                "reward": {"function": {"m:f": 1.0, "m:g": 0.5}, "model": "rm"},
            },
            "filter_by is 'm:h', expected a part of the reward: m:f, m:g, model",
        ),
        (
            {"algorithm.policy_loss": "reinforce", "algorithm.epochs": 2},
            "epochs is 2, but policy_loss: reinforce has no ratio",
        ),
        (
            {"algorithm.policy_loss": "reinforce", "algorithm.rollout_correction": "bypass"},
            "bypass has no effect with policy_loss: reinforce",
        ),
        ({"algorithm.correction_high": 2.0}, "none has no bounds"),
        ({"algorithm.correction_low": 0.0}, "none has no bounds"),
        ({"algorithm.rollout_correction": "bypass", "algorithm.correction_high": 2.0}, "bypass has no bounds"),
        (
            {"algorithm.advantage": "m:f", "algorithm.skip_equal_groups": True, "rollout.samples_per_prompt": 1},
            "leaves out every prompt that has a single sample",
        ),
        ({"algorithm.kl_coef": 0.1, "algorithm.kl_estimator": "k1"}, "its gradient is 0 on average"),
        ({"rollout.prompts_per_step": 1, "algorithm.mini_batches": 9}, "larger than the number of samples"),
        ({"data.path": "train.jsonl"}, "not both"),
        ({"data.task": None}, "give either path"),
        ({"data.system_prompt": "Be brief.", "data.chat": False}, "which chat: false leaves out"),
        (
            {"data": {"path": "train.jsonl", "task_options": {"min_terms": 2}}, "reward.function": "m:f"},
            "task_options are options of a reasoning-gym task",
        ),
        ({"data": {"path": "train.jsonl"}}, "reward.function is needed"),
        ({"reward.timeout_s": 1.0}, "limit of reward.function, which is not given"),
        ({"reward.function": {}}, "reward.function names no function"),
        ({"evaluation": {"path": "a", "function": {}}}, "evaluation.function names no function"),
        ({"reward.overlong_buffer": 129}, "part of rollout.max_new_tokens and cannot be longer"),
        ({"actor.max_tokens": 639}, "may have 640 tokens"),
        ({"algorithm.kl_coef": 0.1, "reference.max_tokens": 639}, r"reference\.max_tokens is 639"),
        ({"actor.max_tokens": 640, "reward.model": "rm"}, "may see 641 tokens .* raise it by 1"),
        (
            {"reward.models": {"a": {"model": "rm", "max_tokens": 640}}},
            r"reward\.models\.a\.max_tokens is 640, .* may see 641 tokens",
        ),
        ({"reward": {"model": "rm", "models": {"a": {"model": "rm"}}}}, "either model .* or models"),
        ({"reward.models": {"length": {"model": "rm"}}}, "models has one named 'length'"),
        (
            {"reward.models": {"a": {"modell": "rm"}}},
            r"reward\.models\.a\.modell: did you mean reward\.models\.a\.model\?",
        ),
        ({"reward.models": {"a": {}}}, r"reward\.models\.a\.model is missing"),
        (
            {"actor.max_tokens": 640, "reward.model": "rm", "evaluation": {"path": "a", "max_new_tokens": 200}},
            "may see 713 tokens .* raise it by 73",
        ),
    ],
)
def test_inconsistent_values(changes, message):
    values = MINIMAL
    for key, value in changes.items():
        values = with_value(key, value, values)
    with pytest.raises(ConfigError, match=message):
        Config.parse(values)


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_gpu"),
    [
        ({}, ("float32", False), ("bfloat16", True)),
        ({"compute_dtype": "float32", "compile": False}, ("float32", False), ("float32", False)),
        ({"param_dtype": "bfloat16", "compile": True}, ("bfloat16", True), ("bfloat16", True)),
    ],
)
def test_what_auto_means_on_a_device(given, on_cpu, on_gpu):
    sections = {"actor": given, "reference": given, "algorithm": {"kl_coef": 0.1}}
    config = Config.parse(MINIMAL | sections)
    for device, wanted in (("cpu", on_cpu), ("cuda", on_gpu)):
        resolved = config.for_device(device)
        for model in (resolved.actor, resolved.reference):
            assert (model.compute_dtype, model.compile) == wanted
            assert model.for_device("cpu") == model
        actor = resolved.actor  # a run's memory may decide otherwise
        assert (actor.activation_checkpointing, actor.reduce_every_micro_batch) == ("none", False)
    moved = Config.parse(MINIMAL | {"actor": given | {"optimizer": {"cpu_offload": True}}})
    assert not moved.for_device("cpu").actor.optimizer.cpu_offload
    assert moved.for_device("cuda").actor.optimizer.cpu_offload


def test_limits_that_are_just_met():
    Config.parse(with_value("actor.max_tokens", 640))  # 512 prompt + 128 new tokens
    Config.parse(with_value("algorithm.mini_batches", 64))  # 8 prompts x 8 samples
    Config.parse(with_value("reward.overlong_buffer", 128))
    with_model = with_value("reward.model", "rm", with_value("actor.max_tokens", 641))
    Config.parse(with_model)  # 640, and one token that the reward model adds
    judged_otherwise = {"path": "a", "max_new_tokens": 200, "function": "m:f"}
    Config.parse(with_value("evaluation", judged_otherwise, with_model))


def test_held_out_answers_are_as_long_as_those_to_learn_from_unless_said():
    lengths = {}
    for own in (None, 64, 200):
        config = Config.parse(with_value("evaluation", {"path": "a", "max_new_tokens": own}, FULL))
        lengths[own] = config.max_evaluation_tokens, config.longest_sequence
    assert lengths == {None: (128, 640), 64: (64, 640), 200: (200, 712)}
    assert Config.parse(with_value("evaluation", None, FULL)).max_evaluation_tokens == 0


def test_critic_must_hold_the_longest_sequence_too():
    with pytest.raises(ConfigError, match=r"critic\.max_tokens is 639"):
        Config.parse(with_value("critic.max_tokens", 639, FULL))


def test_reference_without_a_use():
    with pytest.raises(ConfigError, match="reference has nothing to configure"):
        Config.parse(with_value("reference.max_tokens", 999))
    with pytest.raises(ConfigError, match="reference has nothing to configure"):
        Config.parse(with_value("reference.max_tokens", 999, LORA | {"algorithm": {"kl_coef": 0.1}}))


def test_override_into_a_value(config_file):
    with pytest.raises(ConfigError, match="steps is a value, not a section"):
        Config.load(config_file, {"steps.warmup": "1"})


@pytest.mark.parametrize("text", ["steps: 4\n", "rollout: {top_k: 5, top_k: 6}\n"])
def test_a_key_that_stands_twice(text, config_file):
    config_file.write_text(config_file.read_text() + text)
    with pytest.raises(ConfigError, match=r"the key (steps|top_k) stands in it twice"):
        Config.load(config_file)


def test_a_merged_section_may_change_what_it_takes_over(config_file):
    text = "actor: &engine {max_tokens: 999}\ncritic: {<<: *engine, max_tokens: 1000}\nalgorithm: {advantage: gae}\n"
    config_file.write_text(config_file.read_text() + text)
    config = Config.load(config_file)
    assert config.critic is not None
    assert (config.actor.max_tokens, config.critic.max_tokens) == (999, 1000)


@pytest.mark.parametrize("text", [None, "model: [", "- a list", "just text", ""])
def test_unreadable_file(text, tmp_path):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        Config.load(path)


# ---- nothing is ignored ---------------------------------------------------------------------------------------------


def attributes_read() -> set[str]:
    """Every attribute name that the package reads: itself, or through a property of a configuration."""
    package = Path(rlft_fast.__file__).parent
    outside = [path for path in package.rglob("*.py") if "config" not in path.parts]
    read = {name for path in outside for name in loaded(ast.parse(path.read_text()))}
    trees = [ast.parse(path.read_text()) for path in (package / "config").rglob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    properties = [node for node in functions if any("property" in ast.unparse(line) for line in node.decorator_list)]
    return read.union(*(loaded(node) for node in properties if node.name in read))


def loaded(tree: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


def test_every_field_is_read_somewhere():
    keys = sorted({key for config in OBJECTIVES.values() for key, _ in sections(config)})
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    read = attributes_read()
    unread = [key for key in leaves if key.rpartition(".")[2] not in read]
    assert not unread, f"no code reads these configuration keys: {', '.join(unread)}"
    assert "no_such_field" not in read


def test_every_key_has_a_help_text():
    for config in OBJECTIVES.values():
        assert [key for key, field in sections(config) if not field.description] == []


def test_the_names_of_methods_are_those_that_exist():
    assert set(algorithm_config.ADVANTAGES) == set(ADVANTAGES)
    assert set(algorithm_config.POLICY_LOSSES) == set(POLICY_LOSSES)
    assert set(model_config.SCHEDULES) == set(_DECAYS)
    fields = AlgorithmConfig.model_fields
    assert get_args(fields["aggregation"].annotation) == get_args(Aggregation)
    assert get_args(fields["kl_estimator"].annotation) == get_args(KLEstimator)
    assert set(get_args(fields["rollout_correction"].annotation)) == {"none", "bypass", *CORRECTIONS}
