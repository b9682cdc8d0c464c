"""Calls that only a GPU's run makes are those that every admitted version takes."""

import json
import re
from pathlib import Path

import pytest

from rlft_fast.models.attention.functions import grouped_heads
from tests.support.machine.gpu_signatures import OVERLOADS, RECORDED, ROOT, Call, gpu_calls

SIGNATURES = json.loads(RECORDED.read_text())
VARLEN = "torch.nn.attention.varlen.varlen_attn"


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return list(gpu_calls())


@pytest.mark.parametrize("package", SIGNATURES)
def test_every_call_is_one_that_the_version_takes(package, calls):
    known = SIGNATURES[package]
    of_package = [call for call in calls if call.name.startswith(package.split()[0] + ".")]
    assert len(of_package) > 20
    for call in of_package:
        assert known.get(call.name) is not None, (
            f"{call.place}: {package} has no {call.name} (see tests/gpu_signatures)"
        )
        try:
            call.bind(known[call.name])
        except TypeError as error:
            pytest.fail(f"{call.place}: {call.name} of {package}: {error}")


def test_versions_are_the_oldest_that_are_admitted_and_later_ones():
    oldest = re.search(r'"torch>=([\d.]+)"', Path(ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    versions = sorted(name.split()[1] for name in SIGNATURES if name.startswith("torch "))
    assert versions[0].startswith(oldest[1])
    assert len(versions) == 3


@pytest.mark.parametrize("package", [name for name in SIGNATURES if name.startswith("torch ")])
def test_overloads_and_fewer_key_heads(package, calls):
    known = SIGNATURES[package]
    assert all(known[name] for name in OVERLOADS)
    (call,) = [call for call in calls if call.name == VARLEN]
    names = [name for name, _, _ in known[VARLEN]]
    assert ("enable_gqa" in grouped_heads(names)) == (package != "torch 2.11.0")
    Call(call.name, call.place, call.num_positional, (*call.keywords, *grouped_heads(names))).bind(known[VARLEN])


def test_a_call_that_a_version_does_not_take_is_found():
    call = Call(VARLEN, "here", 7, ("scale", "window_size", "enable_gqa"))
    call.bind(SIGNATURES["torch 2.13.0"][VARLEN])
    with pytest.raises(TypeError, match="enable_gqa"):
        call.bind(SIGNATURES["torch 2.11.0"][VARLEN])
