"""Rewards in a run: several functions, functions in worker processes, a reward model."""

import json
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

from rlft_fast.config import Config, DataConfig, EngineConfig
from rlft_fast.engine import FSDPEngine, role_engine
from rlft_fast.rollout import Completion, to_samples
from rlft_fast.trainer import train
from rlft_fast.trainer.collect.judge import Judge, RewardModelReader, RewardModelScorer
from rlft_fast.trainer.prompts import Conversation, Prompts, load_prompts
from rlft_fast.world import World
from tests.support.machine.distributed import run_distributed
from tests.support.tiny_models import PAD_TOKEN_ID, VOCAB_SIZE, save_tiny_model
from tests.trainer.supervised.rows import say
from tests.trainer.toy import HERE, comparable, read_lines, toy_config, toy_values, write_rows

MISBEHAVING = HERE.parent.parent / "rewards" / "misbehaving.py"


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("shallow")


@pytest.fixture(scope="module")
def reward_model(tiny_model):
    return tiny_model("llama-reward")


def samples_of(model, folder, **changes) -> list[dict]:
    train(toy_config(model, folder, steps=1, **changes))
    return read_lines(folder / "run" / "samples.jsonl")


def test_several_functions_with_weights(model, tmp_path):
    parts = {f"{HERE}:even_share": 2.0, f"{HERE}:length": -0.5, f"{HERE}:not_for_sun": 0.0}
    rows = samples_of(model, tmp_path, reward__function=parts, rollout__prompts_per_step=10)
    assert len({row["reward"] for row in rows}) > 3
    for row in rows:
        even, length, other = (row["parts"][name] for name in parts)
        assert (other is None) == (row["prompt"] == "sun")
        assert row["reward"] == pytest.approx(2.0 * even - 0.5 * length)
    (metrics,) = comparable(tmp_path / "run")
    assert metrics["left_out_share"] == 0.0
    for name in parts:
        there = [row["parts"][name] for row in rows if row["parts"][name] is not None]
        assert metrics[f"reward_mean_{name}"] == pytest.approx(np.mean(there))


def test_functions_see_their_rows_and_text_without_special_tokens(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(["a", "b"], [tokenizer.encode("a"), tokenizer.encode("b")], {"answer": ["AB", "CD"]})
    completion = Completion([*tokenizer.encode("CD"), tokenizer.eos_token_id], [0.0] * 3, "stop")
    judge = Judge(toy_config(model, tmp_path, reward__function="rlft_fast.rewards:exact_match"), tokenizer, World())
    samples = judge.score(prompts, to_samples([(1, completion), (0, completion)]))
    assert (samples.row_B.tolist(), samples.reward_B.tolist()) == ([0, 1], [0.0, 1.0])


def test_a_sample_that_no_function_judges_has_no_reward_beside_tools(model, tmp_path):
    """Functions that are tools give no reward, which a class may."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(["sun", "moon"], [[1], [2]], {})
    completion = Completion([*tokenizer.encode("8"), tokenizer.eos_token_id], [0.0] * 2, "stop")
    samples = to_samples([(0, completion), (1, completion)])
    samples = samples.replace(parts={"environment": torch.zeros(2, dtype=torch.float64)})
    for environment, expected in (({"tools": ["tools.py:add"]}, [False, True]), ({"name": "games:Game"}, [True, True])):
        options = {"reward__function": f"{HERE}:not_for_sun", "environment": environment, "data__chat": True}
        judge = Judge(toy_config(model, tmp_path, **options), tokenizer, World())
        assert judge.score(prompts, samples).has_reward_B.tolist() == expected
    kinds = {"sum": {"tools": ["tools.py:add"]}, "game": {"name": "games:Game"}}
    options = {"reward__function": f"{HERE}:not_for_sun", "environments": kinds, "data__chat": True}
    judge = Judge(toy_config(model, tmp_path, **options), tokenizer, World())
    prompts = Prompts(["sun", "sun"], [[1], [2]], {"environment": ["sum", "game"]})
    assert str(judge.score(prompts, samples).reward_B.tolist()) == "[nan, 0.0]"


def test_functions_see_the_whole_answer_where_the_model_continues_one(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(["u:9*2? a:1", "a:"], [[1], [1]], {"answer": [18, 8]}, continued={0: "1"})
    completion = Completion([*tokenizer.encode("8"), tokenizer.eos_token_id], [0.0] * 2, "stop")
    judge = Judge(toy_config(model, tmp_path, reward__function="rlft_fast.rewards:last_number"), tokenizer, World())
    samples = judge.score(prompts, to_samples([(0, completion), (1, completion)]))
    assert samples.reward_B.tolist() == [1.0, 1.0]


def test_a_row_without_an_answer_is_known_at_the_start_and_left_out(model, tmp_path):
    rows = [{"prompt": word, "answer": number} for word, number in (("sun", 3), ("moon", None), ("star", 5))]
    write_rows(tmp_path / "data.jsonl", rows)
    options = {"reward__function": "rlft_fast.rewards:last_number", "rollout__prompts_per_step": 3}
    with pytest.warns(UserWarning, match=r"1 rows of the training data \(1, counted from 0\) have no 'answer', which"):
        found = samples_of(model, tmp_path, **options)
    assert {row["prompt"] for row in found if row["reward"] is None} == {"moon"}
    assert comparable(tmp_path / "run")[0]["left_out_share"] == pytest.approx(1 / 3)


def test_functions_in_worker_processes(model, tmp_path):
    changes = {"reward__function": f"{MISBEHAVING}:exit_for_sun", "reward__timeout_s": 20}
    with pytest.warns(UserWarning, match="its process ended with exit code 9"):
        rows = samples_of(model, tmp_path, rollout__prompts_per_step=10, **changes)
    assert all((row["reward"] is None) == (row["prompt"] == "sun") for row in rows)
    assert comparable(tmp_path / "run")[0]["left_out_share"] == pytest.approx(0.1)


def test_a_reward_model_is_a_part_with_a_weight(model, reward_model, tmp_path):
    changes = {"reward": {"model": str(reward_model), "model_weight": 0.5, "function": f"{HERE}:even_share"}}
    rows = samples_of(model, tmp_path, **changes)
    for row in rows:
        assert row["reward"] == pytest.approx(row["parts"][f"{HERE}:even_share"] + 0.5 * row["parts"]["model"])
    assert np.std([row["parts"]["model"] for row in rows]) > 0.01


@pytest.fixture(scope="module")
def other_reward_model(reward_model, tmp_path_factory):
    """The same model with other scores."""
    folder = shutil.copytree(reward_model, tmp_path_factory.mktemp("other") / "reward")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"score.weight": weights["score.weight"].flip(1)}, folder / "model.safetensors")
    return folder


def test_several_reward_models_are_parts_with_weights(model, reward_model, other_reward_model, tmp_path):
    """Each scores as it does alone, and neither is a part of a checkpoint."""
    alone = {"model": str(reward_model), "model_weight": 0.5, "function": f"{HERE}:even_share"}
    first = samples_of(model, tmp_path / "alone", reward=alone)
    kind = {"max_tokens": 64, "workspace_mib": 8}
    models = {
        "helpful": {"model": str(reward_model), "weight": 0.5, **kind},
        "safe": {"model": str(other_reward_model), "weight": -2.0, "compute_dtype": "bfloat16", **kind},
    }
    rows = samples_of(model, tmp_path, reward={"models": models, "function": f"{HERE}:even_share"})
    for row, other in zip(rows, first, strict=True):
        assert row["parts"]["helpful"] == other["parts"]["model"]
        assert row["reward"] == pytest.approx(other["reward"] - 2.0 * row["parts"]["safe"])
    parts = np.array([[row["parts"][name] for name in models] for row in rows])
    assert parts.std(axis=0).min() > 0.01
    (metrics,) = comparable(tmp_path / "run")
    assert [metrics[f"reward_mean_{name}"] for name in models] == pytest.approx(parts.mean(axis=0))
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*/*")]
    assert sorted(saved) == sorted(path.name for path in (tmp_path / "alone" / "run" / "checkpoints").glob("step_*/*"))


def scores_of_transformers(folder: Path, sequences: list[list[int]]) -> list[float]:
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return [plain(torch.tensor([ids])).logits.item() for ids in sequences]


def scorer_of(folder: Path, tokenizer, max_tokens: int) -> RewardModelScorer:
    engine = FSDPEngine(str(folder), EngineConfig(max_tokens=max_tokens), head="score", world=World()).initialize()
    return RewardModelScorer(RewardModelReader(str(folder), tokenizer), engine)


# Tokens are what they were, also where their text would be tokenized differently.
def test_a_reward_model_with_the_policys_tokens_scores_them_as_transformers_does(model, reward_model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(["c", "ab"], [tokenizer.encode("c"), tokenizer.encode("ab")], {})
    answers = [[200, 201, 256], [65, 66]]
    scores = scorer_of(reward_model, tokenizer, 32).score(prompts, answers, tokenizer.batch_decode(answers)).tolist()
    sequences = [[*prompt, *answer] for prompt, answer in zip(prompts.token_ids, answers, strict=True)]
    assert scores == pytest.approx(scores_of_transformers(reward_model, sequences), abs=1e-5)
    assert abs(scores[0] - scores[1]) > 0.01


def test_a_reward_model_with_fewer_embeddings_reads_its_last_token(model, tmp_path):
    """In place of a token that no text has, which the policy may sample all the same."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    folder = save_tiny_model("llama-reward", tmp_path / "reward", vocab_size=128, pad_token_id=0)
    prompts = Prompts(["c"], [tokenizer.encode("c")], {})
    (score,) = scorer_of(folder, tokenizer, 32).score(prompts, [[200, 65]], ["?"]).tolist()
    assert [score] == pytest.approx(scores_of_transformers(folder, [[*prompts.token_ids[0], 127, 65]]), abs=1e-5)


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
OTHER = "{% for m in messages %}<turn>{{ m.role }}:{{ m.content | trim }}<eos>{% endfor %}"


def with_template(folder: Path, template: str | None, turn: bool = False):
    """The folder's tokenizer with a template, also with a token of its own that it puts before a text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    if turn:
        tokenizer.add_special_tokens({"bos_token": "<turn>"})
        ids = {"<turn>": tokenizer.bos_token_id}
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<turn> $A", special_tokens=[*ids.items()]
        )
    return tokenizer


@pytest.fixture
def conversations(model, tmp_path):
    """A text, a conversation, a conversation whose answer is begun, and one whose answer has spaces at its ends."""
    tokenizer = with_template(model, TEMPLATE)
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}
    rows = [
        {"prompt": "hi"},
        {"prompt": [system, user]},
        {"prompt": [user, {"role": "assistant", "content": "it is "}]},
        {"prompt": [user]},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    prompts = load_prompts(DataConfig(path=str(path), chat=False), tokenizer, 64)
    return tokenizer, prompts, ["!", "4", "5", " 6 "]


def asked_and_answered(prompts, answers) -> list[list[dict]]:
    found = []
    for row in (1, 2, 3):
        *messages, last = [*prompts.conversations[row].messages, {"role": "assistant", "content": answers[row]}]
        if messages[-1]["role"] == "assistant":
            last = {"role": "assistant", "content": messages.pop()["content"] + answers[row]}
        found.append([*messages, last])
    return found


TRL = """
def by_messages(prompts, completions, completion_ids, answer, **_):
    assert len(prompts) == len(completions) == 4
    assert (prompts[0], completions[0]) == ("hi", "!")  # as in TRL, where the prompt is a text
    return [None] + [
        float(completion[0]["content"] == answer[i + 1] and prompts[i + 1][-1]["content"] == "2+2?")
        for i, completion in enumerate(completions[1:])
    ]
"""


def test_functions_get_messages_as_trls_do(conversations, model, tmp_path):
    tokenizer, prompts, answers = conversations
    prompts.columns["answer"] = ["!", "4", "it is 5", "7"]
    (tmp_path / "trl_reward.py").write_text(TRL)
    names = [f"{tmp_path}/trl_reward.py:by_messages", "rlft_fast.rewards:exact_match"]
    weights = dict.fromkeys(names, 1.0)
    config = toy_config(model, tmp_path, reward__function=weights, reward__conversational=True)
    own = [(row, Completion(tokenizer.encode(text), [0.0] * len(text), "length")) for row, text in enumerate(answers)]
    samples = Judge(config, tokenizer, World()).score(prompts, to_samples(own))
    by_messages, exact = (part.tolist() for part in samples.parts.values())
    assert exact == [1.0, 1.0, 1.0, 0.0]
    assert by_messages[1:] == exact[1:]
    assert np.isnan(by_messages[0])


EPISODES = """
def by_turns(prompts, completions, completion_ids, **_):
    call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 3}}}
    talk = [
        {"role": "assistant", "content": "add 3", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "8"},
        {"role": "assistant", "content": "It is 8"},
    ]
    asked = [[{"role": "user", "content": "5+3? Go."}], [{"role": "user", "content": "5+3?"}]]
    assert prompts == [asked[0], [*asked[1], {"role": "user", "content": "Go."}]]
    return [float(completion == expected) for completion, expected in zip(completions, (talk, [talk[0]]))]
"""


def test_functions_get_the_messages_of_an_episode(conversations, model, tmp_path):
    """With the policy's words as a function of texts gets them. Built-in functions read the last message."""
    tokenizer, *_ = conversations
    replies = [tokenizer.encode(text) for text in ("add 3", "It is 8")]
    ids = [*replies[0], *b"???", *replies[1], tokenizer.eos_token_id]
    mask = [True] * len(replies[0]) + [False] * 3 + [True] * (len(replies[1]) + 1)
    whole, first = Completion(ids, [0.0] * len(ids), "stop", mask=mask), Completion(replies[0], [0.0] * 5, "length")
    call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 3}}}
    talk = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "name": "add", "content": "8"}]
    messages = [
        [{"content": " Go."}, *talk, {"role": "assistant", "content": "It is 8"}],
        [{"role": "user", "content": "Go."}, *talk[:1]],
    ]
    asked = Conversation([{"role": "user", "content": "5+3?"}])
    prompts = Prompts(["5+3?"], [tokenizer.encode("5+3?")], {"answer": ["It is 8"]}, conversations={0: asked})
    (tmp_path / "episodes.py").write_text(EPISODES)
    for conversational, expected in ((True, [[1.0, 1.0], [1.0, 0.0]]), (False, [[0.0, 0.0]])):
        names = [f"{tmp_path}/episodes.py:by_turns"] * conversational + ["rlft_fast.rewards:exact_match"]
        reward = {"function": dict.fromkeys(names, 1.0), "conversational": conversational}
        judge = Judge(toy_config(model, tmp_path, reward=reward), tokenizer, World())
        scored = judge.score(prompts, to_samples([(0, whole), (0, first)]).replace(messages=messages))
        assert [part.tolist() for part in scored.parts.values()] == expected
        assert (scored.texts, scored.messages) == (["add 3\nIt is 8", "add 3"], None)


def test_a_question_to_a_judge_is_made_of_messages(conversations, model, tmp_path):
    """At the start, too. Where the policy continues an answer, the judge reads the whole one."""
    tokenizer, prompts, _ = conversations
    question = "{{ prompt[-1].content }} {{ completion[0].content }}"
    server = {"url": "http://127.0.0.1:1", "judge": {"model": "m", "prompt": question}}
    chats = prompts.select([2, 1])
    judge = Judge(toy_config(model, tmp_path, reward={"server": server, "conversational": True}), tokenizer, World())
    judge.check(chats, "the data")
    (function,) = judge.functions.functions.values()
    asked = [function.judge.body(*pair, {}) for pair in zip(*judge.answered(chats, ["5", "4"]), strict=True)]
    assert [json.loads(body)["messages"][0]["content"] for body in asked] == ["2+2? it is 5", "2+2? 4"]
    with pytest.raises(ValueError, match=r"judge\.prompt cannot be applied: .* has no attribute 'content'"):
        judge.check(prompts, "the data")  # whose first row is a text
    judge = Judge(toy_config(model, tmp_path, reward={"server": server}), tokenizer, World())
    with pytest.raises(ValueError, match=r"judge\.prompt cannot be applied: .* has no attribute 'content'"):
        judge.check(chats, "the data")


def test_special_tokens_are_kept_where_asked(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    prompts = Prompts(["a"], [tokenizer.encode("a")], {"pattern": ["^<answer>8</answer>$"]})
    cases = [("<answer>8</answer><eos>", "stop"), ("<answer>8</answer>", "stop"), ("<answer>8</answer><eos>", "length")]
    for keeps, stop, expected in ((True, "</answer>", [1, 1, 0]), (True, "x", [1, 0, 0]), (False, "x", [0, 0, 0])):
        changes = {"reward__keep_special_tokens": keeps, "rollout__stop": (stop,)}
        config = toy_config(model, tmp_path, reward__function="rlft_fast.rewards:regex_match", **changes)
        own = [(tokenizer.encode(text), how) for text, how in cases]
        completions = [(0, Completion(ids, [0.0] * len(ids), how)) for ids, how in own]
        assert Judge(config, tokenizer, World()).score(prompts, to_samples(completions)).reward_B.tolist() == expected


def test_replies_of_an_episode_are_read_apart(model, tmp_path):
    """After a 5 that was too low, a 7 is no 57. The ends of replies are no part of the text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(["a"] * 2, [tokenizer.encode("a")] * 2, {"answer": [7, 7]})
    five, words, seven = (tokenizer.encode(text) for text in ("5<eos>", "too low", "7<eos>"))
    ids = [*five, *words, *seven]
    mask = [True] * len(five) + [False] * len(words) + [True] * len(seven)
    whole = Completion(ids, [0.0] * len(ids), "stop", mask=mask)
    cut = Completion(ids[:-1], [0.0] * len(ids[:-1]), "length", mask=mask[:-1])
    for keeps in (False, True):
        changes = {"reward__function": "rlft_fast.rewards:last_number", "reward__keep_special_tokens": keeps}
        judge = Judge(toy_config(model, tmp_path, **changes), tokenizer, World())
        samples = judge.score(prompts, to_samples([(0, whole), (1, cut)]))
        assert samples.texts == ["5\n7"] * 2
        assert samples.reward_B.tolist() == [1.0, 1.0]


def test_a_reward_model_reads_what_its_template_has_behind_the_end_of_an_answer(model, reward_model, tmp_path):
    """Its last token is a line break, as behind the end token of Qwen. An answer that was cut off has neither."""
    tokenizer = with_template(model, TEMPLATE.replace("<eos>", "<eos>\n"))
    user = {"role": "user", "content": "2+2?"}
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": [user]}, {"prompt": [user]}])
    prompts = load_prompts(DataConfig(path=str(path)), tokenizer, 64)
    answers = [tokenizer.encode(text) for text in ("4<eos>", "4")]
    chat = [user, {"role": "assistant", "content": "4"}]
    whole = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert whole == [*prompts.token_ids[0], *answers[0], *tokenizer.encode("\n")]
    scores = scorer_of(reward_model, tokenizer, 64).score(prompts, answers, ["4", "4"])
    read = [whole, [*prompts.token_ids[1], *answers[1]]]
    assert scores.tolist() == pytest.approx(scores_of_transformers(reward_model, read), abs=1e-5)


# Each of these read the policy's markup: another template, one token more, and both.
@pytest.mark.parametrize(("template", "turn"), [(OTHER.replace("<turn>", ""), False), (TEMPLATE, True), (OTHER, True)])
def test_a_reward_model_of_its_own_kind_scores_conversations_as_transformers_does(
    template, turn, conversations, reward_model, tmp_path
):
    policy, prompts, answers = conversations
    folder = shutil.copytree(reward_model, tmp_path / "reward")
    own = with_template(folder, template, turn)
    own.save_pretrained(folder)
    ids = [policy.encode(answer) for answer in answers]
    scores = scorer_of(folder, policy, 128).score(prompts, ids, answers)
    text = own.encode("hi!")
    assert (text[0] == own.bos_token_id) == turn
    options = {"tokenize": True, "return_dict": False}
    chats = [own.apply_chat_template(messages, **options) for messages in asked_and_answered(prompts, answers)]
    assert scores.tolist() == pytest.approx(scores_of_transformers(folder, [text, *chats]), abs=1e-5)


def test_a_reward_model_of_its_own_kind_reads_all_messages_of_an_episode(model, reward_model, tmp_path):
    """Its template knows no tools. It read the replies as one answer, without what the environment had said."""
    policy, folder = with_template(model, TEMPLATE), shutil.copytree(reward_model, tmp_path / "reward")
    own = with_template(folder, OTHER, turn=True)
    own.save_pretrained(folder)
    asked = Conversation([{"role": "user", "content": "5+3?"}])
    prompts = Prompts(["5+3?"] * 2, [policy.encode("5+3?")] * 2, {}, conversations={0: asked, 1: asked})
    replies = [policy.encode(text) for text in ("add 3", "It is 8", "8")]
    ids = [*replies[0], *b"???", *replies[1]]
    mask = [True] * len(replies[0]) + [False] * 3 + [True] * len(replies[1])
    first = Completion(ids, [0.0] * len(ids), "stop", mask=mask)
    second = Completion(replies[2], [0.0] * len(replies[2]), "stop")
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}]
    said = {"role": "assistant", "content": ""}
    result = {"role": "tool", "name": "add", "content": "8"}
    whole = [{"content": " Go."}, said | {"tool_calls": calls}, result, {"role": "user", "content": "So?"}, said]
    config = toy_config(model, tmp_path, reward={"model": str(folder)}, actor__max_tokens=256)
    judge = Judge(config, policy, World())
    judge.use_models({"reward": role_engine(config, "reward", World())})
    samples = judge.score(prompts, to_samples([(0, first), (1, second)]).replace(messages=[whole, [said]]))
    answered = "<tool_response>\n8\n</tool_response>\n\nSo?"
    chats = [say("5+3? Go.", "add 3", answered, "It is 8"), say("5+3?", "8")]
    read = [own.apply_chat_template(chat, tokenize=True, return_dict=False) for chat in chats]
    assert samples.parts["model"].tolist() == pytest.approx(scores_of_transformers(folder, read), abs=1e-5)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"reads conversations in its own chat template, but has none: put the template"),
        ("{{ raise_exception('no system') }}", r"cannot be applied to row 1 \(counted from 0\) of the data: no system"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", r"row 1 .* of the data: it drops the answer"),
    ],
)
def test_a_conversation_that_the_reward_model_cannot_read_is_refused(
    template, message, conversations, reward_model, tmp_path
):
    policy, prompts, _ = conversations
    folder = shutil.copytree(reward_model, tmp_path / "reward")
    with_template(folder, template, turn=True).save_pretrained(folder)
    reader = RewardModelReader(str(folder), policy)
    reader.check(prompts.select([0]), "the data")
    with pytest.raises(ValueError, match=message):
        reader.check(prompts, "the data")


def test_a_text_that_the_reward_model_has_no_room_for_is_left_out(model, reward_model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(["ab"], [tokenizer.encode("ab")], {}).select([0, 0, 0])
    room = 8 - len(prompts.token_ids[0]) - 1  # the last token is the one that asks
    answers = [[65] * length for length in (room + 1, room, 1)]
    texts = tokenizer.batch_decode(answers)
    small, large = (scorer_of(reward_model, tokenizer, cap) for cap in (8, 64))
    expected = large.score(prompts, answers, texts)
    with pytest.warns(UserWarning, match="more than 7 tokens .* raise actor.max_tokens"):
        scores = small.score(prompts, answers, texts)
    with pytest.warns(UserWarning, match="more than 7 tokens"):
        assert small.score(prompts.select([0]), answers[:1], texts[:1]).isnan().tolist() == [True]
    assert scores.tolist() == pytest.approx([torch.nan, *expected[1:].tolist()], abs=1e-5, nan_ok=True)
    assert len(small.score(prompts.select([]), [], [])) == 0


def test_a_text_that_the_reward_model_has_no_positions_for_is_left_out(model, reward_model, tmp_path):
    folder, tokenizer = shutil.copytree(reward_model, tmp_path / "reward"), AutoTokenizer.from_pretrained(model)
    sizes = {"vocab_size": VOCAB_SIZE, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "num_labels": 1}
    GPT2ForSequenceClassification(GPT2Config(**sizes, pad_token_id=PAD_TOKEN_ID)).save_pretrained(folder)
    prompts = Prompts(["ab"], [tokenizer.encode("ab")], {}).select([0, 0])
    answers = [[65] * (8 - len(prompts.token_ids[0]) - i) for i in range(2)]
    with pytest.warns(UserWarning, match="more than 7 tokens .* its positions end there"):
        scores = scorer_of(folder, tokenizer, 64).score(prompts, answers, tokenizer.batch_decode(answers))
    (expected,) = scores_of_transformers(folder, [[*prompts.token_ids[1], *answers[1]]])
    assert scores.tolist() == pytest.approx([torch.nan, expected], abs=1e-5, nan_ok=True)


def test_left_out_by_the_reward_model_is_left_out(model, reward_model, tmp_path):
    """Bytes that are no text become a character of three, and another vocabulary makes three tokens of it."""
    folder = shutil.copytree(reward_model, tmp_path / "reward")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(folder)
    reward = {"model": str(folder), "function": f"{HERE}:even_share"}
    with pytest.warns(UserWarning, match="more than 14 tokens"):
        rows = samples_of(model, tmp_path, actor__max_tokens=15, reward=reward)
    assert all((row["reward"] is None) == (row["parts"]["model"] is None) for row in rows)
    assert 0 < sum(row["reward"] is None for row in rows) < len(rows)


def test_the_models_score_is_the_reward_where_no_function_judges(model, reward_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(["sun", "sea"], [tokenizer.encode("sun"), tokenizer.encode("sea")], {})
    reward = {"model": str(reward_model), "function": f"{HERE}:not_for_sun"}
    config = toy_config(model, tmp_path, reward=reward)
    judge = Judge(config, tokenizer, World())
    judge.use_models({"reward": role_engine(config, "reward", World())})
    samples = judge.score(prompts, to_samples([(row, Completion([65, 66], [0.0] * 2, "length")) for row in (0, 1)]))
    own, score = samples.parts.values()
    assert own.isnan().tolist() == [True, False]
    assert samples.reward_B.tolist() == [score[0].item(), (own + score)[1].item()]


def test_a_reward_model_alone(tiny_model, reward_model, tmp_path):
    changes = {"steps": 12, "rollout__samples_per_prompt": 8, "reward": {"model": str(reward_model)}}
    config = toy_config(tiny_model("llama"), tmp_path, **changes)
    train(config)
    rewards = [row["reward_mean"] for row in comparable(tmp_path / "run")]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3])


def test_evaluation_by_another_function_than_the_reward(model, reward_model, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "fog", "answer": 3}, {"prompt": "ice", "answer": 3}])
    evaluation = {"path": str(held_out), "max_new_tokens": 6}
    accuracy = {}
    for name, reward, function in (
        ("by reward", {"function": f"{HERE}:even_share"}, None),
        ("by function", {"model": str(reward_model), "truncation_penalty": 0.5}, f"{HERE}:even_share"),
        ("by model", {"model": str(reward_model)}, None),
        ("in a worker", {"model": str(reward_model), "timeout_s": 60, "workers": 1}, f"{MISBEHAVING}:even_share"),
    ):
        changes = {"reward": reward, "evaluation": evaluation | {"function": function}}
        accuracy[name] = train(toy_config(model, tmp_path / name, steps=1, **changes))["accuracy_before"]
        rows = read_lines(tmp_path / name / "run" / "samples.jsonl")
        assert ("model" in reward) == any(row["reward"] < 0 for row in rows)  # what is learned from stays the reward
    assert accuracy["by function"] == accuracy["by reward"] != accuracy["by model"]
    assert accuracy["in a worker"] == accuracy["by function"]
    assert not multiprocessing.active_children()  # the worker has ended with its run


def on_two_processes(rank: int, *folders: Path) -> None:
    for folder in folders:
        train(Config.load(folder / "config.yaml"))


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes(model, reward_model, tmp_path):
    """Greedy baselines, a reward model and worker processes; refills, of which both processes need the same number.

    Of the one held-out prompt the second process has none.
    """
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "lake", "answer": 3}])
    weights = {f"{MISBEHAVING}:even_share": 2.0, f"{MISBEHAVING}:count_tokens": -0.5}
    runs = {
        "remax": {
            "reward": {"function": weights, "model": str(reward_model), "timeout_s": 60, "workers": 1},
            "algorithm": {"advantage": "remax", "kl_coef": 0.01, "kl_in": "reward"},
        },
        "refills": {
            "reward__function": f"{HERE}:even_share_of_some",
            "algorithm": {"skip_equal_groups": True, "max_refills": 2, "rollout_correction": "sequence-mask"},
            "evaluation": {"path": str(held_out), "max_new_tokens": 6},
        },
    }
    for name, changes in runs.items():
        values = toy_values(model, tmp_path / name, steps=2, **changes)
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(values))
    run_distributed(on_two_processes, 2, *(tmp_path / name for name in runs))

    samples = read_lines(tmp_path / "remax" / "run" / "samples.jsonl")
    assert len(samples) == 2 * 16
    for row in samples:
        even, length, score = (row["parts"][name] for name in (*weights, "model"))
        assert row["reward"] == pytest.approx(2.0 * even - 0.5 * length + score)
    for name in runs:
        rows = [row for row in comparable(tmp_path / name / "run") if "grad_norm" in row]
        assert [row["step"] for row in rows] == [1, 2]
        assert all(row["grad_norm"] > 0 and row["mismatch_max"] < 1e-4 for row in rows)
        assert rows[0]["ratio_max"] == 1.0
    evaluations = [row for row in comparable(tmp_path / "refills" / "run") if "accuracy" in row]
    assert [row["step"] for row in evaluations] == [0, 2]
