import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_a_file_in_utf_16_is_named(encoding, reward_file):
    reward_file.write_text(SOURCE, encoding=encoding)
    with pytest.raises(ValueError, match=rf"^{reward_file} is no Python: it .* UTF-16.*: save it in UTF-8$"):
        load_reward(f"{reward_file}:half")


@pytest.fixture
def no_folders_of_others(monkeypatch):
    """Python does not look for modules in the working directory, as under the command rlft-fast."""
    others = [place for place in sys.path if place and Path(place) != Path.cwd()]
    monkeypatch.setattr(sys, "path", others)


def test_load_from_a_module_of_the_working_directory(reward_file, monkeypatch, no_folders_of_others):
    reward_file.rename(reward_file.with_name("rewards_of_mine.py"))
    monkeypatch.chdir(reward_file.parent)
    assert load_reward("rewards_of_mine:half")(["a"], [""], [[]]) == [0.5]


def test_a_file_imports_the_modules_beside_it(tmp_path, no_folders_of_others):
    (tmp_path / "early_sibling.py").write_text("value = 2.0")
    (tmp_path / "late_sibling.py").write_text("value = 3.0")
    (tmp_path / "judge.py").write_text(
        "import early_sibling\ndef f(**_):\n    import late_sibling\n"
        "    return [early_sibling.value, late_sibling.value]\n"
    )
    assert load_reward(f"{tmp_path / 'judge.py'}:f")() == [2.0, 3.0]


COUNTER = "calls = []\ndef count(**_):\n    calls.append(1)\ndef get(**_):\n    return [len(calls)]\n"


def test_two_functions_of_one_file_share_its_state(tmp_path):
    path = tmp_path / "counter.py"
    path.write_text(COUNTER)
    (tmp_path / "linked.py").symlink_to(path)
    load_reward(f"{path}:count")()
    assert load_reward(f"{path}:get")() == load_reward(f"{tmp_path / 'linked.py'}:get")() == [1]
    path.write_text(COUNTER.replace("len(calls)", "-1.0 * len(calls)"))  # an edited file runs again
    assert load_reward(f"{path}:get")() == [0.0]


def test_another_process_finds_the_functions_of_files_of_one_name(tmp_path):
    """As a process pool does: it unpickles what it shall run by the name of its module."""
    functions = []
    for number in (1, 2):
        path = tmp_path / f"{number}_ä" / "my-rewards.py"
        path.parent.mkdir()
        path.write_text(f"import beside_{number}\ndef f():\n    return beside_{number}.value\n")
        path.with_name(f"beside_{number}.py").write_text(f"value = {number}.5")
        functions.append(load_reward(f"{path}:f"))
    command = [sys.executable, "-c", "import pickle, sys; print([f() for f in pickle.load(sys.stdin.buffer)])"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(command, input=pickle.dumps(functions), capture_output=True, env=environment, check=True)
    assert out.stdout == b"[1.5, 2.5]\n"


def test_an_import_of_anothers_sibling_is_refused(tmp_path, no_folders_of_others):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helpers_of_it.py").touch()
        (tmp_path / name / "judge.py").write_text("import json\nfrom helpers_of_it import *\ndef f(): ...\n")
    load_reward(f"{tmp_path}/a/judge.py:f")
    with pytest.raises(ValueError, match=r"b/judge.py imports 'helpers_of_it', .* and in .*/a, where Python finds it"):
        load_reward(f"{tmp_path}/b/judge.py:f")


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


def test_what_a_file_changes_while_it_loads_is_put_back(reward_file):
    reward_file.write_text(SOURCE + "import os, torch\ntorch.set_default_dtype(torch.float64)\nos.chdir('/')\n")
    folder = os.getcwd()
    with pytest.warns(UserWarning, match="the file of the reward .*: working directory, default dtype, which is put"):
        load_reward(f"{reward_file}:half")
    assert (os.getcwd(), torch.tensor(1.0).dtype) == (folder, torch.float32)


def test_a_file_that_exits_is_named(reward_file):
    reward_file.write_text("raise SystemExit('no key')")
    with pytest.raises(ValueError, match=r"my_rewards.py:half cannot be loaded: its code raises SystemExit: no key"):
        load_reward(f"{reward_file}:half")
