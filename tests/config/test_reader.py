"""Values of files and of the command line are read as the types of their keys say."""

from typing import Any

import pytest
import yaml

from rlft_fast.config import Config, ConfigError, EvaluationConfig
from rlft_fast.config.reader import read_value

MINIMAL = {"model": "m", "output_dir": "o", "steps": 3, "data": {"task": "chain_sum"}}

# What YAML 1.1 or YAML 1.2 would read as a comment, a folded line, a number, a date, a truth, null, an anchor, an
# alias, a tag, a list, a mapping, or an error.
TEXTS = [
    "a # b", "one\ntwo\n\n three ", "010", "1e5", "1_000", "0x1f", "1:30", "2024-01-01", "no", "true", "~", "", " x ",
    "&a b", "*a", "!tag", "'quoted'", '"a\\n"', "[/INST]", "{x", "a: b", "- a", "%", "@x", "|", "=", "<<", "\t",
]  # fmt: skip


def loaded(folder, text: str, overrides: dict[str, str] | None = None) -> Config:
    (folder / "config.yaml").write_text(text)
    return Config.load(folder / "config.yaml", overrides)


def get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_taken_as_typed(text, tmp_path):
    config = loaded(tmp_path, yaml.safe_dump(MINIMAL), {"data.prompt_column": text, "data.system_prompt": text})
    assert config.data.prompt_column == config.data.system_prompt == text
    assert read_value(text, "rollout.stop", Config) == (["/INST"] if text == "[/INST]" else [text])
    if text != "{x":  # begins a mapping of functions with weights
        assert read_value(text, "reward.function", Config) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives_in_the_resolved_configuration(text, tmp_path):
    config = Config.parse(MINIMAL | {"data": {"task": text, "system_prompt": text}, "rollout": {"stop": [text]}})
    assert loaded(tmp_path, config.to_yaml()) == config
    assert yaml.safe_load(config.to_yaml())["data"]["task"] == text  # with any other reader, too


# In a file, plain texts are YAML. What looks like another type is a text where a text belongs.
@pytest.mark.parametrize("text", ["010", "1e5", "1:30", "2024-01-01", "no", "true", "0x1f", "=", "3"])
def test_a_text_in_a_file_is_taken_as_written(text, tmp_path):
    written = yaml.safe_dump(MINIMAL).replace("task: chain_sum", f"task: {text}")
    config = loaded(tmp_path, f"{written}rollout: {{stop: [{text}, b]}}\nactor: {{wrap: {text}}}\n")
    assert (config.data.task, config.rollout.stop, config.actor.wrap) == (text, (text, "b"), (text,))


def test_keys_and_values_of_a_mapping_are_texts_where_texts_belong(tmp_path):
    evaluation = "evaluation: {path: {no: 010, null: 1e5}}\n"
    config = loaded(tmp_path, yaml.safe_dump(MINIMAL) + evaluation)
    assert config.evaluation is not None
    assert config.evaluation.path == {"no": "010", "null": "1e5"}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "010", 10),
        ("steps", "1_000", 1000),
        ("seed", "0x10", 16),
        ("actor.optimizer.learning_rate", "1e-5", 1e-5),
        ("actor.optimizer.learning_rate", ".5", 0.5),
        ("actor.shard_size", "auto", "auto"),
        ("actor.shard_size", "010", 10),
        ("actor.compile", "auto", "auto"),
        ("actor.compile", "no", False),
        ("data.chat", "yes", True),
        ("data.system_prompt", "null", None),
        ("rollout.top_k", "null", None),
        ("actor.wrap", "null", None),
        ("log", "wandb", ("wandb",)),
        ("log", "[wandb, jsonl]", ("wandb", "jsonl")),
        ("rollout.stop", "[010, no, 'a # b']", ("010", "no", "a # b")),
        ("actor.optimizer.betas", "[0.8, .95]", (0.8, 0.95)),
        ("data.task_options", "{a: 010, b: no, c: 1:30, d: 2024-01-01, e: true, f: [0.5]}",
         {"a": 10, "b": "no", "c": "1:30", "d": "2024-01-01", "e": True, "f": [0.5]}),
        ("data.task_options.a", "010", {"a": 10}),
        ("data.task_options.a", "x # y", {"a": "x # y"}),
        ("algorithm.loss_options", "{max_ratio: 010}", {"max_ratio": 10.0}),
        ("evaluation", "{path: 010, every: 010}", EvaluationConfig(path="010", every=10)),
    ],
)  # fmt: skip
def test_other_types_are_read_by_their_type(key, text, value, tmp_path):
    config = loaded(tmp_path, yaml.safe_dump(MINIMAL), {key: text})
    assert get(config, key.removesuffix(".a")) == value


# A value that YAML 1.1 reads as a number or as null.
@pytest.mark.parametrize(
    ("key", "text"),
    [("timeout_minutes", "1:30"), ("steps", "3 # three"), ("steps", ""), ("rollout.top_k", ""), ("steps", "0b11")],
)
def test_what_is_no_number_is_refused(key, text, tmp_path):
    with pytest.raises(ConfigError, match=rf"^{key}: Input should be a valid (integer|number), .*got '{text}'$"):
        loaded(tmp_path, yaml.safe_dump(MINIMAL), {key: text})


def test_an_integer_with_more_digits_than_python_reads_is_refused(tmp_path):
    digits = "9" * 5000
    for text, overrides in ((f"seed: {digits}\n", {}), ("", {"seed": digits})):
        with pytest.raises(
            ConfigError, match=r"^seed: Unable to parse input string as an integer, .*, got '9{1,100}\.\.\.9+'$"
        ):
            loaded(tmp_path, yaml.safe_dump(MINIMAL) + text, overrides)


def test_minutes_of_a_clock_are_no_number_in_a_file(tmp_path):
    with pytest.raises(ConfigError, match="got '1:30'"):
        loaded(tmp_path, yaml.safe_dump(MINIMAL) + "timeout_minutes: 1:30\n")


def test_a_line_break_in_a_list_is_no_space(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.stop: .* a line break in a text is \\n in double quotes"):
        loaded(tmp_path, yaml.safe_dump(MINIMAL), {"rollout.stop": '["a\nb"]'})
    assert read_value('["a\\nb",\n "c"]', "rollout.stop", Config) == ["a\nb", "c"]
