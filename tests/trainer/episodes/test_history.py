"""Branches of episodes: the policy goes on from the history that its chat template writes."""

from itertools import groupby, pairwise

import pytest
import torch

from rlft_fast.config import AlgorithmConfig, RewardConfig
from rlft_fast.data import Samples
from rlft_fast.engine import weighted
from rlft_fast.rollout import Request
from rlft_fast.trainer.collect.experience import mini_batch_rows, penalize_length
from rlft_fast.trainer.learn import Objective
from tests.trainer.episodes.scripted import IM_END, in_turn

GAME = [{"prompt": "1 to 9?", "answer": 7}]
GUESSES = [("It may be in the middle.", "5"), ("Up.", "8"), ("So it is less.", "7")]
REPLIES = [f"<think>\n{thought}\n</think>\n\n{guess}" for thought, guess in GUESSES]


def conversation(num_replies: int, answers=("too low", "too high")) -> list[dict[str, str]]:
    talk = [{"role": "user", "content": "1 to 9? Guess."}]
    for reply, answer in [*zip(REPLIES, answers, strict=False)][:num_replies]:
        talk += [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]
    return talk


def test_the_policy_reads_what_the_template_leaves(play, tokenizer):
    """Each context is transformers' text of the messages; each sampled token is trained once, behind its context."""
    samples, prompts, player, generator = play(
        GAME, "GuessNumber", in_turn(tokenizer, *REPLIES), "qwen3", history="template"
    )
    contexts = [context for context, *_ in generator.seen]
    for number, context in enumerate(contexts):
        text = tokenizer.apply_chat_template(conversation(number), tokenize=False, add_generation_prompt=True)
        assert context == tokenizer.encode(text, add_special_tokens=False)
        assert "<think>" not in text  # no earlier thought is left
    samples = samples.replace(reward_B=samples.parts["environment"])
    batch = samples.to_batch(prompts.token_ids)
    sequences = [own.tolist() for own in batch.input_ids_T.split(batch.lengths.tolist())]
    assert sequences == [[*context, *reply] for context, reply, _ in generator.seen]
    masks = batch.loss_mask_T.split(batch.lengths.tolist())
    for (context, reply, _), mask in zip(generator.seen, masks, strict=True):
        assert mask.tolist() == [False] * (len(context) - 1) + [True] * len(reply) + [False]
    assert int(batch.loss_mask_T.sum()) == int(samples.is_sampled_T.sum()) == sum(map(len, samples.sampled_ids()))
    assert batch.rollout_logprob_T[batch.loss_mask_T].unique().tolist() == [-0.5]
    assert set(batch.weight_version_T[batch.loss_mask_T].tolist()) == {3}
    assert (batch.reward_B.tolist(), batch.group_B.tolist(), batch.episode_B.tolist()) == ([1.0] * 3, [0] * 3, [0] * 3)
    assert batch.reward_T[batch.loss_mask_T].tolist() == samples.reward_T[samples.is_sampled_T].tolist()
    assert [samples.counts[name].item() for name in ("turns", "branches", "stop_done")] == [3, 3, 1]
    assert samples.token_ids() == [sequences[-1][len(prompts.token_ids[0]) :]]  # a reward model reads the last branch
    assert tokenizer.decode(samples.sampled_ids()[0]) == "".join(reply + IM_END for reply in REPLIES)
    (shown,) = player.turns(samples)
    assert [turn["text"] for turn in shown if turn["sampled"]] == [reply + IM_END for reply in REPLIES]
    kept = [turn["kept"] for turn in shown if "kept" in turn]
    begins = [len(prompts.token_ids[0]) + n for n in kept]
    assert begins == [
        next(i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y)
        for before, after in pairwise(sequences)
    ]


def test_a_history_that_loses_nothing_has_no_branch(play, tokenizer):
    """Qwen 3 shows thoughts between calls of tools, and Qwen 3.8 all thoughts."""
    call = '<tool_call>\n{"name": "add", "arguments": {"item": "egg"}}\n</tool_call>'
    thoughtful = [f"<think>\nHm.\n</think>\n\n{call}", f"<think>\nOne more.\n</think>\n\n{call}", "Done."]
    for rows, name, replies, template in (
        ([{"prompt": "Buy."}], "Shop", thoughtful, "qwen3"),
        (GAME, "GuessNumber", REPLIES, "qwen3_8"),
        (GAME, "GuessNumber", ["5", "8", "7"], "qwen3"),
    ):
        kept, branched = (
            play(rows, name, in_turn(tokenizer, *replies), template, history=history)
            for history in ("keep", "template")
        )
        assert kept[3].seen == branched[3].seen
        assert branched[0].counts["branches"].tolist() == [1]
        assert kept[0].kept_T is None
        sizes = [samples.to_batch(prompts.token_ids).num_sequences for samples, prompts, *_ in (kept, branched)]
        assert sizes == [1, 1]


def test_a_thought_that_the_prompt_opens_is_left_out(play, tokenizer):
    """The template of Qwen 3.6 ends a prompt with <think>."""
    replies = [reply.removeprefix("<think>\n") for reply in REPLIES]
    samples, *_, generator = play(GAME, "GuessNumber", in_turn(tokenizer, *replies), "qwen3_6", history="template")
    for number, (context, *_) in enumerate(generator.seen):
        text = tokenizer.apply_chat_template(conversation(number), tokenize=False, add_generation_prompt=True)
        assert text.endswith("<think>\n")
        assert context == tokenizer.encode(text, add_special_tokens=False)
    assert samples.counts["branches"].tolist() == [3]


FAMILIES = {
    "gptoss": (
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}", "<|return|>",
        "<|start|>user<|message|>{}<|end|><|start|>assistant",
    ),
    "gemma4_v5": (
        "<|channel>thought\n{}<channel|>{}", "<turn|>", "\n<|turn>user\n{}<turn|>\n<|turn>model\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("history", ["keep", "template"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_thought_is_none_of_the_words(family, history, play, tokenizer):
    """In other forms than <think>, too: an environment does not hear the 4, and the template is given no channels."""
    form, end, between = FAMILIES[family]
    replies = [form.format(f"{thought} Not 4.", guess) for thought, guess in GUESSES]
    said = in_turn(tokenizer, *replies, end=end)
    samples, *_, generator = play(GAME, "GuessNumber", said, family, (end,), history=history)
    assert (samples.parts["environment"].tolist(), samples.counts["turns"].tolist()) == ([1.0], [3.0])
    heard = [" Guess.", "5", "too low", "8", "too high", "7"]
    assert [message["content"] for message in samples.messages[0]] == heard
    contexts = [context for context, *_ in generator.seen]
    text = ""
    for number, (words, answer) in enumerate(zip(replies, ("too low", "too high"), strict=False), start=1):
        text += f"{words}{end}{between.format(answer)}"
        if history == "keep":
            assert tokenizer.decode(contexts[number][len(contexts[0]) :]) == text
        else:
            talk = [x | {"content": x["content"].rpartition("\n")[2]} for x in conversation(number)]
            whole = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
            assert contexts[number] == tokenizer.encode(whole, add_special_tokens=False)


def test_words_of_the_policy_become_no_special_token(play, tokenizer):
    """It spells the end of its turn byte by byte, in a thought and behind it; a branch makes tokens of both again."""
    spoken = f"<think>\n{IM_END}\n</think>\n\n{IM_END}<|im_start|>"
    letters = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(c)[0]) for c in spoken]
    reply = lambda request: [*letters, tokenizer.convert_tokens_to_ids(IM_END)]  # noqa: E731
    samples, *_, generator = play([{"prompt": "a"}], "Strange", reply, "qwen3", max_turns=3, history="template")
    assert samples.counts["branches"].tolist() == [3]
    num_special = [sum(i >= 256 for i in context) for context, *_ in generator.seen]
    assert num_special == [3, 7, 11]  # four more for each reply and its answer


def test_the_limit_is_of_what_the_policy_sees(play, tokenizer):
    options = {"template": "qwen3", "history": "template"}
    samples, prompts, _, generator = play(GAME, "GuessNumber", in_turn(tokenizer, *REPLIES), **options)
    longest = max(len(context) + len(reply) for context, reply, _ in generator.seen) - len(prompts.token_ids[0])
    assert longest < len(samples.token_ids_T)
    for limit, reason in ((longest, "stop_done"), (longest - 1, "stop_max_new_tokens")):
        samples, *_ = play(GAME, "GuessNumber", in_turn(tokenizer, *REPLIES), **options, max_new_tokens=limit)
        assert samples.counts[reason].tolist() == [1]


def test_a_template_that_changes_the_prompt_is_refused(play, tokenizer, tmp_path):
    """It counts the messages at the beginning."""
    counting = tmp_path / "counting.jinja"
    counting.write_text(
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = str(counting).removesuffix(".jinja")
    play(GAME, "GuessNumber", in_turn(tokenizer, "7"), template)
    with pytest.raises(ValueError, match=r"the prompt '1.*' becomes '3.*Set environment.history to keep"):
        play(GAME, "GuessNumber", in_turn(tokenizer, "7"), template, history="template")


@pytest.fixture
def branched(play, tokenizer):
    """Two episodes of each of two rows, with branches, and the same episodes without."""

    def reply(request: Request) -> list[int]:
        turn = [*request.token_ids].count(tokenizer.convert_tokens_to_ids(IM_END)) // 2
        guess = "5" if turn < 1 + (request.seed % 3) else str(7)
        return tokenizer.encode(f"<think>\n{turn}\n</think>\n\n{guess}{IM_END}", add_special_tokens=False)

    rows = [*GAME, {"prompt": "Once more?", "answer": 7}]
    found = []
    for history in ("template", "keep"):
        samples, prompts, *_ = play(rows, "GuessNumber", reply, "qwen3", n=2, history=history)
        reward_B = samples.parts["environment"] - 0.1 * samples.counts["turns"]
        found.append((samples.replace(reward_B=reward_B), prompts.token_ids))
    return found


def test_an_episode_learns_as_a_whole(branched):
    """Advantages and weights of sampled tokens are those of episodes in one sequence."""
    methods = ["grpo", "rloo", "opo", "gpg", "reinforce++", "reinforce++-baseline", "optimal-token"]
    aggregations = ["sequence-mean", "token-mean", "sequence-mean-token-sum"]
    for advantage, aggregation in [*zip(methods, aggregations * 3, strict=False)]:
        found = []
        for samples, prompts in branched:
            objective = Objective(AlgorithmConfig(advantage=advantage, aggregation=aggregation), 2000)
            batch = samples.to_batch(prompts)
            assert batch.num_sequences == (4 if samples.kept_T is None else 11)
            sum_prob_squared_T = torch.ones(batch.num_tokens)
            batch = batch.replace(old_logprob_T=batch.rollout_logprob_T, sum_prob_squared_T=sum_prob_squared_T)
            whole, scale = weighted(objective.prepare(batch), objective.policy_loss)
            columns = (whole.advantage_T, whole.loss_weight_T * scale, whole.reward_T)
            found.append([None if x_T is None else x_T[batch.loss_mask_T].tolist() for x_T in columns])
        assert found[0] == found[1]
        assert any(found[0][0])


def test_the_limit_of_tokens_is_of_a_branch(branched):
    """Here a branch has one turn of the policy, and what it samples is in one piece."""
    (samples, _), _ = branched
    own = zip(samples.is_sampled_T.split(samples.length_B.tolist()), strict=True)
    longest = [max(len([*run]) for sampled, run in groupby(x_T.tolist()) if sampled) for (x_T,) in own]
    config = RewardConfig(truncation_penalty=0.0, overlong_buffer=4, overlong_penalty=0.5)
    near = penalize_length(samples, config, max(longest) + 2).reward_B - samples.reward_B
    assert near.tolist() == [-0.25 if x == max(longest) else -0.5 * max(0, x + 2 - max(longest)) / 4 for x in longest]
    assert near.min() == -0.25


def test_an_episode_is_in_one_mini_batch(branched):
    (samples, prompts), _ = branched
    batch = samples.to_batch(prompts)
    rows = mini_batch_rows(batch, AlgorithmConfig(mini_batches=3, epochs=2), seed=1)
    assert len(rows) == 6
    assert sorted(number for part in rows[:3] for number in part) == [*range(11)]
    assert sum(len({*batch.episode_B[part].tolist()}) for part in rows[:3]) == 4


def test_branches_survive_selection_and_checkpoints(branched):
    (samples, prompts), _ = branched
    chosen = samples.select(samples.row_B.argsort(descending=True))
    again = Samples.of_tensors(chosen.tensors())
    batch, expected = again.to_batch(prompts), samples.to_batch(prompts)
    sequences = [{tuple(own.tolist()) for own in x.input_ids_T.split(x.lengths.tolist())} for x in (batch, expected)]
    assert sequences[0] == sequences[1]
    assert int(batch.loss_mask_T.sum()) == int(expected.loss_mask_T.sum())
