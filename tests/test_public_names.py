"""What users name: the faces of the packages, configuration keys and commands. Recorded before the code was moved."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from rlft_fast.cli import COMMANDS
from rlft_fast.config import Config
from rlft_fast.config.base import sections

RECORDED = json.loads(Path(__file__).with_name("public_names.json").read_text())


@pytest.mark.parametrize("package", RECORDED["packages"])
def test_names_stay(package):
    """Packages that serve others gain names; the public ones have exactly these."""
    names, recorded = set(import_module(package).__all__), set(RECORDED["packages"][package])
    assert recorded <= names
    assert names == recorded or package not in ("rlft_fast", "rlft_fast.ops")
    assert all(hasattr(import_module(package), name) for name in names)


def test_configuration_keys_stay():
    assert [key for key, _ in sections(Config)] == RECORDED["keys"]


def test_commands_stay():
    assert list(COMMANDS) == RECORDED["commands"]
