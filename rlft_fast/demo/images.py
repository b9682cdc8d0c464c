"""The demo of images: a small vision-language model made here learns to tell colours and shapes.

All its weights are random at first. A warm-up by supervised fine-tuning on texts teaches it which words answer which
question, and shows it no picture: it guesses then. GRPO alone teaches it to look.
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from rlft_fast.config import Config, SFTConfig
from rlft_fast.demo.folder import DATA, claim_folders, write_rows
from rlft_fast.errors import printable

_STEPS = 100
_WARM_UP_STEPS = 30
_NUM_PICTURES = 2000
_NUM_HELD_OUT = 256
_NUM_TEXTS = 1024
_SIDE, _CELL = 24, 8  # pixels of a picture, and of a cell, which is a patch for the vision tower
_COLOURS = {
    "red": (230, 50, 40), "green": (40, 180, 70), "blue": (50, 80, 230), "yellow": (240, 220, 50),
    "purple": (150, 50, 180), "white": (245, 245, 245),
}  # fmt: skip
_SHAPES = ("square", "cross", "ring")
_QUESTIONS = {"which colour ?": (*_COLOURS,), "which shape ?": _SHAPES}
_MOST_THINGS = 4
_SPREAD = 0.1  # standard deviation of the random weights: with the usual 0.02 pictures hardly change an answer
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} : {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image> {% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% if message.role == 'assistant' %} <end>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


class Picture(NamedTuple):
    """One to four things of one colour and one shape on a grey ground, in some of nine cells."""

    colour: str
    shape: str
    cells: tuple[int, ...]

    @property
    def answers(self) -> dict[str, str]:
        """By question."""
        return dict(zip(_QUESTIONS, (self.colour, self.shape), strict=True))

    def save(self, path: Path, ground: int) -> None:
        """Writes the picture as a file. The grey of the ground is from 0 to 255."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (_SIDE, _SIDE), (ground,) * 3)
        draw, colour = ImageDraw.Draw(image), _COLOURS[self.colour]
        for cell in self.cells:
            x, y = (_CELL * place + 1 for place in divmod(cell, _SIDE // _CELL))
            if self.shape == "square":
                draw.rectangle((x, y, x + 5, y + 5), fill=colour)
            elif self.shape == "ring":
                draw.rectangle((x, y, x + 5, y + 5), outline=colour)
            else:
                draw.line((x, y, x + 5, y + 5), fill=colour)
                draw.line((x, y + 5, x + 5, y), fill=colour)
        image.save(path)


def learn_images(seed: int = 0, output_dir: str | Path = "runs/demo-images", steps: int = _STEPS) -> dict[str, Any]:
    """Runs the demo, and returns the contents of the second run's ``summary.json``.

    Args:
        seed: seed of the random weights, sampling and data order. The held-out pictures are the same for every seed.
        output_dir: folder for everything the demo writes: the model, and the runs ``warm_up`` and ``learn``.
        steps: number of steps of reinforcement learning.

    Raises:
        ValueError: Pillow is not installed, a folder holds something other than a run of the demo, or `steps` is less
            than 1.
    """
    from rlft_fast.trainer import train
    from rlft_fast.view import write_view

    output = Path(output_dir)
    first, warm_up, run = (output / name for name in ("model", "warm_up", "learn"))
    claim_folders(first, warm_up, run)
    data = write_pictures(run / DATA, warm_up / DATA)
    model = write_model(first, seed)
    train(warm_up_config(model, warm_up, data["texts"], seed))
    summary = train(images_config(warm_up / "hf", run, data["train"], data["held_out"], seed, steps))
    write_view([run], run / "view.html")
    print(printable(f"the model is in {run / 'hf'}, and {run / 'view.html'} shows its pictures and answers"))
    return summary


def warm_up_config(model: Path, output: Path, texts: Path, seed: int) -> SFTConfig:
    """Configuration of the warm-up, a run of ``rlft-fast sft``."""
    return SFTConfig.parse(
        {
            "objective": "sft",
            "model": str(model),
            "output_dir": str(output),
            "steps": _WARM_UP_STEPS,
            "seed": seed,
            "batch_size": 64,
            "data": {"path": str(texts), "max_sequence_tokens": 32},
            "actor": {"max_tokens": 4096, "optimizer": {"learning_rate": 2e-3, "schedule": "cosine"}},
            "checkpoint": {"every": 0, "max_num": 1},
        }
    )


def images_config(model: Path, output: Path, train: Path, held_out: Path, seed: int, steps: int = _STEPS) -> Config:
    """Configuration of the reinforcement learning, a run of ``rlft-fast train``."""
    return Config.parse(
        {
            "model": str(model),
            "output_dir": str(output),
            "steps": steps,
            "seed": seed,
            "data": {"path": str(train)},
            "reward": {"function": "rlft_fast.rewards:exact_match"},
            "rollout": {
                "prompts_per_step": 64,
                "samples_per_prompt": 8,
                "max_prompt_tokens": 32,
                "max_new_tokens": 2,
                "batch_size": 512,
            },
            "algorithm": {"skip_equal_groups": True, "mini_batches": 2, "clip_high": 0.28, "entropy_coef": 0.05},
            "actor": {"max_tokens": 8192, "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10}},
            "evaluation": {"path": str(held_out)},
            "checkpoint": {"every": 0, "max_num": 1},
        }
    )


def write_pictures(folder: Path, texts: Path) -> dict[str, Path]:
    """Writes questions about pictures to ``train.jsonl`` and ``held_out.jsonl``, and guesses to ``texts.jsonl``.

    Args:
        folder: of the pictures, and of the questions about them.
        texts: folder of the guesses, conversations without a picture.

    Returns:
        The three paths by name.
    """
    draw = random.Random(0)
    found: dict[Picture, None] = {}
    while len(found) < _NUM_PICTURES + _NUM_HELD_OUT:
        cells = draw.sample(range((_SIDE // _CELL) ** 2), draw.randint(1, _MOST_THINGS))
        found[Picture(draw.choice([*_COLOURS]), draw.choice(_SHAPES), (*sorted(cells),))] = None
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, picture in enumerate(found):
        name = f"pictures/{number}.png"
        picture.save(folder / name, draw.randrange(60, 130))
        rows.append(_row(name, draw.choice([*_QUESTIONS]), picture))
    guesses = [_guess(draw.choice([*_QUESTIONS]), draw) for _ in range(_NUM_TEXTS)]
    return {
        "train": write_rows(folder / "train.jsonl", rows[_NUM_HELD_OUT:]),
        "held_out": write_rows(folder / "held_out.jsonl", rows[:_NUM_HELD_OUT]),
        "texts": write_rows(texts / "texts.jsonl", guesses),
    }


def write_model(folder: Path, seed: int) -> Path:
    """Writes a Qwen2-VL of random weights, whose vocabulary is the words of the questions and the answers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    words = [word for question, answers in _QUESTIONS.items() for word in (*question.split(), *answers)]
    names = ["<end>", "<image>", "<unknown>", "user", "assistant", ":", *dict.fromkeys(words)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(names[:3])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unknown>",
        additional_special_tokens=["<image>"], chat_template=_TEMPLATE,
    )  # fmt: skip
    fast.save_pretrained(folder)
    text = {
        "vocab_size": len(names), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "initializer_range": _SPREAD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {
        "depth": 1, "embed_dim": 64, "num_heads": 4, "hidden_size": 64, "mlp_ratio": 2, "patch_size": _CELL,
        "spatial_merge_size": 1, "temporal_patch_size": 1, "initializer_range": _SPREAD,
    }  # fmt: skip
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=1, video_token_id=len(names), tie_word_embeddings=True
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    reader = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": _CELL, "merge_size": 1,
        "temporal_patch_size": 1, "min_pixels": _SIDE**2, "max_pixels": _SIDE**2,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(reader), encoding="utf-8")
    return folder


def _row(name: str, question: str, picture: Picture) -> dict[str, Any]:
    content = [{"type": "image", "path": name}, {"type": "text", "text": question}]
    return {"prompt": [{"role": "user", "content": content}], "answer": picture.answers[question]}


def _guess(question: str, draw: random.Random) -> dict[str, Any]:
    answer = draw.choice(_QUESTIONS[question])
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
