"""For every key of the configuration, whether a run that is resumed may have another value."""

import json
from contextlib import suppress
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError

from rlft_fast.config import Config, ProfileConfig, Section, changed_settings, fixed_settings, section_of, sections

# Where and how fast a run computes, how long it goes on, and what it writes. Contents of models and data are compared
# by checksum, wherever their folders are.
_OF_MODELS = """
    max_tokens shard_size reshard_after_forward wrap sequence_parallel compile cuda_graphs cpu_offload
    offload_between_phases workspace_mib micro_batch_size
"""
_MAY_CHANGE = {
    "profile": "steps ranks",
    "": "model output_dir steps timeout_minutes log log_texts log_tokens_mib log_samples",
    "data": "path max_rows",
    "reward": "model timeout_s workers",
    "rollout": "backend dtype servers max_prompt_tokens batch_size",
    "rollout.vllm": "process transfer tensor_parallel gpu_memory_utilization cpu_cache_gib adapter check_weights "
    "engine_options",
    "actor": _OF_MODELS + "activation_checkpointing reduce_every_micro_batch init_from",
    "actor.optimizer": "cpu_offload",
    "critic.optimizer": "cpu_offload",
    "critic": _OF_MODELS + "activation_checkpointing reduce_every_micro_batch init_from model",
    "reference": _OF_MODELS,
    "environment": "timeout_s",
    "reward.server": "url timeout_s retries",
    "reward.server.judge": "max_tokens",
    "teacher": _OF_MODELS + "model",
    "evaluation": "path max_rows every",
    "checkpoint": "every max_num max_mem asynchronous best store",
    "cluster": "address",
    **{
        f"cluster.{name}": "num_workers gpus cpus"
        for name in ("actor", "critic", "reference", "teacher", "reward", "generators")
    },
}
MAY_CHANGE = {f"{section}.{key}".removeprefix(".") for section, keys in _MAY_CHANGE.items() for key in keys.split()}
MAY_COME_AND_GO = {
    "profile", "reference", "evaluation", "cluster", "cluster.critic", "cluster.reference", "cluster.teacher",
    "cluster.reward", "cluster.generators",
}  # fmt: skip


def with_every_section(section: type[Section]) -> Any:
    """The defaults with each section that is null by default, although some exclude each other."""
    fields = section.model_fields.items()
    given = {
        "model": "m",
        "output_dir": "o",
        "steps": (3,) if section is ProfileConfig else 3,
        "path": "data.jsonl",
        "name": "games:Guess",
        "url": "http://h:1",
        "prompt": "p",
    }
    values: dict[str, Any] = {name: given[name] for name, field in fields if field.is_required() and name in given}
    inner = {name: with_every_section(own) for name, field in fields if (own := section_of(field.annotation))}
    return section.model_construct(**values | inner)


def with_value(section: Section, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: with_value(getattr(section, name), rest, value) if rest else value})


def another(value: Any, field: Any) -> Any:
    """Some other value that a field takes."""
    adapter = TypeAdapter(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)
    words = [
        "gae",
        "wandb",
        "vllm",
        "separate",
        "ipc",
        "bfloat16",
        "cosine",
        "k1",
        "reward",
        "constant",
        "bypass",
        "gspo",
        "full",
        "filter",
        "torch.optim.SGD",
        "topk",
        "http://h:2",
        "in-flight",
        "scale",
        "template",
        "rowwise",
    ]
    mappings = {"x": 2.0}, {"x": {"learning_rate": 0.5}}, {"x": {"model": "m"}}, {"x": {"name": "m:G"}}, {"regex": "a"}
    for other in (0.25, 1, 2, True, False, *words, *mappings, ("x",), ("wandb",), (0.5, 0.5), (1,)):
        with suppress(ValidationError):
            if (taken := adapter.validate_python(other, strict=not isinstance(other, tuple))) != value:
                return taken
    raise AssertionError(f"no other value for {field}")


def differences(before: Config, now: Config) -> list[str]:
    stored = json.loads(json.dumps(fixed_settings(before)))  # as a run's folder holds them
    return [key for key, _, _ in changed_settings(stored, fixed_settings(now), Config)]


def test_every_key_is_refused_unless_it_may_change():
    config = with_every_section(Config)
    assert differences(config, config) == []
    found = {}
    for key, field in sections(Config):
        if section_of(field.annotation) is None and key != "objective":  # which has one value in each class
            value = config
            for part in key.split("."):
                value = getattr(value, part)
            found[key] = differences(config, with_value(config, key, another(value, field)))
    assert {key for key, different in found.items() if different == []} == MAY_CHANGE
    assert all(different in ([], [key]) for key, different in found.items())


def test_a_section_comes_or_goes():
    config = with_every_section(Config)
    for key, field in sections(Config):
        if section_of(field.annotation) is not None and not field.is_required() and field.default is None:
            without = with_value(config, key, None)
            refused = [] if key in MAY_COME_AND_GO else [key]
            assert differences(config, without) == differences(without, config) == refused


# A value that is a mapping is compared as a whole: a name that is new, or missing, is a difference.
@pytest.mark.parametrize(("key", "value"), [("algorithm.loss_options", {"a": 1.0}), ("reward.function", {"m:f": 1.0})])
def test_names_in_a_value(key, value):
    config = with_every_section(Config)
    fewer, more = with_value(config, key, value), with_value(config, key, value | {"b": 1.0})
    assert differences(fewer, more) == differences(more, fewer) == differences(config, more) == [key]


def test_reward_models_by_name():
    """Their keys are compared as those of other models, but none may come or go."""

    def config(**models: dict[str, Any]) -> Config:
        reward = {"models": {name: {"model": "m", **own} for name, own in models.items()}}
        return Config.parse({"model": "m", "output_dir": "o", "steps": 3, "data": {"path": "d"}, "reward": reward})

    before = config(a={})
    assert differences(before, config(a={"model": "n", "max_tokens": 20_000, "compile": True})) == []
    assert differences(before, config(a={"weight": 2.0})) == ["reward.models.a.weight"]
    assert differences(before, config(a={}, b={})) == differences(config(a={}, b={}), before) == ["reward.models"]


def test_a_key_that_an_older_version_lacks_is_no_difference():
    config = with_every_section(Config)
    stored = fixed_settings(config)
    del stored["seed"], stored["critic"]["value_clip"], stored["rollout"]
    assert [*changed_settings(stored, fixed_settings(config), Config)] == []
