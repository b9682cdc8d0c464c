import io
import json

import pytest
import torch
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image

from rlft_fast.config import DataConfig
from rlft_fast.models import load_tokenizer
from rlft_fast.trainer.prompts import ImageError, ImageReader, Prompts, load_prompts
from tests.support.pictures import asking, picture, picture_processor, plain_processor
from tests.support.tiny_models import PICTURE_MODELS
from tests.trainer.toy import write_rows


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen2-vl")


def load(path, model, most: int = 500) -> Prompts:
    tokenizer = load_tokenizer(model)
    reader = ImageReader.of_model(str(model), tokenizer)
    return load_prompts(DataConfig(path=str(path)), tokenizer, most, image_reader=reader)


def assert_as_transformers(prompts: Prompts, model, pictures: list[list[Image.Image]]):
    """The tokens and the inputs of the tower are those of transformers' processor."""
    processor = plain_processor(model)
    for row, (ids, images, own) in enumerate(zip(prompts.token_ids, prompts.load_images(), pictures, strict=True)):
        expected = processor(images=[x.convert("RGB") for x in own] or None, text=[prompts.texts[row]])
        assert [ids] == expected["input_ids"]
        assert (images is None) == (not own)
        for name in ("pixel_values", "image_grid_thw") if own else ():
            assert torch.equal(images.inputs[name], torch.as_tensor(expected[name]))


def test_files_become_what_transformers_makes_of_them(tmp_path, model):
    """Pixels with alpha, of print, in grey and in a palette; one pixel alone; turned by its metadata; several."""
    turned, exif = picture(5, 20, 10), Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "in").mkdir()
    files = {
        "a.png": picture(1, mode="RGBA"), "in/b.jpg": picture(2, mode="CMYK"), "c.webp": picture(3, mode="L"),
        "d.gif": picture(4).convert("P"), "e.bmp": picture(0, 1, 1), "f.tiff": picture(7, 40, 9),
    }  # fmt: skip
    for name, image in files.items():
        image.save(tmp_path / name)
    turned.save(tmp_path / "g.png", exif=exif)
    files["g.png"] = turned.transpose(Image.Transpose.ROTATE_270)
    rows = [{"prompt": asking("what?", {"path": name})} for name in files]
    rows += [{"prompt": asking({"image": "a.png"}, " or ", {"path": str(tmp_path / "c.webp")}, "?")}]
    rows += [{"prompt": asking({}, "?", {}, "!"), "images": ["g.png", "f.tiff"]}]
    rows += [{"prompt": asking("no image"), "image": ""}]  # as CSV has a missing one
    reopened = {name: Image.open(tmp_path / name) for name in files} | {"g.png": files["g.png"]}
    each = [*([name] for name in files), ["a.png", "c.webp"], ["g.png", "f.tiff"], []]
    prompts = load(write_rows(tmp_path / "data.jsonl", rows), model)
    assert [prompts.images[i].names for i in range(7)] == [[name] for name in files]
    assert_as_transformers(prompts, model, [[reopened[name] for name in names] for names in each])


def test_images_of_datasets(tmp_path, model):
    """A column of one image, a column of several, and images in messages."""
    first, second = picture(1), picture(2, 30, 8)
    one = Dataset.from_dict({"prompt": [asking({}, "?")] * 2, "image": [first, second]})
    assert isinstance(one.features["image"], ImageFeature)
    several = Dataset.from_dict({"prompt": [asking({}, "?", {}, "!"), asking("?")], "images": [[first, second], []]})
    inside = Dataset.from_dict({"prompt": [asking({"image": first}, "?"), asking("?", {"image": second}, "!")]})
    expected = [[[first], [second]], [[first, second], []], [[first], [second]]]
    for number, (dataset, pictures) in enumerate(zip((one, several, inside), expected, strict=True)):
        dataset.save_to_disk(tmp_path / str(number))
        assert_as_transformers(load(tmp_path / str(number), model), model, pictures)


@pytest.mark.parametrize("name", [*PICTURE_MODELS])
def test_the_text_around_images_is_the_processors(tmp_path, tiny_model, name):
    """Of the wide image LLaVA takes a part, Gemma 3 all, Mistral 3 writes a line per row, and all others cut it."""
    model = tiny_model(name)
    pictures = [picture(1, 32, 8), picture(2, 9, 11)]
    for number, image in enumerate(pictures):
        image.save(tmp_path / f"{number}.png")
    rows = [{"prompt": asking({"path": "0.png"}, " or ", {"path": "1.png"}, "?")}]
    prompts = load(write_rows(tmp_path / "data.jsonl", rows), model)
    expected = picture_processor(name, model)(images=pictures, text=[prompts.texts[0]], return_tensors="pt")
    (images,) = prompts.load_images()
    assert prompts.token_ids[0] == expected["input_ids"][0].tolist()
    pixels = images.inputs["pixel_values"]
    assert torch.equal(pixels, torch.as_tensor(expected["pixel_values"]).view(pixels.shape))


def test_a_text_with_a_token_that_stands_for_a_piece_of_an_image(tmp_path, tiny_model):
    """Gemma 3 has another placeholder."""
    picture().save(tmp_path / "a.png")
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": asking({"path": "a.png"}, "<|image_pad|>?")}])
    with pytest.raises(ValueError, match=r"row 0 .* has <\|image_pad\|> in its text, .* a piece of an image: leave it"):
        load(path, tiny_model("gemma3-vision"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images that cannot be used, beside a good one."""
    folder = tmp_path_factory.mktemp("images")
    picture().save(folder / "a.png")
    picture(0, 300, 300).save(folder / "whole.jpg")
    (folder / "truncated.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:9000])
    (folder / "text.png").write_text("a cat")
    Image.new("1", (20_000, 2)).save(folder / "wide.png")
    Image.new("1", (12_000, 10_000)).save(folder / "bomb.png")
    picture(0, 300, 1).save(folder / "narrow.png")
    picture().save(folder / "moving.gif", save_all=True, append_images=[picture(1)])
    return folder


# What the row gives, and what the error says.
@pytest.mark.parametrize(
    ("parts", "columns", "message"),
    [
        ([{"path": "truncated.jpg"}, "?"], {}, "has the image truncated.jpg, which cannot be used"),
        ([{"path": "text.png"}, "?"], {}, "has the image text.png, which cannot be used: cannot identify"),
        ([{"path": "wide.png"}, "?"], {}, "it is 20000 x 2 pixels, expected at most 16384 on a side"),
        ([{"path": "bomb.png"}, "?"], {}, "it is 12000 x 10000 pixels, expected .* 67108864 in all: make it smaller"),
        ([{"path": "narrow.png"}, "?"], {}, "the model's image processor refuses: absolute aspect ratio"),
        ([{"path": "moving.gif"}, "?"], {}, "it has 2 frames, as a video: save one of them"),
        ([{"path": "b.png"}, "?"], {}, "has the image b.png, which cannot be read: there is no such file"),
        ([{"path": "."}, "?"], {}, "which cannot be read"),
        ([{"path": "https://a.b/c.png"}, "?"], {}, r"expected the path of a file, .* \(nothing is downloaded\)"),
        ([{}, "?"], {}, 'has a placeholder {"type": "image"} without an image'),
        ([{}, "?", {}, "!"], {"image": "a.png"}, 'has a placeholder {"type": "image"} without an image'),
        ([{}, "?"], {"images": ["a.png", "a.png"]}, "has 1 images more than placeholders"),
        (["?"], {"image": "a.png"}, "has 1 images more than placeholders"),
        (["<|image_pad|>?"], {}, r"has 0 images, but its text has the placeholder <\|image_pad\|> 1 times"),
        ([{"path": "a.png", "type": "video"}, "?"], {}, r"have images, videos or audio .*row 1 has 'video'"),
        ([{"type": "image_url", "image_url": "a.png"}, "?"], {}, r"have images, videos .*row 1 has 'image_url'"),
        (["?"], {"videos": ["a.mp4"]}, r"have images, videos or audio beside their 'prompt' \(row 1 has 'videos'"),
    ],
)
def test_an_error_names_the_row(folder, model, parts, columns, message):
    rows = [{"prompt": asking("good")}, {"prompt": asking(*parts), **columns}]
    with pytest.raises(ValueError, match=rf"data.jsonl: rows? 1 \(counted from 0\) .*{message}"):
        load(write_rows(folder / "data.jsonl", rows), model)


def test_an_image_for_a_text_model(tmp_path, tiny_model):
    picture().save(tmp_path / "a.png")
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": asking({"path": "a.png"}, "?")}])
    assert ImageReader.of_model(str(tiny_model("llama")), load_tokenizer(tiny_model("llama"))) is None
    with pytest.raises(ValueError, match=r"rows 0 .* have images, .* \(row 0 has 'image'\), which do not reach the mo"):
        load(path, tiny_model("llama"))


def test_more_tokens_than_a_prompt_may_have(tmp_path, model):
    picture(0, 32, 32).save(tmp_path / "a.png")
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": asking({"path": "a.png"}, "?")}])
    with pytest.raises(ValueError, match=r"rows 0 .* longer than rollout.max_prompt_tokens=20 \(row 0 has 23 tokens\)"):
        load(path, model, 20)


def test_a_model_without_an_image_processor(tmp_path, model, tiny_model):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "preprocessor_config.json":
            (folder / file.name).symlink_to(file)
    picture().save(tmp_path / "a.png")
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": asking({"path": "a.png"}, "?")}])
    with pytest.raises(ValueError, match=r"row 0 .* needs an image processor, .* copy preprocessor_config.json"):
        load(path, folder)


def test_other_pixels_are_other_data(tmp_path, model):
    """A run continues with the same images alone, in files and in a data set; tokens do not tell."""
    for number, image in enumerate([picture(1), picture(2)]):
        image.save(tmp_path / "a.png")
        in_bytes = io.BytesIO()
        image.save(in_bytes, "png")
        for kind, value in (("path", "a.png"), ("bytes", {"bytes": in_bytes.getvalue(), "path": None})):
            Dataset.from_list([{"prompt": asking({}, "?"), "image": value}]).save_to_disk(tmp_path / f"{kind}{number}")
    write_rows(tmp_path / "data.jsonl", [{"prompt": asking({"path": "a.png"}, "?")}])
    (tmp_path / "bytes0" / "a.png").write_bytes(b"")  # nothing reads it
    first, again, other = (load(tmp_path / name, model) for name in ("bytes0", "bytes0", "bytes1"))
    assert first.description == again.description != other.description
    assert first.token_ids == other.token_ids
    assert json.dumps(first.description)
    file = load(tmp_path / "data.jsonl", model)
    picture(3).save(tmp_path / "a.png")
    assert load(tmp_path / "data.jsonl", model).description != file.description
    file.images[0].reader._kept.clear()
    with pytest.raises(ImageError, match=r"the image a.png has changed since the start of the run"):
        file.load_images()
    (tmp_path / "a.png").unlink()
    with pytest.raises(ImageError, match=r"a.png, which cannot be read: there is no such file, as it could at the sta"):
        file.load_images()
