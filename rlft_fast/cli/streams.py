"""Standard output and error that end no command: a run of hours must not end because nobody reads its lines."""

import io
import sys

from rlft_fast.files import unfailing_stream


def keep_streams() -> None:
    """Replaces the process's own streams. Streams that something else has put in their place stay."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):  # None: closed before the process started
            setattr(sys, name, _kept(stream))


def _kept(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream to the same descriptor that never fails."""
    stream.flush()
    shows_lines = stream.line_buffering or stream.write_through  # PYTHONUNBUFFERED
    return unfailing_stream(stream.fileno(), stream.encoding, shows_lines)
