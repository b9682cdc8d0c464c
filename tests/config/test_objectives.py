"""One schema for every objective: the key `objective` decides which keys there are."""

import pytest
import yaml

from rlft_fast.config import OBJECTIVES, Config, ConfigError, SFTConfig, load_config
from tests.support.runs.configs import MINIMAL

SFT = {"objective": "sft", "model": "m", "output_dir": "o", "steps": 1, "data": {"path": "d"}}


@pytest.fixture
def file(tmp_path):
    def write(values):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def test_the_objective_decides_on_the_class(file):
    assert load_config(file(MINIMAL)) == Config.parse(MINIMAL)
    assert load_config(file(SFT)) == SFTConfig.parse(SFT)
    unnamed = {key: value for key, value in SFT.items() if key != "objective"}
    assert load_config(file(unnamed), {"batch_size": "3"}, "sft").batch_size == 3
    assert isinstance(load_config(file(unnamed), {"objective": "sft"}), SFTConfig)


def test_what_only_one_objective_can_do_is_said_in_one_line(file):
    with pytest.raises(ConfigError, match=r"^.*config\.yaml has objective: sft, but only objective: rl can do this$"):
        Config.load(file(SFT))


@pytest.mark.parametrize("kind", OBJECTIVES.values())
def test_resolved_yaml_loads_to_the_same_configuration(kind, tmp_path):
    values = MINIMAL if kind is Config else {**SFT, "objective": kind.model_fields["objective"].default}
    config = kind.parse(values)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("changes", "objective", "message"),
    [
        ({"objective": "ppo"}, None, "objective is 'ppo', expected one of rl, sft, dpo, reward"),
        ({"objective": ["sft"]}, None, r"objective is \['sft'\], expected one of rl, sft, dpo, reward"),
        ({"objective": {"sft": 1}}, "sft", "objective is {'sft': 1}, expected one of rl, sft, dpo, reward"),
        ({"objective": "rl"}, "sft", "has objective: rl, expected sft: run it with rlft-fast train"),
        ({"rollout": {}}, None, r"rollout has no meaning for objective: sft: leave it out \(it is a key of rl\)"),
        ({"data": {"path": "d", "task": "x"}}, None, "data.task has no meaning for objective: sft"),
        ({"batchsize": 1}, None, "unknown key batchsize: did you mean batch_size"),
        ({"actor": {"max_tokens": 9}}, None, "actor.max_tokens is 9, but a row may have 4096 tokens"),
        (
            {"objective": "dpo", "loss": {"kind": "ipo", "label_smoothing": 0.1}},
            None,
            "loss: label_smoothing is read by",
        ),
        (
            {"objective": "dpo", "actor": {"max_tokens": 8191}},
            None,
            "actor.max_tokens is 8191, but a row may have 8192",
        ),
        ({"loss": {"beta": 1.0}}, None, r"loss has no meaning for objective: sft: leave it out \(it is a key of dpo\)"),
        ({"checkpoint": {"best": "held_out_loss"}}, None, "expected null, because the run has no evaluation"),
        (
            {"cluster": {"generators": {}}},
            None,
            "cluster.generators is given, but objective sft has none: leave it out",
        ),
        ({"cluster": {"teacher": {}}}, None, "cluster.teacher is given, but objective sft has none"),
    ],
)
def test_messages(changes, objective, message, file):
    with pytest.raises(ConfigError, match=message):
        load_config(file(SFT | changes), None, objective)
