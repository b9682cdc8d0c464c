"""``compute_dtype: auto`` of a run on CPUs: who decides it, and that a run keeps it."""

import json
from dataclasses import dataclass

import pytest

from rlft_fast.config import Config
from rlft_fast.trainer import dtypes, settle_compute_dtype, train
from rlft_fast.world import World
from tests.support.tiny_models import save_tiny_model
from tests.trainer.toy import toy_config


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {width: save_tiny_model("llama", folder / f"{width}", hidden_size=width) for width in (32, 256)}


@dataclass(frozen=True)
class TwoRanks(World):
    """The other rank has answered already."""

    other: tuple[str, ...] = ()

    def all_gather_json(self, value):
        return [value, [*self.other]]


def on_cpu(monkeypatch, *, is_fast: bool) -> None:
    """Stands for a CPU: with AMX, or without."""
    monkeypatch.setattr(dtypes, "has_fast_bfloat16", lambda: is_fast)


def dtypes_of(config: Config) -> tuple[str, ...]:
    return tuple(section.compute_dtype for section in (config.actor, config.critic, config.reference) if section)


@pytest.mark.parametrize(
    ("is_fast", "width", "changes", "expected"),
    [
        (True, 256, {}, ("bfloat16",)),
        (False, 256, {}, ("auto",)),
        (True, 32, {}, ("auto",)),
        (True, 256, {"actor__compute_dtype": "float32"}, ("float32",)),
        (True, 256, {"cluster": {}}, ("auto",)),  # of other machines
        (
            True, 256,
            {"algorithm__kl_coef": 0.1, "reference": {"max_tokens": 64}, "algorithm__advantage": "gae", "critic": {}},
            ("bfloat16",) * 3,
        ),
    ],
)  # fmt: skip
def test_fast_cpus_run_wide_models_in_bfloat16(is_fast, width, changes, expected, models, tmp_path, monkeypatch):
    on_cpu(monkeypatch, is_fast=is_fast)
    config = toy_config(models[width], tmp_path, **changes)
    settled = settle_compute_dtype(config, World.current())
    assert dtypes_of(settled) == expected
    assert (settled is config) == ("bfloat16" not in expected)


def test_a_critic_of_its_own_width_decides_for_itself(models, tmp_path, monkeypatch):
    on_cpu(monkeypatch, is_fast=True)
    critic = {"algorithm__advantage": "gae", "critic": {"model": str(models[256])}}
    config = toy_config(models[32], tmp_path, **critic)
    assert dtypes_of(settle_compute_dtype(config, World.current())) == ("auto", "bfloat16")


@pytest.mark.parametrize(("other", "expected"), [(("actor",), "bfloat16"), ((), "auto")])
def test_the_slowest_rank_decides(other, expected, models, tmp_path, monkeypatch):
    on_cpu(monkeypatch, is_fast=True)
    config = settle_compute_dtype(toy_config(models[256], tmp_path), TwoRanks(other=other))
    assert config.actor.compute_dtype == expected


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_run_continues_in_its_dtype_on_any_cpu(is_fast, models, tmp_path, monkeypatch):
    config = toy_config(models[256], tmp_path, steps=1)
    on_cpu(monkeypatch, is_fast=is_fast)
    train(config)
    expected = "bfloat16" if is_fast else "auto"
    written = Config.load(tmp_path / "run" / "config.yaml")
    assert written.actor.compute_dtype == expected
    marks = json.loads((tmp_path / "run" / "run.json").read_text())
    assert marks["identity"]["settings"]["actor"]["compute_dtype"] == expected

    on_cpu(monkeypatch, is_fast=not is_fast)
    longer = config.model_copy(update={"steps": 2})
    assert train(longer, resume=True)["steps"] == 2
    assert Config.load(tmp_path / "run" / "config.yaml").actor.compute_dtype == expected
    assert settle_compute_dtype(config, World.current()).actor.compute_dtype != expected  # a run of its own
