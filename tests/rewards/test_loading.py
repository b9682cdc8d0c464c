import pytest

from rlft_fast.rewards import last_number, load_reward

SOURCE = """
from __future__ import annotations  # a dataclass then looks its module up in sys.modules

from dataclasses import dataclass

@dataclass
class Config:
    value: float = 0.5

def half(prompts, completions, completion_ids, **columns):
    return [Config().value for _ in prompts]

threshold = 3
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def test_load_from_module():
    assert load_reward("rlft_fast.rewards.functions:last_number") is last_number


def test_load_from_file(reward_file):
    assert load_reward(f"{reward_file}:half")(["a", "b"], ["", ""], [[], []]) == [0.5, 0.5]


def test_load_from_relative_path(reward_file, monkeypatch):
    monkeypatch.chdir(reward_file.parent)
    assert load_reward("my_rewards.py:half")(["a"], [""], [[]]) == [0.5]


# No function, no module, a path that lacks its suffix, a relative import: none of these can be imported.
@pytest.mark.parametrize("spec", ["last_number", ":last_number", "rlft_fast.rewards:", "./rewards:f", ".rewards:f", ""])
def test_a_malformed_spec_is_refused(spec):
    with pytest.raises(ValueError, match=r"expected 'module:function' or 'path/to/file\.py:function'"):
        load_reward(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rlft_fast.rewards:last_numbr", r"no function 'last_numbr' \(did you mean last_number"),
        ("rlft_fast.rewards.functoins:f", r"no module 'rlft_fast.rewards.functoins' \(did you mean functions"),
        ("rlft_fats.rewards:f", r"no module 'rlft_fats' \(did you mean rlft_fast"),
        ("math.rewards:f", r"no module 'math.rewards';"),
        ("rlft_fast.rewards:__name__", "is of type str, expected a function"),
    ],
)
def test_a_missing_name_is_refused_with_a_suggestion(spec, message):
    with pytest.raises(ValueError, match=message):
        load_reward(spec)


def test_a_missing_file_is_refused_with_a_suggestion(reward_file):
    with pytest.raises(ValueError, match=r"no file .* \(did you mean my_rewards.py\?\)"):
        load_reward(f"{reward_file.parent / 'my_reward.py'}:half")
    with pytest.raises(ValueError, match=r"no file 'nowhere/rewards.py'$"):
        load_reward("nowhere/rewards.py:half")


def test_a_file_without_the_function_is_refused(reward_file):
    with pytest.raises(ValueError, match=r"no function 'halve' \(did you mean half\?\)"):
        load_reward(f"{reward_file}:halve")
    with pytest.raises(ValueError, match="threshold is of type int, expected a function"):
        load_reward(f"{reward_file}:threshold")


def test_errors_inside_the_module_are_passed_on(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    for spec in ("needs_more:f", f"{tmp_path / 'needs_more.py'}:f"):
        with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_installed"):
            load_reward(spec)
