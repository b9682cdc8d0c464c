"""Episodes with images, of prompts and of environments."""

import pytest
import torch

from rlft_fast.config import DataConfig, EnvironmentConfig
from rlft_fast.models import load_tokenizer
from rlft_fast.rollout import Rollout, SamplingParams
from rlft_fast.trainer.episodes import EpisodePlayer
from rlft_fast.trainer.prompts import ImageReader, load_prompts
from rlft_fast.world import World
from tests.envs.players import painted
from tests.support.pictures import asking, picture, picture_processor, plain_processor
from tests.support.tiny_models import EOS_TOKEN_ID, PICTURE_MODELS
from tests.trainer.episodes.scripted import PLAYERS, Scripted
from tests.trainer.toy import write_rows


@pytest.fixture
def look(tmp_path, tiny_model):
    """Plays one episode per row in the gallery; returns samples, prompts, player and generator."""
    players = []

    def run(rows, replies, name="qwen2-vl", max_turns=3, template=None, history="keep", **options):
        model = tiny_model(name)
        tokenizer = load_tokenizer(model)
        if template is not None:
            tokenizer.chat_template = template(load_tokenizer(tiny_model("qwen2-vl")).chat_template)
        reader = ImageReader.of_model(str(model), tokenizer)
        prompts = load_prompts(
            DataConfig(path=str(write_rows(tmp_path / "rows.jsonl", rows)), chat=True), tokenizer, 4000,
            image_reader=reader,
        )  # fmt: skip
        config = EnvironmentConfig(name=f"{PLAYERS}:Gallery", max_turns=max_turns, history=history, timeout_s=20.0)
        columns = sorted({"prompt", *prompts.columns})
        player = EpisodePlayer({"": config}, {"": columns}, tokenizer, [EOS_TOKEN_ID], reader, **options)
        players.append(player)
        prompts = player.prepare(prompts, 4000)
        left = {row: [*own] for row, own in enumerate(replies)}
        generator = Scripted(lambda request: tokenizer.encode(left[request.row].pop(0) + "<eos>"))
        params = SamplingParams(max_new_tokens=4000)
        world = World.current()
        samples = player.samples(Rollout(lambda: generator, world), world, prompts, params, [[i] for i in left])
        return samples, prompts, player, generator

    yield run
    for player in players:
        player.close()


@pytest.mark.parametrize("name", ["qwen2-vl", *PICTURE_MODELS])
@pytest.mark.thin(7)
def test_tokens_and_pixels_are_those_of_the_whole_conversation(name, look, tiny_model, tmp_path):
    """An image in the prompt, one that the environment begins with, and two answers of which one has two images."""
    picture(1, 32, 8).save(tmp_path / "a.png")
    rows = [{"prompt": asking({"path": "a.png"}, "what?"), "first": True}]
    samples, prompts, player, generator = look(rows, [["two", "no", "Hm"]], name)
    shown = [picture(1, 32, 8), painted(9), painted(3), painted(3), painted(2)]
    image, ask = {"type": "image"}, {"type": "text", "text": "?"}
    talk = [
        {"role": "user", "content": [image, {"type": "text", "text": "what?"}]},
        {"role": "user", "content": [image]},
    ]
    for said, answer in (("two", [image, ask, image]), ("no", [image, ask])):
        talk += [{"role": "assistant", "content": [{"type": "text", "text": f"{said}<eos>"}]}]
        talk += [{"role": "user", "content": answer}]
    text = player.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    processor = plain_processor(tiny_model(name)) if name == "qwen2-vl" else picture_processor(name, tiny_model(name))
    expected = processor(images=shown, text=[text], return_tensors="pt")
    assert generator.seen[-1][0] == expected["input_ids"][0].tolist()
    (images,) = player.images(samples, prompts.load_images())
    assert [len(own) for own in samples.pictures[0]] == [1, 2, 1]
    assert images.keys == generator.images[-1].keys
    assert [own.keys for own in generator.images[:2]] == [images.keys[:2], images.keys[:3]]
    found = [x.squeeze(0) for part in images.parts for x in part.inputs["pixel_values"]]
    wanted = expected["pixel_values"].flatten(0, -1 - found[0].dim())
    # Mistral's processor pads all pictures to one size.
    cut = [y[..., : x.shape[-2], : x.shape[-1]] if x.dim() == 3 else y for x, y in zip(found, wanted, strict=True)]
    assert all(torch.equal(x, y) for x, y in zip(found, cut, strict=True))
    turns = player.turns(samples)[0]
    assert [turn["text"] for turn in turns if turn["sampled"]] == ["two<eos>", "no<eos>", "Hm<eos>"]


def test_an_image_that_cannot_be_used_ends_its_episode(look):
    """Before the run has any harm: no file, too wide, too thin, a tool's; and behind an image token of the policy's."""
    said = ["path", "wide", "thin", "tool", "x<|image_pad|>", "spoken"]
    with pytest.warns(UserWarning, match="5 of 6 episodes have no reward, .*its answer has an image that is none"):
        samples, _, player, generator = look([{"prompt": "a"}] * 6, [[word, "b"] for word in said], max_turns=2)
    assert samples.counts["stop_image"].tolist() == [1.0] * 5 + [0.0]
    assert samples.counts["environment_failed"].tolist() == [1.0] * 5 + [0.0]
    assert samples.counts["stop_max_turns"].tolist() == [0.0] * 5 + [1.0]
    assert samples.pictures[:5] == [[]] * 5
    assert "< |image_pad|>?" in player.tokenizer.decode(generator.seen[-1][0])


def numbered(template: str) -> str:
    """Counts the images of a conversation."""
    counted = template.replace(
        "{% if p.type == 'image' %}", "{% if p.type == 'image' %}{% set n.x = n.x + 1 %}{{ n.x }}"
    )
    return "{% set n = namespace(x=0) %}" + counted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "llama", "template": str}, "the policy takes no images: leave them out"),
        ({"history": "template"}, "environment.history is template, which shows no images: set it to keep"),
        ({"why_no_images": "vLLM is given no images"}, "vLLM is given no images"),
        ({"template": numbered}, "the chat template does not tell what follows a reply beside images: behind other im"),
    ],
)
def test_why_episodes_have_no_images(options, words, look):
    with pytest.warns(UserWarning, match=f"its answer has an image, but {words}"):
        samples, *_ = look([{"prompt": "a"}], [["b"]], **options)
    assert samples.counts["stop_image"].tolist() == [1.0]


def test_a_prompt_with_an_image_that_cannot_begin(look, tmp_path):
    picture().save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"row 1 .* cannot begin an episode: it has images, but environment.history"):
        look([{"prompt": "a"}, {"prompt": asking({"path": "a.png"}, "?")}], [["b"]], history="template")
