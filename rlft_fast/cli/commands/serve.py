"""``rlft-fast serve CONFIG [--key value ...]``: starts a vLLM server that generates for the run of a YAML file."""

import argparse
import importlib.util
import os
import socket

import torch

from rlft_fast.cli.keys import split_overrides
from rlft_fast.cli.parser import Parser, path
from rlft_fast.config import TOKEN_VARIABLE, Config
from rlft_fast.models import load_tokenizer
from rlft_fast.rollout import server_command, server_environment, token_from_environment


def run(arguments: list[str]) -> int:
    rest, overrides = split_overrides(arguments)
    options = _parser().parse_args(rest)
    config = Config.load(options.config, overrides)
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed: pip install vllm (on a CPU make install-vllm)")
    token = token_from_environment()
    _require_free(options.host, options.port)
    load_tokenizer(config.model)  # vLLM would fail at a damaged one after it has loaded the model, or end without words
    on_gpu = torch.cuda.is_available()
    from rlft_fast.trainer import settle_compute_dtype
    from rlft_fast.world import World

    actor = settle_compute_dtype(config, World.current()).actor.for_device("cuda" if on_gpu else "cpu")
    command = server_command(
        config.model, config.rollout.dtype_beside(actor.compute_dtype), config.rollout, config.longest_sequence,
        host=options.host, port=options.port, on_cpu=not on_gpu,
    )  # fmt: skip
    os.execve(command[0], command, {**os.environ, **server_environment(), TOKEN_VARIABLE: token})


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
    parser.add_argument("config", metavar="CONFIG", type=path, help="YAML file of the run")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all addresses")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen at")
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 65535):
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, got {text!r:.80}")
    return int(text)


def _require_free(host: str, port: int) -> None:
    """Refuses an address at which this machine cannot listen: vLLM would say so after it has loaded the model.

    Raises:
        ValueError: the host is no address of this machine, or the port is taken.
    """
    if not host.strip():
        raise ValueError("--host is empty: give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"cannot listen at --host {host!r:.80} --port {port}: {error}. Give an address of this machine and a port "
            "that no other process has"
        ) from error
