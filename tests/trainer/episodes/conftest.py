"""Plays episodes with a scripted generator."""

from collections.abc import Callable, Iterator, Mapping

import pytest

import rlft_fast.trainer.episodes.player
from rlft_fast.config import DataConfig, EnvironmentConfig
from rlft_fast.envs import EnvironmentClass, EnvironmentPool
from rlft_fast.rollout import Rollout, SamplingParams
from rlft_fast.trainer.episodes import EpisodePlayer
from rlft_fast.trainer.prompts import load_prompts
from rlft_fast.world import World
from tests.support.tiny_models import chat_tokenizer
from tests.trainer.episodes.scripted import IM_END, PLAYERS, SPECIAL, TEMPLATES, Scripted
from tests.trainer.toy import write_rows


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), SPECIAL)
    tokenizer.chat_template = (TEMPLATES / "qwen2_5.jinja").read_text()  # until a test takes another one
    return tokenizer


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[Mapping[str, EnvironmentClass]], EnvironmentPool]]:
    """Environments by their classes. The tests of a module share workers, which take longer to start than to play."""
    pools: dict[str, EnvironmentPool] = {}

    def find(classes: Mapping[str, EnvironmentClass]) -> EnvironmentPool:
        key = repr(classes)
        if key not in pools:
            pools[key] = EnvironmentPool(classes)
        return pools[key]

    yield find
    for pool in pools.values():
        pool.close()


@pytest.fixture
def play(tmp_path, tokenizer, pool_of, monkeypatch):
    """Plays one episode per row; returns samples, prompts, player and generator.

    ``name`` is of a class of `players`, or has several by the names that rows have.
    """
    monkeypatch.setattr(rlft_fast.trainer.episodes.player, "EnvironmentPool", pool_of)

    def run(
        rows, name, reply, template="qwen2_5", ends=(IM_END,), n=1, max_new_tokens=2000, top_k=None, in_turn=True,
        **options,
    ):  # fmt: skip
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
        data = DataConfig(path=str(write_rows(tmp_path / "data.jsonl", rows)))
        prompts = load_prompts(data, tokenizer, 4000)
        columns = sorted({"prompt", *prompts.columns})
        kinds = name if isinstance(name, dict) else {"": {"name": name, **options}}
        configs = {
            own: EnvironmentConfig(**values | {"name": f"{PLAYERS}:{values['name']}", "timeout_s": 20.0})
            for own, values in kinds.items()
        }
        columns = dict.fromkeys(configs, columns)
        end_ids = tokenizer.convert_tokens_to_ids([*ends])
        player = EpisodePlayer(configs, columns, tokenizer, end_ids, in_turn=in_turn)
        prompts = player.prepare(prompts, 4000)
        generator = Scripted(reply)
        params = SamplingParams(n=n, max_new_tokens=max_new_tokens, top_k=top_k)
        seeds = [[10 * row + number for number in range(n)] for row in range(len(prompts))]
        samples = player.samples(Rollout(lambda: generator, World.current()), World.current(), prompts, params, seeds)
        return samples, prompts, player, generator

    return run
