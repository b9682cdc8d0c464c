"""The message about a key that does not exist knows the names of other projects; several mistakes are told together."""

import pytest
import yaml

from rlft_fast.config import Config, ConfigError, sections
from rlft_fast.config.peers import KEYS

MINIMAL = {"model": "m", "output_dir": "o", "steps": 3, "data": {"task": "chain_sum"}}


def message(values: dict) -> list[str]:
    with pytest.raises(ConfigError) as error:
        Config.parse(MINIMAL | values)
    return str(error.value).splitlines()


def test_every_name_leads_to_a_key_and_hides_none():
    keys = [key for key, _ in sections(Config)]
    assert {*KEYS.values()} <= {*keys}
    assert not {key.rpartition(".")[2] for key in keys} & {*KEYS}


# TRL: GRPOConfig; verl: dotted, with sections that we have, too; OpenRLHF: options, also with dashes.
@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("num_generations", "rollout.samples_per_prompt"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("per_device_train_batch_size", "rollout.prompts_per_step"),
        ("beta", "algorithm.kl_coef"),
        ("lr", "actor.optimizer.learning_rate"),
        ("epsilon_high", "algorithm.clip_high"),
        ("n", "rollout.samples_per_prompt"),
        ("gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr", "actor.optimizer.learning_rate"),
        ("critic.optim.lr", "critic.optimizer.learning_rate"),
        ("algorithm.adv_estimator", "algorithm.advantage"),
        ("data.max_prompt_length", "rollout.max_prompt_tokens"),
        ("trainer.logger", "log"),
        ("n_samples_per_prompt", "rollout.samples_per_prompt"),
        ("init-kl-coef", "algorithm.kl_coef"),
        ("actor.optimizer.beta", "actor.optimizer.betas"),  # a typing error, not TRL's beta
    ],
)
def test_names_of_other_projects(key, ours, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    with pytest.raises(ConfigError) as error:
        Config.load(path, {key: "1"})
    assert str(error.value) == f"unknown key {key}: did you mean {ours}?"


def test_a_section_of_another_project_is_explained_key_by_key():
    assert message({"trainer": {"save_freq": 5, "logger": ["wandb"], "project_name": "x"}}) == [
        "unknown key trainer.save_freq: did you mean checkpoint.every?",
        "unknown key trainer.logger: did you mean log?",
        "unknown key trainer.project_name",
    ]
    assert message({"rolout": {"temperature": 1}}) == ["unknown key rolout: did you mean rollout?"]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"rollout": {"typical_p": 0.1}}, "rollout.typical_p cannot be set: it changes the distribution"),
        ({"repetition_penalty": 1.1}, "repetition_penalty cannot be set: it changes the distribution"),
        ({"rollout": {"sampling_params": {"bad_words": ["x"]}}}, "rollout.sampling_params.bad_words cannot be set"),
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs.num_beams cannot be set: it searches for likely"),
        ({"rollout": {"ignore_eos": True}}, "rollout.ignore_eos cannot be set: an answer ends at its end token"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_reason(values, line):
    (found,) = message(values)
    assert found.startswith(line)


def test_options_of_vllms_engine():
    def found(**options) -> list[str]:
        return message({"rollout": {"vllm": {"engine_options": options}}})

    options = {"max_num_batched_tokens": 8192, "attention_config": {"backend": "x"}, "quantization": "fp8"}
    config = Config.parse(MINIMAL | {"rollout": {"vllm": {"engine_options": options}}})
    assert config.rollout.vllm.engine_options == options
    assert found(max_num_seqs=4) == [
        "rollout.vllm: engine_options has max_num_seqs, which the run sets by rollout.batch_size: set this key"
    ]
    lines = found(**{"load-format": "x", "data_parallel_size": 2})
    assert [line.split(", ")[1][:20] for line in lines] == ["that says how the we", "that says which proc"]
    assert found(quantization="awq") == [
        "rollout.vllm: engine_options has quantization: awq, but new weights arrive as plain numbers, which vLLM "
        "rounds itself with fp8, fp8_per_tensor, fp8_per_channel, fp8_per_block alone: name one of these, or leave it "
        "out"
    ]
    draft = {"method": "eagle3", "model": "some/draft", "num_speculative_tokens": 3}
    (line,) = found(speculative_config=draft)
    assert line.startswith("rollout.vllm: engine_options asks for drafts by eagle3, a model that no sync")
    assert "drafts by some/draft, " in found(**{"spec-model": "some/draft"})[0]
    for option in ({"method": "ngram"}, {"model": "ngram"}, draft | {"draft_load_config": {"load_format": "auto"}}):
        Config.parse(MINIMAL | {"rollout": {"vllm": {"engine_options": {"speculative_config": option}}}})


def test_all_rules_that_are_broken_are_told():
    lines = message(
        {
            "algorithm": {"kl_target": 0.1, "max_refills": 2},
            "rollout": {"top_p": 0.9},
            "data": {"task": "chain_sum", "path": "x"},
        }
    )
    assert sorted(line.split(": ")[0] for line in lines) == ["algorithm", "algorithm", "data", "rollout"]
    lines = message({"rollout": {"samples_per_prompt": 1}, "critic": {}, "checkpoint": {"best": "accuracy"}})
    starts = ("checkpoint.best is", "algorithm.advantage: gae needs a critic", "advantage: grpo compares samples")
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 3
