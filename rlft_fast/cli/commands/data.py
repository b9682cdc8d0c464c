"""``rlft-fast data CONFIG [--show N] [--key value ...]``: rows as the model will see them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlft_fast.cli.keys import split_overrides
from rlft_fast.cli.parser import Parser
from rlft_fast.config import load_config
from rlft_fast.errors import brief, printable

if TYPE_CHECKING:
    from rlft_fast.trainer import ShownSequence, ShownSet

_MOST_NAMED = 20  # rows that are left out
_OPEN, _CLOSE = "\u27e6", "\u27e7"


def run(arguments: list[str]) -> int:
    rest, overrides = split_overrides(arguments)
    parser = _parser()
    options = parser.parse_args(rest)
    if options.show < 0:
        parser.error(f"--show is {options.show}, expected at least 0")
    config = load_config(options.config, overrides)
    from rlft_fast.trainer import show_data

    for found in show_data(config, options.show):
        for line in _lines(found, config.data.overlong, tokens=options.tokens):
            print(printable(line))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="rlft-fast data",
        usage="rlft-fast data CONFIG [--show N] [--tokens] [--key value ...]",
        description="Read the data of a configuration as its run would, and show the first rows as the model will see "
        f"them: the text with its special tokens, what is learned between {_OPEN} and {_CLOSE}, the lengths in tokens, "
        "and the rows that are left out. No weights are read, and nothing is written.",
        epilog="`rlft-fast train --help` explains every --key.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file of a run of any objective")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="rows of each set to show (default: 3)")
    parser.add_argument("--tokens", action="store_true", help="show the ids of the tokens, too")
    return parser


def _lines(found: "ShownSet", overlong: str, *, tokens: bool) -> Iterator[str]:
    lengths = sorted(found.lengths.tolist())
    yield (
        f"{found.name}: {len(lengths):,} sequences of {lengths[0]} to {lengths[-1]} tokens, "
        f"{lengths[len(lengths) // 2]} in the middle, {sum(lengths):,} in all"
        + ("" if found.num_taught is None else f", {found.num_taught:,} of them learned")
    )
    if found.overlong:
        yield f"  {found.overlong}" + (" (the run refuses them: see data.overlong)" if overlong == "refuse" else "")
    for left in found.left_out[:_MOST_NAMED]:
        yield f"  left out: row {left.row} of {left.source}: {left.why}"
    if (more := len(found.left_out) - _MOST_NAMED) > 0:
        yield f"  left out: {more:,} more"
    for i, (sequences, columns) in enumerate(zip(found.sequences, found.columns, strict=True)):
        for sequence in sequences:
            yield from _sequence(i, sequence, tokens=tokens)
        yield from (f"  {name}: {brief(repr(value), 200)}" for name, value in columns.items())


def _sequence(row: int, sequence: "ShownSequence", *, tokens: bool) -> Iterator[str]:
    yield f"--- row {row}{f', {sequence.name}' * bool(sequence.name)}: {len(sequence.token_ids)} tokens"
    yield "".join(f"{_OPEN}{part.text}{_CLOSE}" if part.is_taught else part.text for part in sequence.parts)
    if tokens:
        yield f"  tokens: {sequence.token_ids}"
