"""``rlft-fast serve CONFIG [--key value ...]``: starts a vLLM server that generates for the run of a YAML file."""

import argparse
import importlib.util
import os

import torch

from rlft_fast.cli.keys import split_overrides
from rlft_fast.cli.parser import Parser
from rlft_fast.config import Config
from rlft_fast.rollout import server_command, server_environment, token_from_environment


def run(arguments: list[str]) -> int:
    rest, overrides = split_overrides(arguments)
    options = _parser().parse_args(rest)
    config = Config.load(options.config, overrides)
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed: pip install vllm (on a CPU make install-vllm)")
    token_from_environment()
    on_gpu = torch.cuda.is_available()
    actor = config.actor.for_device("cuda" if on_gpu else "cpu")
    command = server_command(
        config.model, actor.compute_dtype, config.rollout, config.longest_sequence,
        host=options.host, port=options.port, on_cpu=not on_gpu,
    )  # fmt: skip
    os.execve(command[0], command, {**os.environ, **server_environment()})


def _parser() -> Parser:
    parser = Parser(
        prog="rlft-fast serve",
        usage="rlft-fast serve CONFIG [--host HOST] [--port PORT] [--key value ...]",
        description="Starts a vLLM server with the model and the sampling of a run, which names it in rollout.servers. "
        "The first sync of the run brings the weights. Requests need the token of the environment variable "
        "VLLM_API_KEY. Ctrl-C ends the server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all addresses")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at")
    return parser
