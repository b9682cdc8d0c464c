"""Demos on a CPU, which teach SmolLM2-135M-Instruct, or a small vision-language model."""

from rlft_fast.demo.images import learn_images
from rlft_fast.demo.smollm2 import smollm2_folder
from rlft_fast.demo.sums import demo_config, learn_sums, write_problems
from rlft_fast.demo.tools import learn_tools

__all__ = ["demo_config", "learn_images", "learn_sums", "learn_tools", "smollm2_folder", "write_problems"]
