"""Standard output and error that end no command: a run of hours must not end because nobody reads its lines."""

import io
import sys


def keep_streams() -> None:
    """Replaces the process's own streams. Streams that something else has put in their place stay."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):  # None: closed before the process started
            setattr(sys, name, _kept(stream))


def _kept(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream to the same descriptor. It escapes characters that the encoding lacks, and never fails."""
    stream.flush()
    buffer = io.BufferedWriter(_Descriptor(stream.fileno(), "w", closefd=False))
    shows_lines = stream.line_buffering or stream.write_through  # PYTHONUNBUFFERED
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=shows_lines)


class _Descriptor(io.FileIO):
    """Drops what a closed pipe or a full disk does not take."""

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(data)
