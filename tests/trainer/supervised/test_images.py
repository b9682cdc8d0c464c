"""Conversations with images, which are learned from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlft_fast.config import PairDataConfig, SFTDataConfig
from rlft_fast.models import load_tokenizer
from rlft_fast.trainer import train
from rlft_fast.trainer.prompts import ImageReader, read_sets
from rlft_fast.trainer.supervised import TaughtRows, load_pairs, load_rows
from tests.engine.reference import plain_logprob_and_entropy
from tests.support.pictures import asking, picture, picture_processor, plain_processor
from tests.support.tiny_models import save_tiny_model
from tests.trainer.supervised.rows import sft_config
from tests.trainer.toy import read_lines, write_rows

PLACEHOLDERS = {"gemma3-vision": "<start_of_image>"}


def template(name: str) -> str:
    """As that of the tiny models, with an end behind the assistant's words."""
    shown = PLACEHOLDERS.get(name, "[<|image_pad|>]")
    return (
        "{% for m in messages %}{{ m.role[0] }}:{% for p in m.content %}{% if p.type == 'image' %}" + shown
        + "{% else %}{{ p.text }}{% endif %}{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )  # fmt: skip


def with_template(model: Path, name: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = template(name)
    return tokenizer


def answer(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def load(tmp_path, model: Path, rows: list[dict[str, Any]], name: str = "qwen2-vl", **options) -> TaughtRows:
    for number, size in enumerate([(32, 8), (9, 11)]):
        picture(number, *size).save(tmp_path / f"{number}.png")
    path = write_rows(tmp_path / "data.jsonl", rows)
    config = SFTDataConfig(path=str(path), **{"max_sequence_tokens": 800} | options)
    tokenizer = with_template(model, name)
    return load_rows(config, tokenizer, str(model), read_sets(config), ImageReader.of_model(str(model), tokenizer))


@pytest.mark.parametrize("name", ["qwen2-vl", "idefics3", "gemma3-vision"])
def test_tokens_are_the_processors_and_the_assistants_alone_are_taught(tmp_path, tiny_model, name):
    """Two turns with an image each, in messages and as a prompt with its completion; and an image in a column."""
    first, second = asking({"path": "0.png"}, "what?"), asking("or ", {"path": "1.png"}, "?")
    messages = [*first, *answer("a cat"), *second, *answer("no")]
    rows = [
        {"messages": messages},
        {"prompt": messages[:-1], "completion": "no"},
        {"prompt": asking({}, "what?"), "completion": answer("no"), "image": "1.png"},
    ]
    model = tiny_model(name)
    found = load(tmp_path, model, rows, name)
    processor = plain_processor(model) if name == "qwen2-vl" else picture_processor(name, model)
    shown, pictures = PLACEHOLDERS.get(name, "[<|image_pad|>]"), [picture(0, 32, 8), picture(1, 9, 11)]
    whole = f"u:{shown}what?a:a cat<eos>u:or {shown}?a:no<eos>"
    short = f"u:{shown}what?a:no<eos>"
    for i, (text, own) in enumerate([(whole, pictures), (whole, pictures), (short, pictures[1:])]):
        expected = processor(images=own, text=[text], return_tensors="pt")
        assert found.token_ids[i].tolist() == expected["input_ids"][0].tolist()
        pixels = found.images[i].load().inputs["pixel_values"]
        assert torch.equal(pixels, expected["pixel_values"].view(pixels.shape))
    tokenizer = AutoTokenizer.from_pretrained(model)
    taught = [tokenizer.decode(ids[own]) for ids, own in zip(found.token_ids, found.is_taught, strict=True)]
    assert taught == ["a cat<eos>no<eos>", "no<eos>", "no<eos>"]


def test_other_images_are_other_data(tmp_path, tiny_model):
    row = {"messages": [*asking({"path": "0.png"}, "what?"), *answer("a cat")]}
    first = load(tmp_path, tiny_model("llava"), [row], "llava").description
    row["messages"][0]["content"][0]["path"] = "1.png"  # of as many tokens
    assert load(tmp_path, tiny_model("llava"), [row], "llava").description != first


def test_a_run_learns_from_images(tmp_path):
    """Its first loss, and its loss on held-out rows before, are those of transformers in float64."""
    model = save_tiny_model("qwen2-vl", tmp_path / "model")
    with_template(model, "qwen2-vl").save_pretrained(model)
    image = {"path": "0.png"}
    rows = [
        {"messages": [*asking(image, "what?"), *answer("a cat")]},
        {"messages": [*asking("what?"), *answer("who knows")]},
        {"messages": [*asking({"path": "1.png"}, "or", image, "?"), *answer("no")]},
    ]
    loaded = load(tmp_path, model, rows)
    batch = loaded.batch([0, 1, 2])
    logprob, _ = plain_logprob_and_entropy(model, batch)
    expected = -logprob.sum() / batch.loss_mask_T.sum()
    changes = {"data__chat": True, "data__max_sequence_tokens": 400, "actor__max_tokens": 400, "steps": 2}
    changes |= {"data__path": str(tmp_path / "data.jsonl"), "batch_size": 3}
    changes |= {"evaluation": {"path": str(tmp_path / "data.jsonl"), "every": 2}}
    config = sft_config(model, tmp_path / "out", **changes)
    train(config)
    lines = read_lines(Path(config.output_dir) / "metrics.jsonl")
    losses = [line["train_loss"] for line in lines if "train_loss" in line]
    assert losses[0] == pytest.approx(float(expected), rel=1e-5)
    assert losses[1] < losses[0]
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert held_out[0] == pytest.approx(float(expected), rel=1e-5)
    picture(5).save(tmp_path / "1.png")
    with pytest.raises(ValueError, match="data"):
        train(sft_config(model, tmp_path / "out", **changes | {"steps": 3}), resume=True)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"messages": [*asking({"path": "2.png"}, "?"), *answer("b")]}, {}, "the image 2.png, which cannot be read"),
        ({"messages": [*asking({}, "?"), *answer("b")]}, {}, 'has a placeholder {"type": "image"} without an image'),
        ({"text": "ab", "image": "0.png"}, {}, "has 1 images more than placeholders"),
        ({"prompt": "a", "completion": "b", "image": "0.png"}, {"chat": False}, "has 1 images more than placeholders"),
        (
            {"messages": [*asking("?"), {"role": "assistant", "content": [{"type": "image", "path": "0.png"}]}]}, {},
            "the assistant shows an image, which no model learns to say",
        ),
        (
            {"messages": [*asking({"path": "0.png"}, "?"), *answer("b")]},
            {"max_sequence_tokens": 20, "overlong": "truncate"}, "all rows are overlong",
        ),
    ],
)  # fmt: skip
def test_an_error_names_the_row(tmp_path, tiny_model, row, options, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, tiny_model("qwen2-vl"), [row], **options)


def test_models_and_objectives_without_images(tmp_path, tiny_model):
    asked, refused = asking({"path": "0.png"}, "?"), r"row 0: its messages have 'image': images reach models that learn"
    with pytest.raises(ValueError, match=refused):
        load(tmp_path, tiny_model("llama"), [{"messages": [*asked, *answer("b")]}])
    path = write_rows(tmp_path / "pairs.jsonl", [{"prompt": asked, "chosen": answer("b"), "rejected": answer("c")}])
    config, model = PairDataConfig(path=str(path)), tiny_model("qwen2-vl")
    with pytest.raises(ValueError, match=refused):
        load_pairs(config, with_template(model, "qwen2-vl"), str(model), read_sets(config), scored=False)
