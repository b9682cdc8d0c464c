"""Every path of a configuration: ~, variables, and relative paths in the file that a run writes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlft_fast.config import Config, ConfigError
from tests.support.runs.configs import MINIMAL


def typed(path: str, function: str = "mine.py:f") -> dict[str, Any]:
    """Values of a file with this path and this function at every key that takes one."""
    return {
        "model": path, "output_dir": path, "steps": 3, "data": {"path": path},
        "reward": {"function": function, "model": path},
        "critic": {"model": path}, "evaluation": {"path": {"test": path}, "function": {function: 1.0}},
        "rollout": {"backend": "vllm", "servers": [path]},
        "algorithm": {
            "advantage": function, "policy_loss": function, "skip_equal_groups": True, "filter_by": function,
        },
    }  # fmt: skip


def paths_of(config: Config) -> tuple[set[str], set[str]]:
    """The paths and the functions of `typed`."""
    assert config.critic is not None
    assert config.evaluation is not None
    assert isinstance(config.evaluation.function, dict)
    paths = [config.model, config.output_dir, config.data.path, config.reward.model, config.critic.model]
    algorithm = config.algorithm
    functions = [config.reward.function, algorithm.advantage, algorithm.policy_loss, algorithm.filter_by]
    return {*paths, *config.evaluation.sets.values(), *config.rollout.servers}, {
        *functions,
        *config.evaluation.function,
    }


def loaded(folder: Path, values: dict[str, Any] | str) -> Config:
    (folder / "config.yaml").write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return Config.load(folder / "config.yaml")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in {"HOME": "/home/me", "PRICE": "5$x", "EMPTY": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NOWHERE", raising=False)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("~/a", "/home/me/a"), ("$HOME/a", "/home/me/a"), ("/b${HOME}x", "/b/home/mex"), ("a$$b", "a$b"),
        ("$PRICE/a", "5$x/a"), ("./~/a", "./~/a"),
    ],
)  # fmt: skip
def test_variables_and_home_folders(text, path, tmp_path):
    config = loaded(tmp_path, typed(text, f"{text}.py:f"))
    assert paths_of(config) == ({path}, {f"{path}.py:f"})
    assert loaded(tmp_path, config.to_yaml()) == Config.parse(config.model_dump()) == config
    absolute = path if path.startswith("/") else f"/start/{path}"
    assert paths_of(loaded(tmp_path, config.to_yaml("/start"))) == ({absolute}, {f"{path}.py:f"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("$NOWHERE/a", r"there is no environment variable NOWHERE: set it, or write \$\$ for the letter \$"),
        ("a$5", r"a \$ begins the name of a variable, as in \$HOME: write \$\$ for the letter \$"),
        ("~nobodyhere/a", r"there is no user nobodyhere with a home folder"),
        ("a\0", r"(a path must not have the character \\0|expected a URL .* or the path)"),
    ],
)
def test_paths_that_cannot_be_expanded(text, message, tmp_path):
    with pytest.raises(ConfigError, match=rf"^(\S+: {message}.*, got .*\n?){{12}}$"):
        loaded(tmp_path, typed(text, f"{text}.py:f"))


def test_an_empty_variable_on_the_command_line(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(MINIMAL))
    assert Config.load(tmp_path / "config.yaml", {"model": "$HOME/policy"}).model == "/home/me/policy"
    with pytest.raises(ConfigError, match=r"^output_dir: the variable is empty, got '\$EMPTY'$"):
        Config.load(tmp_path / "config.yaml", {"output_dir": "$EMPTY"})


def test_what_is_no_path_is_taken_as_it_is(tmp_path):
    assert paths_of(loaded(tmp_path, typed("m", "$HOME:f"))) == ({"m"}, {"$HOME:f"})
    assert Config.parse(MINIMAL | {"model": "$HOME/a$$b"}).model == "$HOME/a$$b"  # Python has variables of its own
