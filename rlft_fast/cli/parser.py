"""The argument parser of every command."""

import argparse
from typing import NoReturn

from rlft_fast.errors import printable


class Parser(argparse.ArgumentParser):
    """Argparse shows arguments that it does not know as they are."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))
