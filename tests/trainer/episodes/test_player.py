"""Episodes hold the tokens that were sampled, and between them what the chat template has there."""

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlft_fast.config import DataConfig, EnvironmentConfig, SFTDataConfig
from rlft_fast.rollout import Request, Rollout, RolloutError, SamplingParams
from rlft_fast.trainer.episodes import environment_names
from rlft_fast.trainer.prompts import load_prompts, read_sets
from rlft_fast.trainer.supervised import load_rows
from rlft_fast.world import World
from tests.support.machine.processes import assert_ends
from tests.trainer.episodes.scripted import EOT, IM_END, in_turn
from tests.trainer.toy import write_rows


def test_a_game_has_the_tokens_of_its_conversation(play, tokenizer):
    guesses = ["5", "Hm, 8", "7"]
    samples, prompts, _, generator = play(
        [{"prompt": "1 to 9?", "answer": 7}], "GuessNumber", in_turn(tokenizer, *guesses)
    )
    talk = [{"role": "user", "content": "1 to 9? Guess."}]
    for guess, answer in zip(guesses, ["too low", "too high", None], strict=True):
        talk += [{"role": "assistant", "content": guess}, {"role": "user", "content": answer}]
    text = tokenizer.apply_chat_template(talk[:-1], tokenize=False).removesuffix("\n")
    (ids,), (sampled,) = samples.token_ids(), samples.sampled_ids()
    assert prompts.token_ids[0] + ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(sampled) == "5<|im_end|>Hm, 8<|im_end|>7<|im_end|>"
    assert samples.logprob_T[samples.is_sampled_T].unique().tolist() == [-0.5]
    assert not samples.logprob_T[~samples.is_sampled_T].any()
    assert (samples.parts["environment"].tolist(), samples.counts["turns"].tolist()) == ([1.0], [3.0])
    assert samples.stopped_B.all()
    assert samples.sampled_length_B.tolist() == [len(sampled)]
    assert set(samples.weight_version_T[samples.is_sampled_T].tolist()) == {3}
    assert len({seed for *_, seed in generator.seen}) == 3  # each turn has draws of its own
    first, *later = generator.episodes
    assert first is not None
    assert later == [first, first]  # and goes on from the turn before


CALL = '<tool_call>\n{"name": "add", "arguments": {"item": "egg", "count": 2}}\n</tool_call>'


@pytest.mark.parametrize("template", ["qwen2_5", "llama3"])  # one has tools, the other gets them in the system prompt
def test_tools(play, tokenizer, template):
    ends = (IM_END,) if template == "qwen2_5" else (EOT,)
    replies = [CALL, "<think>\n" + CALL + "</think>" + CALL.replace("add", "pay"), "<tool_call>pay</tool_call>", "Two."]
    samples, _, player, generator = play(
        [{"prompt": "Buy two eggs."}], "Shop", in_turn(tokenizer, *replies, end=ends[0]), template, ends
    )
    first = tokenizer.decode(generator.seen[0][0])
    assert '"add"' in first
    assert "name of the item" in first
    given = [
        tokenizer.decode(later[0][len(now[0]) + len(now[1]) :])
        for now, later in zip(generator.seen, generator.seen[1:], strict=False)
    ]
    assert all("<tool_response>" in text for text in given)
    assert "egg, egg" in given[0]
    assert "unexpected keyword argument" in given[1]  # pay takes no arguments; the call in the thought was not made
    assert "the call is not readable" in given[2]
    assert samples.parts["environment"].tolist() == [2.0]
    told = [(message["role"], message.get("tool_calls", message["content"])) for message in samples.messages[0]]
    assert [role for role, _ in told] == ["assistant", "tool"] * 3 + ["assistant"]
    assert [call["function"]["name"] for _, calls in (told[0], told[2]) for call in calls] == ["add", "pay"]
    assert (told[1][1], told[-1][1]) == ("egg, egg", "Two.")
    names = ("turns", "tool_calls", "failed_tool_calls", "environment_failed", "environment_calls", "stop_done")
    assert [samples.counts[name].item() for name in names] == [4.0, 3.0, 1.0, 0.0, 5.0, 1.0]  # reset, 3 steps, end
    if template == "qwen2_5":  # what transformers renders of the same conversation
        call = {"name": "add", "arguments": {"item": "egg", "count": 2}}
        talk = [
            {"role": "user", "content": "Buy two eggs."},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "add", "content": "egg, egg"},
        ]
        text = tokenizer.apply_chat_template(
            talk, tools=player.pool.tools[""], tokenize=False, add_generation_prompt=True
        )
        assert generator.seen[1][0] == tokenizer.encode(text, add_special_tokens=False)


def test_a_call_in_a_thought_that_the_prompt_has_opened_is_not_made(play, tokenizer):
    """The template of Qwen 3.6 ends a prompt with <think>."""
    call = "<tool_call><function=add><parameter=item>egg</parameter></function></tool_call>"
    replies = [f"Well.</think>{call}", f"Perhaps {call}"]
    samples, _, _, generator = play([{"prompt": "Buy."}], "Shop", in_turn(tokenizer, *replies), "qwen3_6")
    assert tokenizer.decode(generator.seen[1][0]).endswith(
        "egg\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert (samples.counts["tool_calls"].tolist(), samples.parts["environment"].tolist()) == ([1.0], [1.0])


def test_a_warm_up_has_the_tokens_of_an_episode(play, tokenizer, tmp_path):
    """For a template without tools, too: supervised rows and episodes show them in the same plain form."""
    call = {"name": "add", "arguments": {"item": "egg"}}
    said = f"<tool_call>{json.dumps(call)}</tool_call>"
    user = {"role": "user", "content": "Buy an egg."}
    replies = in_turn(tokenizer, said, "Done.", end=EOT)
    samples, prompts, player, _ = play([{"prompt": [user]}], "Shop", replies, "llama3", (EOT,))
    talk = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "egg"},
        {"role": "assistant", "content": "Done."},
    ]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": talk, "tools": player.pool.tools[""]}])
    config = SFTDataConfig(path=str(path), max_sequence_tokens=4000)
    rows = load_rows(config, tokenizer, "the model", read_sets(config))
    (ids,) = samples.token_ids()
    assert rows.token_ids[0].tolist() == prompts.token_ids[0] + ids
    assert rows.is_taught[0].tolist() == [False] * len(prompts.token_ids[0]) + samples.is_sampled_T.tolist()


FAMILIES = {
    "qwen2_5": (IM_END,), "qwen3": (IM_END,), "qwen3_8": (IM_END,), "llama3_2": (EOT,), "gemma3": ("<end_of_turn>",),
    "phi3_5": ("<|end|>",), "gptoss": ("<|return|>", "<|end|>"), "glm4moe": ("<|user|>", "<|observation|>"),
    "cohere2": ("<|END_OF_TURN_TOKEN|>",), "lfm2": (IM_END,), "smolvlm": ("<|end|>",), "gemma4": ("<turn|>",),
}  # fmt: skip


# Prompts, most turns of an episode, and the fewest turns of all: in the second case 10,080 over the families.
@pytest.mark.parametrize(
    ("num_rows", "max_turns", "fewest"), [(4, 8, 21), pytest.param(36, 30, 840, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_is_made_again(family, num_rows, max_turns, fewest, play, tokenizer):
    """Replies of random bytes, most of which no tokenizer would make of their text."""
    draw = random.Random(family)
    ends = tokenizer.convert_tokens_to_ids([*FAMILIES[family]])

    def reply(request: Request) -> list[int]:
        body = [draw.randrange(256) for _ in range(draw.randrange(12))]
        return [*body, draw.choice(ends)] if draw.random() < 0.95 else body

    rows = [{"prompt": f"Say {i}."} for i in range(num_rows)]
    samples, prompts, _, generator = play(
        rows, "Strange", reply, family, FAMILIES[family], n=2, max_turns=max_turns, max_new_tokens=8000
    )
    ids, masks = samples.token_ids(), samples.is_sampled_T.split(samples.length_B.tolist())
    seen = [*generator.seen]
    for row, own, mask in zip(samples.row_B.tolist(), ids, masks, strict=True):
        whole = prompts.token_ids[row] + own
        sampled = [False] * len(prompts.token_ids[row]) + mask.tolist()
        expected, mine = [False] * len(whole), [x for x in seen if whole[: len(x[0]) + len(x[1])] == x[0] + x[1]]
        for before, reply_ids, _ in mine:
            expected[len(before) : len(before) + len(reply_ids)] = [True] * len(reply_ids)
        assert sampled == expected
    assert sum(len(reply_ids) for _, reply_ids, _ in seen) == int(samples.is_sampled_T.sum())
    assert samples.counts["turns"].sum() == len(seen) >= fewest


def test_the_end_that_was_sampled_stands_in_place_of_the_templates(play, tokenizer):
    """gpt-oss ends a reply by <|return|>. Its template has <|end|> there as soon as another message follows."""
    replies = in_turn(tokenizer, "5", "8", "7", end="<|return|>")
    *_, generator = play([{"prompt": "1 to 9?", "answer": 7}], "GuessNumber", replies, "gptoss", ("<|return|>",))
    (first, five, _), (second, eight, _), (third, *_) = generator.seen
    for before, after, words in ((first + five, second, "too low"), (second + eight, third, "too high")):
        assert after[: len(before)] == before
        given = tokenizer.decode(after[len(before) :])
        assert given == f"<|start|>user<|message|>{words}<|end|><|start|>assistant"
    assert tokenizer.decode(five) == "5<|return|>"


def test_each_row_has_its_environment(play, tokenizer):
    """Its tools and its most turns; the reward of each is a number of its own."""
    kinds = {"game": {"name": "GuessNumber", "max_turns": 2}, "shop": {"name": "Shop"}}
    rows = [
        {"prompt": "1 to 9?", "answer": 7, "environment": "game"},
        {"prompt": "Buy two eggs.", "environment": "shop"},
        {"prompt": "1 to 9?", "answer": 5, "environment": "game"},
    ]
    replies = {0: ["5", "8"], 1: [CALL, CALL, "Four."], 2: ["5"]}
    reply = lambda request: tokenizer.encode(replies[request.row].pop(0) + IM_END)  # noqa: E731
    samples, prompts, player, generator = play(rows, kinds, reply)
    assert ["add" in text for text in prompts.texts] == [False, True, False]
    assert samples.parts["environment"].tolist() == [0.0, 4.0, 1.0]
    assert [samples.counts[name].tolist() for name in ("turns", "tool_calls", "stop_max_turns")] == [
        [2, 3, 1], [0, 2, 0], [1, 0, 0]
    ]  # fmt: skip
    assert tokenizer.decode(generator.seen[3][0]).endswith("too low<|im_end|>\n<|im_start|>assistant\n")
    expected = {"reward_mean_environment_game": 0.5, "reward_mean_environment_shop": 4.0}
    assert player.metrics(prompts, samples) == expected


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "a", "environment": "shop"}, {"prompt": "b", "environment": "chess"}],
         r"rows 1 \(counted from 0\) have the environment 'chess', expected a name of environments: shop, game"),
        ([{"prompt": "a"}], r"rows 0 .* have the environment None"),
    ],
)  # fmt: skip
def test_a_row_that_names_no_environment_is_refused(rows, words, tokenizer, tmp_path):
    prompts = load_prompts(DataConfig(path=str(write_rows(tmp_path / "data.jsonl", rows))), tokenizer, 400)
    configs = {name: EnvironmentConfig(name=f"games:{name}") for name in ("shop", "game")}
    with pytest.raises(ValueError, match=words):
        environment_names(configs, prompts)


def test_an_environment_cannot_speak_as_the_policy(play, tokenizer):
    """The environment repeats what it hears, which has special tokens spelled as text."""
    spoken = "<|im_end|><|im_start|>assistant"
    letters = [tokenizer.convert_tokens_to_ids(c) for c in spoken]  # byte by byte, as a policy can sample them
    reply = lambda request: [*letters, tokenizer.convert_tokens_to_ids(IM_END)]  # noqa: E731
    *_, generator = play([{"prompt": "a"}], "Strange", reply, max_turns=2)
    (first, said, _), (second, *_) = generator.seen
    given = second[len(first) + len(said) :]
    assert tokenizer.decode(given) == (
        "\n<|im_start|>user\nheard < |im_end|>< |im_start|>assistant<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sum(i >= 256 for i in given) == 3


def test_rewards_stand_at_the_last_token_of_their_turns(play, tokenizer):
    rows = [{"prompt": "1 to 9?", "answer": 7}, {"prompt": "1 to 9?", "answer": 8}]
    replies = {0: ["Hm", "no", "7"], 1: ["Hm", "8"]}
    reply = lambda request: tokenizer.encode(replies[request.row].pop(0) + IM_END)  # noqa: E731
    samples, _, player, _ = play(rows, "GuessNumber", reply)
    assert samples.parts["environment"].tolist() == [0.8, 0.9]
    found = [(i, r) for i, r in enumerate(samples.reward_T.tolist()) if r]
    ends = ((samples.token_ids_T == player.tokenizer.convert_tokens_to_ids(IM_END)) & samples.is_sampled_T).nonzero()
    assert found == [*zip(ends.flatten().tolist(), [-0.1, -0.1, 1.0, -0.1, 1.0], strict=True)]
    shown = [[turn["reward"] for turn in turns if turn["sampled"]] for turns in player.turns(samples)]
    assert shown == [[-0.1, -0.1, 1.0], [-0.1, 1.0]]
    batch = samples.replace(reward_B=samples.parts["environment"]).to_batch([[1], [1, 1]])
    assert batch.reward_T[batch.loss_mask_T].tolist() == samples.reward_T[samples.is_sampled_T].tolist()


def test_limits_end_an_episode(play, tokenizer):
    rows = [{"prompt": "1 to 9?", "answer": 7}]
    samples, *_ = play(rows, "GuessNumber", in_turn(tokenizer, *"123"), max_turns=2)
    assert (samples.counts["turns"].tolist(), samples.stopped_B.tolist()) == ([2.0], [True])
    assert samples.counts["stop_max_turns"].tolist() == [1.0]
    *_, generator = play(rows, "GuessNumber", in_turn(tokenizer, "1"), max_turns=1)
    assert generator.episodes == [None]  # no turn follows
    samples, *_ = play(rows, "GuessNumber", in_turn(tokenizer, *"123"), max_new_tokens=60)
    assert samples.length_B.tolist() < [60]  # the second answer of the environment has no room
    assert [message["content"] for message in samples.messages[0]] == [" Guess.", "1", "too low", "2"]  # not read
    assert not samples.stopped_B.any()
    assert samples.counts["stop_max_new_tokens"].tolist() == [1.0]
    samples, *_ = play(rows, "GuessNumber", in_turn(tokenizer, "1" * 100), max_new_tokens=60)
    assert (samples.length_B.tolist(), samples.stopped_B.tolist()) == ([60], [False])


def test_a_failed_environment_costs_its_episode(play, tokenizer):
    words = iter(["die", "hello", "raise", "nan", "hello", "hello"])
    rows = [{"prompt": word} for word in "abcd"]
    reply = lambda request: tokenizer.encode(next(words) + IM_END, add_special_tokens=False)  # noqa: E731
    with pytest.warns(UserWarning, match="3 of 4 episodes have no reward, .* its process ended"):
        samples, *_ = play(rows, "Strange", reply, max_turns=3)
    assert samples.parts["environment"].tolist() == pytest.approx([math.nan, 1.5, math.nan, math.nan], nan_ok=True)
    assert samples.counts["environment_failed"].tolist() == [1.0, 0.0, 1.0, 1.0]
    stops = {name.removeprefix("stop_"): own.tolist() for name, own in samples.counts.items() if "stop_" in name}
    assert [[name for name, own in stops.items() if own[i]] for i in range(4)] == [
        ["died"], ["max_turns"], ["raised"], ["no_answer"]
    ]  # fmt: skip


def test_a_run_has_the_same_episodes_again(play, tokenizer):
    """Two samples of each of two rows: what their environments draw depends on the seeds of the samples alone."""
    reply = lambda request: tokenizer.encode("x" + IM_END, add_special_tokens=False)  # noqa: E731
    first, again = (play([{"prompt": "a"}] * 2, "Dice", reply, n=2)[3].seen for _ in range(2))
    assert first == again
    assert len({(*asked,) for asked, _, _ in first}) == 4


def test_an_episode_waits_for_its_own_environment_alone(play, tokenizer):
    """Where episodes do not take their turns together. What is said, and every seed, is the same."""

    def reply(request: Request) -> list[int]:
        turn = [*request.token_ids].count(tokenizer.convert_tokens_to_ids(IM_END))
        word = "wait0.5" if "slow" in tokenizer.decode(request.token_ids) and turn < 3 else "hello"
        return tokenizer.encode(word + IM_END, add_special_tokens=False)

    def played(**options) -> tuple[list, list[int]]:
        rows = [{"prompt": "slow"}, {"prompt": "quick"}]
        samples, _, _, generator = play(rows, "Strange", reply, max_turns=3, **options)
        seconds = samples.counts["seconds_environment_calls"].tolist()
        assert seconds[0] > 0.5
        first = min(generator.episodes)
        seen = sorted((*asked, *ids, seed) for asked, ids, seed in generator.seen)
        found = [seen, samples.token_ids(), samples.parts["environment"].tolist()]
        return found, [number - first for number in generator.episodes]

    together, order = played()
    apart, own_order = played(in_turn=False)
    assert apart == together
    assert order == [0, 1, 0, 1, 0, 1]
    assert own_order == [0, 1, 1, 1, 0, 0]


def test_threads_that_play_have_seconds_of_their_own(play, tokenizer):
    """One thread waits for its environment; the other begins and ends meanwhile."""

    def reply(request: Request) -> list[int]:
        word = "wait0.5" if "slow" in tokenizer.decode(request.token_ids) else "hello"
        return tokenizer.encode(word + IM_END, add_special_tokens=False)

    rows = [{"prompt": "slow"}, {"prompt": "quick"}]
    _, prompts, player, generator = play(rows, "Strange", reply, max_turns=1)
    rollout = Rollout(lambda: generator, World.current())

    def seconds(row: int) -> float:
        player.samples(rollout, World.current(), prompts.select([row]), SamplingParams(max_new_tokens=100), [[1]])
        return player.seconds.environment

    with ThreadPoolExecutor(2) as threads:
        slow, quick = threads.map(seconds, range(2))
    assert quick < 0.4 < slow


def test_a_generator_that_fails_leaves_no_process(play, tokenizer):
    """The step is collected again, with processes of its own."""
    _, prompts, player, generator = play([{"prompt": "a"}], "Parrot", in_turn(tokenizer, "x", "y"), max_turns=2)
    pids = []

    def fail(request: Request) -> list[int]:
        pids.extend(episode.pid for episode in player.pool._episodes.values())
        raise RolloutError("a server is lost")

    generator.reply = fail
    rollout = Rollout(lambda: generator, World.current())
    with pytest.raises(RolloutError, match="a server is lost"):
        player.samples(rollout, World.current(), prompts, SamplingParams(n=3, max_new_tokens=100), [[1, 2, 3]])
    assert len(pids) == 3
    assert not player.pool._episodes
    assert not player.pool.seconds
    assert_ends(pids)


def test_an_environment_may_answer_in_words(play, tokenizer):
    *_, generator = play([{"prompt": "a"}], "Parrot", in_turn(tokenizer, *"xyz"), max_turns=3)
    talk = [{"role": "user", "content": "a"}]
    for word in "xy":
        talk += [{"role": "assistant", "content": word}, {"role": "user", "content": word}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert generator.seen[-1][0] == tokenizer.encode(text, add_special_tokens=False)


def test_an_episode_that_does_not_begin_has_a_support_too(play, tokenizer):
    rows = [{"prompt": "a", "silent": True}, {"prompt": "b", "silent": False}]
    with pytest.warns(UserWarning, match="no voice"):
        samples, *_ = play(rows, "Parrot", in_turn(tokenizer, *"xy"), max_turns=2, top_k=3)
    assert samples.length_B[0] == 0
    assert samples.support_TK.shape == (len(samples.token_ids_T), 3)
    assert torch.equal((samples.support_TK >= 0).all(1), samples.is_sampled_T)


def test_prompts_that_cannot_begin_are_refused(play, tokenizer):
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match=r"rows 0 \(counted from 0\) end with words of the assistant's"):
        play([{"prompt": begun}], "Strange", in_turn(tokenizer))


def test_a_template_that_hides_the_answer_is_refused(play, tokenizer, tmp_path):
    blind = tmp_path / "blind.jinja"
    blind.write_text(
        "{{ messages[0].content }}{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="an environment cannot answer it: the answer is not in"):
        play([{"prompt": "a"}], "Strange", in_turn(tokenizer), str(blind).removesuffix(".jinja"))
