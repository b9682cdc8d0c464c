"""Runs that learn from pairs: preferences and reward models, their numbers and the pairs that are refused."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlft_fast.cli import main
from rlft_fast.config import DPOConfig, PairDataConfig, RewardDataConfig, RewardModelConfig, SFTConfig
from rlft_fast.rl import PreferenceLoss
from rlft_fast.trainer import RowsTrainer, train
from rlft_fast.trainer.prompts import read_sets
from rlft_fast.trainer.supervised.pairs import load_pairs
from rlft_fast.trainer.supervised.rows import chunks
from tests.support.tiny_models import EOS_TOKEN_ID, PAD_TOKEN_ID, save_tiny_model, save_tokenizer
from tests.trainer.supervised.rows import CHATML, assert_two_learn_what_one_learns, encode, say, sft_values
from tests.trainer.toy import comparable, read_lines, write_rows

REWARD = pytest.param(RewardModelConfig, "llama-reward", marks=pytest.mark.slow)


def pairs(number: int) -> list[dict]:
    """Prompts of different lengths with two answers; the chosen one has capital letters."""
    return [
        {"prompt": "count " * (i % 3 + 1), "chosen": "ABCDEFGH"[: i % 5 + 2], "rejected": "abcdefgh"[: i % 4 + 3]}
        for i in range(number)
    ]


def pair_config(kind, model, folder, **changes):
    data = str(write_rows(folder.parent / "pairs.jsonl", pairs(12)))
    options = {"actor__max_tokens": 128, "data__path": data, "evaluation__path": data} | changes
    return kind.parse(sft_values(model, folder, **options))


def plain_logprob(model, prompt: str, answer: str) -> torch.Tensor:
    """(tokens,) log-probabilities of an answer and the end token, by plain transformers."""
    tokens = encode(prompt) + encode(answer) + [256]
    logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    size = len(answer) + 1
    return logprobs[-size - 1 : -1].gather(1, torch.tensor(tokens[-size:])[:, None])[:, 0]


def norm_of(model) -> float:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(found).item()


# The first step is at Δ = 0, where a hinge has its slope still; the loss of later steps is tested below.
@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({"beta": 0.3}, lambda delta, mean: -logsigmoid(0.3 * delta)),
        ({"label_smoothing": 0.2}, lambda d, m: -0.8 * logsigmoid(0.1 * d) - 0.2 * logsigmoid(-0.1 * d)),
        ({"length_normalized": True, "beta": 2.0}, lambda delta, mean: -logsigmoid(2.0 * mean)),
        ({"kind": "hinge"}, lambda delta, mean: (1 - 0.1 * delta).relu()),
        ({"kind": "ipo"}, lambda delta, mean: (mean - 5) ** 2),
    ],
)
def test_preferences_are_those_of_plain_transformers(options, loss, tiny_model, tmp_path):
    model = tiny_model("llama")
    config = pair_config(
        DPOConfig, model, tmp_path / "run", loss=options, batch_size=12, actor__optimizer={"learning_rate": 0.01}
    )
    trainer = RowsTrainer(config)
    metrics = trainer.train_step(0).metrics
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    total = torch.zeros((), dtype=torch.float64)
    for row in pairs(12):
        chosen, rejected = (plain_logprob(policy, row["prompt"], row[name]) for name in ("chosen", "rejected"))
        chosen, rejected = chosen - chosen.detach(), rejected - rejected.detach()
        total = total + loss(chosen.sum() - rejected.sum(), chosen.mean() - rejected.mean()) / 12
    total.backward()
    assert metrics["train_loss"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm_of(policy), rel=1e-4)
    assert metrics["reward_margin"] == pytest.approx(0, abs=1e-6)  # rounding: a step shares other prefixes


def test_the_loss_of_a_pair_away_from_the_reference():
    fields = {
        "logprob_T": torch.tensor([-1.0, -2.0, -3.0]), "ref_logprob_T": torch.tensor([-1.5, -2.0, -1.0]),
        "sequence_T": torch.tensor([0, 0, 1]), "unit_B": torch.tensor([0, 0]),
        "loss_weight_T": torch.tensor([0.25, 0.25, 0.5]),
    }  # fmt: skip
    delta, mean = 0.5 + 2.0, 0.25 + 2.0
    for kind, expected in (("sigmoid", math.log1p(math.exp(-0.1 * delta))), ("hinge", 0.75), ("ipo", (mean - 5) ** 2)):
        loss = PreferenceLoss(kind=kind)
        assert loss.per_token(fields).sum().item() == pytest.approx(expected, rel=1e-6)
        assert loss.metrics(fields)["pair_accuracy"] == 1
    margin = PreferenceLoss().metrics(fields)["reward_margin"].item()
    assert margin == pytest.approx(0.1 * delta)


@pytest.mark.parametrize("padding", [PAD_TOKEN_ID, EOS_TOKEN_ID])
def test_scores_are_those_of_plain_transformers(padding, tmp_path):
    """Where the end token is padding, too, transformers scores the token before it."""
    model = save_tiny_model("llama-reward", tmp_path / "model", pad_token_id=padding)
    rows = [row | {"margin": 0.5 * (i % 2)} for i, row in enumerate(pairs(12))]
    data = str(write_rows(tmp_path / "margins.jsonl", rows))
    config = pair_config(RewardModelConfig, model, tmp_path / "run", batch_size=12, data__path=data)
    metrics = RowsTrainer(config).train_step(0).metrics
    plain = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    total, right = 0.0, 0
    for row in rows:
        chosen, rejected = (
            plain(torch.tensor([encode(row["prompt"]) + encode(row[name]) + [256]])).logits[0, 0]
            for name in ("chosen", "rejected")
        )
        total = total - logsigmoid(chosen - rejected - row["margin"]) / 12
        right += chosen.item() > rejected.item()
    total.backward()
    assert metrics["train_loss"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm_of(plain), rel=1e-4)
    assert metrics["pair_accuracy"] == pytest.approx(right / 12)


@pytest.mark.parametrize(
    ("kind", "model"), [(SFTConfig, "llama"), (DPOConfig, "llama"), (RewardModelConfig, "llama-reward")]
)
def test_held_out_rows_are_inferred_in_batches(kind, model, tiny_model, tmp_path, monkeypatch):
    """The numbers are means over all tokens or pairs, whatever the batches."""
    long = {"prompt": "a", "chosen": "BDCA" * 8, "rejected": "bdca" * 8}
    rows = [row | {"completion": row["chosen"]} for row in [*[long] * 16, *pairs(33)]]
    data = str(write_rows(tmp_path / "held_out.jsonl", rows))
    found, sizes = [], []
    for cap in (4096, 100):
        options = {"actor__max_tokens": cap, "data__path": data, "evaluation__path": data}
        trainer = RowsTrainer(pair_config(kind, tiny_model(model), tmp_path / str(cap), **options))
        trainer.train_step(0)  # away from the reference
        infer = trainer.models.actor.infer

        def recording(batch, outputs, infer=infer):
            sizes.append(batch.num_tokens)
            return infer(batch, outputs)

        monkeypatch.setattr(trainer.models.actor, "infer", recording)
        found.append(trainer.evaluate().metrics)
    whole, *parts = sizes
    assert sum(parts) == whole
    assert len(parts) > 1
    assert max(parts) <= 8 * 100
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.dist
@pytest.mark.parametrize(("kind", "model"), [(DPOConfig, "llama"), REWARD])
def test_two_processes_learn_what_one_learns(kind, model, tiny_model, tmp_path):
    configs = [
        pair_config(kind, tiny_model(model), tmp_path / name, steps=2, actor__optimizer__eps=1.0)
        for name in ("one", "two")
    ]
    assert_two_learn_what_one_learns(configs, least_movement=1e-5, tolerance=1e-4)


@pytest.mark.parametrize(("kind", "model"), [(DPOConfig, "llama"), REWARD])
def test_a_run_that_is_interrupted_ends_with_the_same_bits(kind, model, tiny_model, tmp_path):
    options = {"checkpoint__best": "held_out_pair_accuracy", "evaluation__every": 1, "batch_size": 4}
    summary = train(pair_config(kind, tiny_model(model), tmp_path / "whole", **options))
    train(pair_config(kind, tiny_model(model), tmp_path / "parts", **options, steps=3))
    train(pair_config(kind, tiny_model(model), tmp_path / "parts", **options), resume=True)
    run, parts = tmp_path / "whole" / "run", tmp_path / "parts" / "run"
    assert comparable(parts) == comparable(run)
    expected, found = (load_file(folder / "hf" / "model.safetensors") for folder in (run, parts))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"]
    assert summary["held_out_pair_accuracy_after"] > summary["held_out_pair_accuracy_before"]
    assert (run / "best" / "model.safetensors").exists()
    assert main(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(expected[name], exported[name]) for name in expected)


def test_the_reference_is_inferred_once_in_batches(tiny_model, tmp_path):
    """By the model before training, also what is missing when the run continues."""
    model = tiny_model("llama")
    data = write_rows(tmp_path / "more.jsonl", pairs(30))
    options = {"data__path": str(data), "actor__max_tokens": 60, "evaluation": None, "batch_size": 30}
    options["data__max_sequence_tokens"] = 30
    config = pair_config(DPOConfig, model, tmp_path / "run", **options, steps=1)
    rows = RowsTrainer(config).data.rows
    assert len([*chunks(range(30), rows.num_tokens, 8 * 60)]) > 1
    train(config)
    (path,) = (tmp_path / "run" / "run" / "reference").iterdir()
    kept = np.load(path)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    expected = [plain_logprob(policy, row["prompt"], row[x]) for row in pairs(30) for x in ("chosen", "rejected")]
    taught = np.concatenate([x[1:] for x in rows.sequences.is_taught])
    np.testing.assert_allclose(kept[taught], torch.cat(expected).detach(), atol=1e-5)
    changed = kept.copy()
    changed[len(kept) // 2 :] = np.nan  # as if it had been killed
    changed[taught.argmax()] = -5.0
    np.save(path, changed)
    train(pair_config(DPOConfig, model, tmp_path / "run", **options, steps=2), resume=True)
    again = np.load(path)
    assert again[taught.argmax()] == -5.0
    again[taught.argmax()] = kept[taught.argmax()]
    np.testing.assert_allclose(again, kept, atol=1e-5)  # batches of other shapes
    np.save(path, kept[1:])
    with pytest.raises(ValueError, match=r"training-.*\.npy is not of these pairs: delete it"):
        train(pair_config(DPOConfig, model, tmp_path / "run", **options, steps=3), resume=True)


def test_a_run_that_goes_on_with_smaller_batches_has_the_reference_of_its_rows(tiny_model, tmp_path):
    """By the model before training, from the row on where the larger batches ended."""
    model, rows = tiny_model("llama"), pairs(30)
    options = {"data__path": str(write_rows(tmp_path / "more.jsonl", rows)), "evaluation": None}
    train(pair_config(DPOConfig, model, tmp_path / "run", **options, steps=2, batch_size=8))
    config = pair_config(DPOConfig, model, tmp_path / "run", **options, steps=6, batch_size=2)
    train(config, resume=True, force=True)
    (path,) = (tmp_path / "run" / "run" / "reference").iterdir()
    data = RowsTrainer(config).data
    is_taught = [x[1:] for x in data.rows.sequences.is_taught]
    kept = np.split(np.load(path), np.cumsum([*map(len, is_taught)])[:-1])
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    for i in data.stream.rows(2 * 8, 4 * 2, config.seed):
        for j, name in ((2 * i, "chosen"), (2 * i + 1, "rejected")):
            expected = plain_logprob(policy, rows[i]["prompt"], rows[i][name])
            np.testing.assert_allclose(kept[j][is_taught[j]], expected.detach(), atol=1e-5)
    lines = read_lines(tmp_path / "run" / "run" / "metrics.jsonl")
    assert [line["skipped_steps"] for line in lines] == [0] * 6


def test_a_prompt_that_conversations_have_in_them_is_asked_once(tmp_path):
    """As in UltraFeedback. What both say after it is no answer, as without a prompt."""
    save_tokenizer(tmp_path / "model")
    template = CHATML.replace("<|im_end|>", "<eos>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", chat_template=template)
    whole = {"chosen": say("a?", "b"), "rejected": say("a?", "c")}
    short = {"prompt": "a?", "chosen": say("a?", "b")[1:], "rejected": "c"}
    parts = [{"role": "user", "content": [{"type": "text", "text": "a?"}]}]
    rows = [whole, short, *({"prompt": prompt, **whole} for prompt in ("a?", "\na? ", say("a?")))]
    rows += [{"prompt": "a?", "chosen": whole["chosen"], "rejected": "c"}]
    rows += [{"prompt": "a?", "chosen": [*parts, *say("", "b")[1:]], "rejected": [*parts, *say("", "c")[1:]]}]
    rows += [{"prompt": "x", "chosen": say("x", "y", "a?", "b"), "rejected": say("x", "y", "a?", "c")}]
    config = PairDataConfig(path=str(write_rows(tmp_path / "rows.jsonl", rows)), max_sequence_tokens=256)
    found = load_pairs(config, tokenizer, "the model", read_sets(config), scored=False).sequences
    shown = [
        (tokenizer.decode(ids), tokenizer.decode(ids[taught]))
        for ids, taught in zip(found.token_ids, found.is_taught, strict=True)
    ]
    before = "<|im_start|>user\na?<eos>\n<|im_start|>assistant\n"
    longer = f"{before.replace('a?', 'x')}y<eos>\n{before}"
    pair = [(f"{before}{word}<eos>\n", f"{word}<eos>") for word in "bc"]
    assert shown == pair * 7 + [(f"{longer}{word}<eos>\n", f"{word}<eos>") for word in "bc"]


def test_a_conversation_is_scored_at_the_last_token_of_its_template(tmp_path):
    """As by transformers; of one that was cut off, at the last token of an answer."""
    model = save_tiny_model("llama-reward", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model, chat_template=CHATML.replace("<|im_end|>", "<eos>"))
    row = {"chosen": say("a?", "b"), "rejected": say("a?", "c", "d?", "e")}
    path = str(write_rows(tmp_path / "rows.jsonl", [row]))
    whole = [tokenizer.apply_chat_template(row[name], tokenize=True, return_dict=False) for name in row]
    for most, expected in ((256, whole), (len(whole[1]) - 20, [whole[0], whole[1][: len(whole[0]) - 1]])):
        config = PairDataConfig(path=path, max_sequence_tokens=most, overlong="truncate")
        found = load_pairs(config, tokenizer, str(model), read_sets(config), scored=True).sequences
        assert [ids[:-1].tolist() for ids in found.token_ids] == expected
        assert [taught.nonzero()[0].tolist() for taught in found.is_taught] == [[len(ids)] for ids in expected]


def test_margins_of_csv(tiny_model, tmp_path):
    """Every value of such a file is a text."""
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected,margin\na,b,c,0.5\na,b,d,\na,b,e,-2\n")
    config = RewardDataConfig(path=str(tmp_path / "rows.csv"), chat=False, max_sequence_tokens=8)
    model = tiny_model("llama-reward")
    found = load_pairs(config, AutoTokenizer.from_pretrained(model), str(model), read_sets(config), scored=True)
    assert found.margin.tolist() == [0.5, 0.0, -2.0]


@pytest.mark.parametrize("scored", [False, True])
def test_sequences_of_a_pair_that_is_left_out_are_not_counted(scored, tiny_model, tmp_path):
    rows = [
        {"prompt": "a", "chosen": "bbbbbbbbb", "rejected": "c"},
        {"prompt": "a", "chosen": "bbbbbbbbb", "rejected": "bbbbbbbbc"},  # cut, they are equal
    ]
    path, model = str(write_rows(tmp_path / "rows.jsonl", rows)), tiny_model("llama-reward")
    config = PairDataConfig(path=path, chat=False, overlong="truncate", max_sequence_tokens=8)
    found = load_pairs(config, AutoTokenizer.from_pretrained(model), str(model), read_sets(config), scored=scored)
    assert [left.row for left in found.left_out] == [1]
    assert found.overlong == (1, 1)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            r"it has no 'chosen' or no 'rejected'; its columns are \['chosen', 'prompt'\]",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "its two answers are equal: there is nothing to prefer"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "its text becomes no token"),
        ({"chosen": "ab", "rejected": "ac"}, "it has no 'prompt', which texts need"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "d"}, "its margin must be a number, got 'd'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": math.nan}, "its margin must be a number, got nan"),
        ({"chosen": say("a"), "rejected": say("b")}, "the assistant says nothing"),
        (
            {"prompt": "z", "chosen": say("a", "b"), "rejected": say("a", "c")},
            "its prompt 'z' is not in the conversation that answers it",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "images": ["0.png"]},
            "it has something in its column 'images'",
        ),
    ],
)
def test_a_pair_that_cannot_be_learned_is_named(row, problem, tiny_model, tmp_path):
    data = str(write_rows(tmp_path / "bad.jsonl", [*pairs(1), row]))
    config = pair_config(RewardModelConfig, tiny_model("llama-reward"), tmp_path / "run", data__path=data)
    with pytest.raises(
        ValueError, match=rf"bad\.jsonl: rows 1 \(counted from 0\) cannot be learned: row 1: .*{problem}"
    ):
        RowsTrainer(config)


def test_a_language_model_is_no_reward_model(tiny_model, tmp_path, capsys):
    config = pair_config(RewardModelConfig, tiny_model("llama"), tmp_path / "run")
    (tmp_path / "reward.yaml").write_text(config.to_yaml())
    assert main(["reward", str(tmp_path / "reward.yaml"), "--dry-run"]) == 1
    assert "a reward model must be ...ForSequenceClassification with num_labels = 1" in capsys.readouterr().err


@pytest.mark.peers
@pytest.mark.parametrize("options", [{}, {"kind": "hinge"}, {"kind": "ipo"}, {"length_normalized": True}])
def test_the_first_step_is_that_of_trls_dpo(options, tiny_model, tmp_path):
    from trl import DPOConfig as TRLConfig
    from trl import DPOTrainer

    config = pair_config(DPOConfig, tiny_model("llama"), tmp_path / "run", loss=options, batch_size=12)
    metrics = RowsTrainer(config).train_step(0).metrics
    kind = "sigmoid_norm" if options.get("length_normalized") else options.get("kind", "sigmoid")
    logged = first_step(DPOTrainer, TRLConfig, AutoModelForCausalLM, config, tmp_path, loss_type=[kind])
    assert metrics["train_loss"] == pytest.approx(logged["loss"], rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-4)


@pytest.mark.peers
def test_the_first_step_is_that_of_trls_reward_model(tiny_model, tmp_path):
    from trl import RewardConfig, RewardTrainer

    config = pair_config(RewardModelConfig, tiny_model("llama-reward"), tmp_path / "run", batch_size=12)
    metrics = RowsTrainer(config).train_step(0).metrics
    logged = first_step(RewardTrainer, RewardConfig, AutoModelForSequenceClassification, config, tmp_path)
    assert metrics["train_loss"] == pytest.approx(logged["loss"], rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-4)


def first_step(trainer_class, config_class, model_class, config, folder, **options):
    from datasets import Dataset

    args = config_class(
        output_dir=str(folder / "trl"), max_steps=1, per_device_train_batch_size=12, logging_steps=1, report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None, disable_dropout=True, **options,
    )  # fmt: skip
    model = model_class.from_pretrained(config.model, dtype=torch.float32)
    trainer = trainer_class(model, args=args, train_dataset=Dataset.from_list(pairs(12)))
    trainer.train()
    return trainer.state.log_history[0]
