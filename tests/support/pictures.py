"""Pictures as files, and what transformers' own processor makes of them."""

import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor


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


def picture_processor(name: str, model: Path) -> Any:
    """The processor of a family. The ``__init__`` of InternVL's and SmolVLM's needs torchvision, for videos."""
    tokenizer, reader = AutoTokenizer.from_pretrained(model), AutoImageProcessor.from_pretrained(model, backend="pil")
    if name == "llava":
        return LlavaProcessor(
            reader, tokenizer, patch_size=2, vision_feature_select_strategy="default", image_token="<|image_pad|>",
            num_additional_image_tokens=1,
        )  # fmt: skip
    if name == "mistral3":
        # Importing the processor imports torchvision's image processor, of which it takes one function.
        with patch.dict(
            sys.modules, {"transformers.models.pixtral.image_processing_pixtral": image_processing_pil_pixtral}
        ):
            from transformers.models.pixtral.processing_pixtral import PixtralProcessor
        return PixtralProcessor(reader, tokenizer, patch_size=2, spatial_merge_size=2, image_token="<|image_pad|>")
    if name == "idefics3":
        processor = Idefics3Processor(reader, AutoTokenizer.from_pretrained(model), image_seq_len=4)
        processor.tokenizer, processor.image_token = tokenizer, "<|image_pad|>"
        processor.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        return processor
    if name == "smolvlm":
        processor = SmolVLMProcessor.__new__(SmolVLMProcessor)
        processor.tokenizer, processor.image_processor, processor.image_seq_len = tokenizer, reader, 4
        processor.fake_image_token, processor.global_image_token = "<fake_token_around_image>", "<global-img>"
        processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
        processor.image_token_id, processor.video_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>"), -1
        return processor
    if name == "gemma3-vision":
        for kind, token in (("image", "<|image_pad|>"), ("boi", "<start_of_image>"), ("eoi", "<end_of_image>")):
            setattr(tokenizer, f"{kind}_token", token)
            setattr(tokenizer, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(token))
        return Gemma3Processor(reader, tokenizer, image_seq_length=4)
    processor = InternVLProcessor.__new__(InternVLProcessor)
    processor.tokenizer, processor.image_processor, processor.image_seq_length = tokenizer, reader, 4
    processor.start_image_token, processor.end_image_token = "<img>", "</img>"
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    processor.start_image_token_id = processor.end_image_token_id = processor.video_token_id = -1
    processor.multimodal_pattern = re.compile(r"(?P<image><\|image_pad\|>)|(?P<video><\|video_pad\|>)")
    return processor
