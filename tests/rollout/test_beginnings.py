"""What requests begin with runs once: earlier turns of episodes, and what prompts have in common."""

from pathlib import Path

import pytest
import torch

from rlft_fast.config import EngineConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import load_policy, load_tokenizer
from rlft_fast.rollout import Completion, HFGenerator, Request, SamplingParams

PROMPTS = [[10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110], [5, 6, 7, 8], [99, 3, 4, 11, 12, 13]]
NUM_SAMPLES = 4
GIVEN = [[17, 18, 19], [23, 24, 25, 26, 27], [31]]  # what an environment writes behind a turn, by the row
PARAMS = SamplingParams(max_new_tokens=12)
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


def make_generator(path: Path, batch_size: int = 64) -> HFGenerator:
    generator = HFGenerator(load_policy(path), load_tokenizer(path), batch_size)
    generator.eos_token_ids = [*range(0, 256, 4)]
    return generator


class Prefilled:
    """Counts the tokens that run in passes of several tokens, padding included."""

    def __init__(self, generator: HFGenerator) -> None:
        self.passes: list[tuple[int, int]] = []
        generator.model.backbone.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module, args, kwargs) -> None:
        if (shape := tuple(kwargs["input_ids"].shape))[1] > 1:
            self.passes.append(shape)

    @property
    def tokens(self) -> int:
        return sum(rows * length for rows, length in self.passes)


def play(
    generator: HFGenerator, turns: int, params: SamplingParams = PARAMS, *, keeps: bool = True
) -> list[tuple[list[int], Completion]]:
    """For each turn of each episode the tokens before it, and the reply. Turns of different prompts alternate."""
    contexts = {(row, number): prompt for number in range(NUM_SAMPLES) for row, prompt in enumerate(PROMPTS)}
    found = []
    for turn in range(turns):
        requests = [
            Request(
                row=row, token_ids=context, seed=1000 * turn + 10 * row + number,
                max_new_tokens=params.max_new_tokens, episode=10 * row + number if keeps else None,
            )
            for (row, number), context in contexts.items()
        ]  # fmt: skip
        replies = generator.generate(requests, params)
        found += [([*request.token_ids], reply) for request, reply in zip(requests, replies, strict=True)]
        ended = dict(zip(contexts, replies, strict=True))
        contexts = {
            key: [*context, *ended[key].token_ids, *GIVEN[key[0]]]
            for key, context in contexts.items()
            if ended[key].finish_reason == "stop"
        }
    return found


# Windows are shorter than an episode; the states of the last cannot be kept, so that it runs all again.
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gpt-oss", "qwen3.5"])
def test_turns_are_those_of_a_generator_that_keeps_nothing(tiny_model, name):
    kept, again = (play(make_generator(tiny_model(name)), 3, keeps=keeps) for keeps in (True, False))
    assert len(kept) > 2 * len(PROMPTS) * NUM_SAMPLES  # the last turn goes on from what has gone on
    assert [(context, reply.token_ids) for context, reply in kept] == [(c, reply.token_ids) for c, reply in again]
    for (_, found), (_, expected) in zip(kept, again, strict=True):
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_logprobs_of_turns_are_those_of_the_engine(tiny_model):
    path = tiny_model("llama")
    engine = FSDPEngine(str(path), EngineConfig(max_tokens=2048)).initialize()
    turns = play(make_generator(path), 4)
    batch = Batch.from_samples(
        [context for context, _ in turns], [reply.token_ids for _, reply in turns],
        rollout_logprobs=[reply.logprobs for _, reply in turns],
    )  # fmt: skip
    inferred = engine.infer(batch, ("logprob",))["logprob"]
    torch.testing.assert_close(batch.rollout_logprob_T, inferred, rtol=0, atol=1e-5)


def test_a_turn_runs_what_is_new_in_it(tiny_model):
    """The reply's last token and what the environment has written, but for the last token of all: five at most."""
    generators = [make_generator(tiny_model("llama")) for _ in range(2)]
    kept, again = map(Prefilled, generators)
    turns = play(generators[0], 3)
    play(generators[1], 3, keeps=False)
    num_episodes = len(PROMPTS) * NUM_SAMPLES
    assert len({tuple(context) for context, _ in turns}) == len(PROMPTS) + 2 * num_episodes
    longest = [max(len(context) for context, _ in turns[i : i + num_episodes]) - 1 for i in (12, 24)]
    assert kept.passes == [(len(PROMPTS), 10), (num_episodes, 5), (num_episodes, 5)]
    assert again.passes == [(len(PROMPTS), 10), *((num_episodes, length) for length in longest)]
    assert (kept.tokens, again.tokens) == (150, 666)


@pytest.mark.parametrize("keeps", [True, False])
def test_equal_turns_run_once(tiny_model, keeps):
    """Of episodes that have said the same so far, although others stand between them."""
    generator = make_generator(tiny_model("llama"))
    generator.eos_token_ids = [*range(256)]
    prefilled = Prefilled(generator)
    turns = play(generator, 3, GREEDY, keeps=keeps)
    assert len({tuple(context) for context, _ in turns}) == 3 * len(PROMPTS)
    assert [rows for rows, _ in prefilled.passes] == [len(PROMPTS)] * 3


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gpt-oss", "qwen3.5"])
def test_what_prompts_have_in_common_runs_once(tiny_model, name):
    """The samples are those of each prompt alone. A model that cannot keep states runs all of each prompt."""
    path = tiny_model(name)
    instruction = [*range(100, 170)]
    requests = [
        Request(row=row, token_ids=[*instruction, *prompt], seed=10 * row + number, max_new_tokens=8)
        for number in range(2)
        for row, prompt in enumerate(PROMPTS)
    ]
    together, alone = make_generator(path, batch_size=4), make_generator(path)  # two batches
    prefilled = Prefilled(together)
    found = together.generate(requests, PARAMS)
    expected = [alone.generate([request], PARAMS)[0] for request in requests]
    assert [reply.token_ids for reply in found] == [reply.token_ids for reply in expected]
    for reply, other in zip(found, expected, strict=True):
        assert reply.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    if together.model.decodes_in_place:
        assert prefilled.passes == [(1, 70), (2, 5), (1, 10)]
    assert together._kept.common is None


def test_no_more_episodes_than_the_batch_size_are_kept(tiny_model):
    """Those that are kept run in batches of their own, the others as if nothing were kept."""
    generators = [make_generator(tiny_model("llama"), batch_size=5) for _ in range(2)]
    rooms, generate = [], generators[0]._generate
    generators[0]._generate = lambda *args: (generate(*args), rooms.append(generators[0]._kept.room))[0]
    kept, again = map(Prefilled, generators)
    found, expected = play(generators[0], 4), play(generators[1], 4, keeps=False)
    assert [reply.token_ids for _, reply in found] == [reply.token_ids for _, reply in expected]
    assert min(rooms) == 0
    assert kept.tokens < again.tokens


def test_what_is_kept_is_dropped(tiny_model):
    """With the weights that it was computed with, before the training, and with episodes that do not go on."""
    generator = make_generator(tiny_model("llama"))
    for drop in (lambda: generator.load(None, 2), generator.sleep, generator.close):
        play(generator, 1)
        assert generator._kept.room < 64
        drop()
        assert generator._kept.room == 64
    play(generator, 1)
    generator.generate([Request(row=0, token_ids=[1, 2], seed=0, max_new_tokens=2)], PARAMS)
    assert generator._kept.room == 64


def test_other_tokens_than_those_that_were_sampled_run_again(tiny_model):
    """A history that leaves something out has only its first tokens in common with the turn before."""
    generator, plain = (make_generator(tiny_model("llama")) for _ in range(2))
    asked = Request(row=0, token_ids=PROMPTS[0], seed=0, max_new_tokens=12, episode=1)
    (reply,) = generator.generate([asked], PARAMS)
    assert reply.finish_reason == "stop"
    changed = [*PROMPTS[0][:7], 1, *PROMPTS[0][8:], *reply.token_ids, 5, 6]
    request = Request(row=0, token_ids=changed, seed=1, max_new_tokens=12, episode=1)
    prefilled = Prefilled(generator)
    ((found,), (expected,)) = (each.generate([request], PARAMS) for each in (generator, plain))
    assert prefilled.passes == [(1, len(changed) - 7 - 1)]
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
