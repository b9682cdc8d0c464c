"""Pictures as files, and what transformers' own processor makes of them."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor


def picture(seed: int = 0, width: int = 16, height: int = 12, mode: str = "RGB") -> Image.Image:
    """Random pixels."""
    size = (height, width, {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode])
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(2) if mode == "L" else pixels, mode=mode)


def asking(*parts: Any) -> list[dict[str, Any]]:
    """A message of a user: texts, and of other parts images."""
    content = [{"type": "text", "text": x} if isinstance(x, str) else {"type": "image", **x} for x in parts]
    return [{"role": "user", "content": content}]


def plain_processor(model: Path) -> Qwen2VLProcessor:
    """Of Qwen2-VL. Its own ``__init__`` needs torchvision, for videos."""
    processor = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    processor.tokenizer = AutoTokenizer.from_pretrained(model)
    processor.image_processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.image_token_id, processor.video_token_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>"), -1
    return processor
