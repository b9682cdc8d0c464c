"""The argument parser of every command."""

import argparse
from pathlib import Path
from typing import NoReturn

from rlft_fast.errors import printable
from rlft_fast.files import expand_user


def path(text: str) -> Path:
    """The path of an argument: a shell does not expand the ``~`` of ``--output=~/file``."""
    try:
        return Path(expand_user(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class Parser(argparse.ArgumentParser):
    """Argparse shows arguments that it does not know as they are."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))
