"""The command line: ``rlft-fast COMMAND``, one module of `rlft_fast.cli.commands` per command.

A module is imported when its command runs, so that help and mistakes are answered at once, without loading torch.
"""

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from types import TracebackType
from typing import NoReturn

import rlft_fast
from rlft_fast.cli.parser import Parser
from rlft_fast.cli.streams import keep_streams
from rlft_fast.errors import RunError, needing_train, printable, text_of

__all__ = ["COMMANDS", "main", "script"]

_LONGEST_TRACEBACK = 40_000  # characters
_SECONDS_TO_EXIT = 20.0
_FORMAT_WARNING = warnings.formatwarning
# By module. A module is absent if the command does not use it, or what it needs is not installed.
_USAGE_ERRORS = {"rlft_fast.config": "ConfigError", "rlft_fast.plugins": "MissingFunctionError"}

COMMANDS = {
    "train": "train a model as a YAML file says",
    "sft": "fine-tune a model on conversations or texts, as a YAML file says",
    "dpo": "teach a model which answers are preferred, as a YAML file says",
    "reward": "train a reward model on pairs of answers, as a YAML file says",
    "demo": "teach a small model sums, a tool or pictures, in minutes on a CPU",
    "eval": "measure a model on held-out prompts",
    "data": "show the rows of a configuration as the model will see them",
    "plot": "draw the curves of one or more runs",
    "view": "write a page with the curves and samples of one run, or of two beside each other",
    "watch": "show a run in the terminal, as it goes on",
    "serve": "start a vLLM server that generates for a run, on this machine or for another",
    "plan": "compute what a run needs per GPU: memory, token cap, communication",
    "export": "write a run's newest checkpoint as a Hugging Face folder",
    "bench": "run the benchmarks of a source checkout",
    "doctor": "report what is installed, which backends work, and why others do not",
}

_OBJECTIVES = ("sft", "dpo", "reward")  # commands that are `train` with this objective


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: what follows the program's name; None: this process's arguments.

    Returns:
        The exit status: 0 done, 1 the command failed, 2 wrong usage or configuration, 130 interrupted (of
            ``train`` 128 + the signal's number: 143 after SIGTERM, 129 after SIGHUP); of ``bench`` pytest's.
    """
    keep_streams()
    options = _parser().parse_args(argv)
    _escape_messages()
    try:
        with needing_train():
            return _run(options.command, options.arguments)
    except (ValueError, OSError, ImportError, RunError) as error:
        if options.traceback:
            raise
        return _report(error)
    except SystemExit as error:
        if not isinstance(error.code, str):
            raise
        return _report(error)  # Python would print the text as it is
    except KeyboardInterrupt as error:
        if options.traceback:
            raise
        print("interrupted", file=sys.stderr)
        return 128 + getattr(error, "signal", signal.SIGINT)


def _run(command: str, arguments: list[str]) -> int:
    if command in _OBJECTIVES:
        return import_module("rlft_fast.cli.commands.train").run(arguments, command)
    return import_module(f"rlft_fast.cli.commands.{command}").run(arguments)


def script() -> NoReturn:
    """`main` as a process, which ends soon after its command.

    A thread of a reward function, or an exit hook of a tracker, could keep the process for ever.
    """
    status: object = 1  # of an error that Python shows
    try:
        status = main()
    except SystemExit as error:  # of the parser
        status = error.code
        raise
    finally:
        if "triton._C.libtriton" not in sys.modules:  # Triton reports at the exit what was not freed
            gc.freeze()  # Python would look through all objects again, which takes a second with torch
        ending = threading.Timer(_SECONDS_TO_EXIT, _end, [status if isinstance(status, int) else 1])
        ending.daemon = True
        ending.start()
    sys.exit(status)


def _end(status: int) -> None:
    main_thread = threading.main_thread()
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main_thread]
    what = f"the threads {', '.join(left)}" if left else "a function that was to run at the exit"
    message = f"the command has ended, and its process ends without waiting for {what}"
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"{printable(text_of(message))}\n".encode(errors="backslashreplace"))
    os._exit(status)


def _parser() -> Parser:
    parser = Parser(
        prog="rlft-fast",
        usage="rlft-fast [--version] [--traceback] COMMAND ...",
        description="Reinforcement fine-tuning of language models.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
        + "\n\n`rlft-fast COMMAND --help` explains one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {rlft_fast.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    return parser


def _report(error: BaseException) -> int:
    message = text_of(error) or type(error).__name__
    print("error: " + printable(message).replace("\n", "\n       "), file=sys.stderr)
    if all(_is_usage(found) for found in getattr(error, "found", [error])):
        return 2
    print("(rlft-fast --traceback COMMAND ... shows where it was raised)", file=sys.stderr)
    return 1


def _is_usage(error: BaseException) -> bool:
    loaded = [(sys.modules[module], name) for module, name in _USAGE_ERRORS.items() if module in sys.modules]
    return any(isinstance(error, getattr(module, name)) for module, name in loaded)


def _escape_messages() -> None:
    """Warnings, log messages of any library and tracebacks show texts of models and data, too."""
    warnings.formatwarning = _format_warning
    logging.setLogRecordFactory(_LogRecord)
    sys.excepthook = _show_traceback


class _LogRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    print(printable(text_of(text, _LONGEST_TRACEBACK)), end="", file=sys.stderr)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return printable(_FORMAT_WARNING(message, category, filename, lineno, line))
