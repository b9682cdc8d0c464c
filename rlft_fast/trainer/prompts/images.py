"""Images of prompts: found in rows, read from files, and put through the model's own image processor.

Pillow reads the files, whether torchvision is installed or not, so that a run has the same pixels on every machine.
"""

import base64
import hashlib
import io
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from rlft_fast.data import Images
from rlft_fast.errors import RunError, brief
from rlft_fast.models import ImageFamily, image_family
from rlft_fast.trainer.prompts.formats import Row
from rlft_fast.trainer.prompts.messages import Message

COLUMNS = ("image", "images")
"""Columns of a row that hold the images of placeholders without an image of their own."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow runs other programs for some of the others
_LONGEST_SIDE = 16_384  # pixels
_MOST_PIXELS = 1 << 26  # of which a small file may claim any number
_MOST_BYTES = 1 << 28  # of a file
_KEPT_BYTES = 1 << 29  # of the images that were processed last


class ImageError(RunError):
    """An image cannot be read again as it was read at the start of the run."""


class ImageSource(NamedTuple):
    """Where an image is."""

    name: str
    """For messages and ``samples.jsonl``."""
    content: Path | bytes
    """A file, or what a file holds."""


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt, which are processed when they are needed: those of a whole data set may not fit.

    Args:
        sources: where they are, in the order of their placeholders.
        key: see `rlft_fast.data.Images`.
        reader: processes them.
    """

    sources: tuple[ImageSource, ...]
    key: str
    reader: "ImageReader" = field(compare=False, repr=False)

    @property
    def names(self) -> list[str]:
        return [source.name for source in self.sources]

    @property
    def pictures(self) -> list[str]:
        """What the files hold, in base64."""
        return [base64.b64encode(_bytes_of(source)).decode() for source in self.sources]

    def load(self) -> Images:
        """Raises ImageError for files that have changed since the start, or are gone."""
        return self.reader.load(self)


class ImageReader:
    """Reads images as the model in a folder sees them.

    Args:
        path: folder of the model.
        token: the text of the token that stands for a piece of an image.
        placeholder: the text that a chat template writes for an image.
        family: of the model.
        config: of the model.
    """

    def __init__(self, path: str, token: str, placeholder: str, family: ImageFamily, config: Any) -> None:
        self.path, self.token, self.placeholder = path, token, placeholder
        self.family, self.config = family, config
        self._kept: OrderedDict[str, Images] = OrderedDict()
        self._turn = threading.RLock()  # several threads may play episodes

    @classmethod
    def of_model(cls, path: str, tokenizer: PreTrainedTokenizerBase) -> "ImageReader | None":
        """The reader of the model in a folder; None: the model takes no images, or its tokenizer has no token for them.

        Raises:
            ValueError: the folder is missing or unreadable.
        """
        if (found := image_family(path)) is None:
            return None
        family, config = found
        token, placeholder = (_text_of(tokenizer, x) for x in (config.image_token_id, family.placeholder(config)))
        if token is None or placeholder is None:
            return None
        return cls(path, token, placeholder, family, config)

    def open(self, sources: Sequence[ImageSource]) -> PromptImages:
        """Reads images for the first time.

        Raises:
            ValueError: one of them cannot be used.
        """
        contents = [_bytes_of(source) for source in sources]
        key = _key(contents)
        with self._turn:
            if key not in self._kept:
                self._keep(Images(key, self._process(sources, contents)))
        return PromptImages((*sources,), key, self)

    def load(self, images: PromptImages) -> Images:
        """See `PromptImages.load`."""
        with self._turn:
            if images.key not in self._kept:
                self._read_again(images)
            self._kept.move_to_end(images.key)
            return self._kept[images.key]

    def _read_again(self, images: PromptImages) -> None:
        try:
            again = self.open(images.sources)
        except ValueError as error:
            raise ImageError(f"{error}, as it could at the start of the run") from error
        if again.key != images.key:
            raise ImageError(f"the image {' or '.join(images.names)} has changed since the start of the run")

    def expand(self, text: str, images: PromptImages | None) -> str:
        """The text with as many image tokens for each placeholder as its image has.

        Args:
            text: from a chat template.
            images: of the text's placeholders.

        Raises:
            ValueError: there are more or fewer placeholders than images, or the text ends in an image.
        """
        return self.expand_at(text, images)[0]

    def expand_at(self, text: str, images: PromptImages | None, places: Sequence[int] = ()) -> tuple[str, list[int]]:
        """The same, and where characters of the text stand in it.

        Args:
            text: see `expand`.
            images: see `expand`.
            places: of characters, none of which is inside of a placeholder.

        Raises:
            ValueError: see `expand`.
        """
        given = None if images is None else self.load(images).inputs
        texts = [] if given is None else self.family.texts(self.config, given, self.token)
        pieces = text.split(self.placeholder)
        if len(pieces) - 1 != len(texts):
            raise ValueError(
                f"has {len(texts)} images, but its text has the placeholder {self.placeholder} {len(pieces) - 1} "
                'times: write each image as {"type": "image"} in a message, and the placeholder in no text'
            )
        if self.token != self.placeholder and self.token in text:
            raise ValueError(f"has {self.token} in its text, which stands for a piece of an image: leave it out")
        if texts and not pieces[-1] and texts[-1].endswith(self.token):
            raise ValueError("ends in an image, which no answer can follow: add words, or a chat template")
        starts = [*accumulate(map(len, pieces[:-1]), lambda at, size: at + len(self.placeholder) + size)]
        added = [len(own) - len(self.placeholder) for own in texts]
        moved = [x + sum(more for at, more in zip(starts, added, strict=True) if at < x) for x in places]
        return "".join(chain(*zip(pieces, [*texts, ""], strict=True))), moved

    def expand_blank(self, text: str) -> str:
        """The text with the tokens of a blank image for each placeholder."""
        (blank,) = self.family.texts(self.config, self.family.blank(self.config), self.token)
        return text.replace(self.placeholder, blank)

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor  # which takes half a second, and most runs have no images

        try:
            return AutoImageProcessor.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        except Exception as error:  # with a damaged file transformers may raise any error
            raise ValueError(
                f"needs an image processor, and the model folder {self.path} has none that can be loaded "
                f"({brief(error)}): copy preprocessor_config.json from the original model"
            ) from error

    def _process(self, sources: Sequence[ImageSource], contents: Sequence[bytes]) -> Mapping[str, Any]:
        pictures = [read_picture(source.name, content) for source, content in zip(sources, contents, strict=True)]
        try:
            options = self.family.options(self.config)
            found = self.family.read(self._processor(pictures, return_tensors="pt", **options))
            if unknown := {*found} - {*self.family.fields}:
                raise ValueError(
                    f"it returns {', '.join(sorted(unknown))}, which {self.config.model_type} does not take"
                )
            return {name: torch.as_tensor(found[name]) for name in self.family.fields}
        except Exception as error:  # of an image that is too narrow, for example
            raise ValueError(f"has an image that the model's image processor refuses: {brief(error)}") from error

    def _keep(self, images: Images) -> None:
        self._kept[images.key] = images
        while len(self._kept) > 1 and sum(map(_num_bytes, self._kept.values())) > _KEPT_BYTES:
            self._kept.popitem(last=False)


def folder_of(source: str) -> Path:
    """The folder that paths in the rows of a source start from."""
    path = Path(source)
    return path.parent if path.is_file() else path if path.is_dir() else Path()


def row_images(row: Row, column: str, folder: Path) -> list[ImageSource]:
    """The images of a row in the order of their placeholders: parts ``{"type": "image"}`` of its messages.

    A part has its image as ``path`` or ``image``, or the columns of the row have it.

    Args:
        row: of the data.
        column: with the prompt.
        folder: that paths start from.

    Raises:
        ValueError: there are more or fewer placeholders than images, or an image is given in no known form.
    """
    columns = [row.get(name) for name in COLUMNS if name != column]
    values = [x for value in columns for x in (value if isinstance(value, list) else [value])]
    given = iter([x for x in values if not isinstance(x, str | None) or x])  # CSV has "" for none
    sources: list[ImageSource] = []
    for part in image_parts(row[column]):
        value = part.get("path") or part.get("image") or next(given, None)
        if value is None:
            raise ValueError(
                'has a placeholder {"type": "image"} without an image: give it as "path" or "image" beside the type, '
                "or in the column images"
            )
        sources.append(_source(value, folder))
    if left := len([*given]):
        raise ValueError(
            f'has {left} images more than placeholders: write {{"type": "image"}} in a message where each belongs'
        )
    return sources


def only_placeholders(messages: Sequence[Message]) -> list[Message]:
    """The messages with images as templates take them: the place of an image, without the image."""
    return [
        message | {"content": [{"type": "image"} if _is_image(part) else part for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def image_parts(prompt: str | Sequence[Message]) -> list[Message]:
    """The parts of messages that are images, in order."""
    contents = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    return [part for content in contents if isinstance(content, list) for part in content if _is_image(part)]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _source(value: Any, folder: Path) -> ImageSource:
    """An image as a path, or as datasets holds it."""
    if isinstance(value, Mapping) and isinstance(content := value.get("bytes"), bytes):
        digest = hashlib.sha256(content).hexdigest()[:12]
        return ImageSource(str(value.get("path") or f"sha256:{digest}"), content)
    path = value.get("path") if isinstance(value, Mapping) else value
    if not isinstance(path, str) or "://" in path or path.startswith("data:"):
        raise ValueError(
            f"has the image {brief(repr(value), 100)}: expected the path of a file, or an Image of datasets (nothing "
            "is downloaded)"
        )
    return ImageSource(path, folder / path)


def _bytes_of(source: ImageSource) -> bytes:
    if isinstance(source.content, bytes):
        return source.content
    try:
        if not source.content.is_file():
            raise FileNotFoundError("there is no such file")
        if (size := source.content.stat().st_size) > _MOST_BYTES:
            raise OSError(f"it has {size} bytes, more than {_MOST_BYTES}")
        return source.content.read_bytes()
    except (OSError, ValueError) as error:  # of a path with a zero byte
        raise ValueError(f"has the image {source.name}, which cannot be read: {brief(error)}") from error


def read_picture(name: str, content: bytes) -> Any:
    """The Pillow image of a file's bytes, in RGB and turned as its metadata say, as transformers loads it.

    Raises:
        ValueError: the bytes are no image, or a moving, damaged or too large image; or Pillow is missing.
    """
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError as error:
        raise ValueError("has images, which need Pillow: pip install pillow") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # its limit is below ours
            picture = Image.open(io.BytesIO(content), formats=_FORMATS)
            width, height = picture.size
            if max(width, height) > _LONGEST_SIDE or width * height > _MOST_PIXELS:
                raise ValueError(
                    f"it is {width} x {height} pixels, expected at most {_LONGEST_SIDE} on a side and {_MOST_PIXELS} "
                    "in all: make it smaller"
                )
            frames = 1 if picture.format == "MPO" else getattr(picture, "n_frames", 1)  # MPO: a preview is beside it
            if frames > 1:
                raise ValueError(f"it has {frames} frames, as a video: save one of them")
            return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # of a damaged file, Pillow may raise any error
        raise ValueError(f"has the image {name}, which cannot be used: {brief(error)}") from error


def _text_of(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str | None:
    """The text of a token that is one token again; None: there is none."""
    text = tokenizer.convert_ids_to_tokens(token_id)
    is_whole = isinstance(text, str) and tokenizer.encode(text, add_special_tokens=False) == [token_id]
    return text if is_whole else None


def _key(contents: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()


def _num_bytes(images: Images) -> int:
    return sum(tensor.nbytes for tensor in images.inputs.values())
