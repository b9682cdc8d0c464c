"""The peak of this process's memory."""

from pathlib import Path

import torch

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """The peak since `restart`: of what torch's allocator holds on a GPU, and of the resident set on a CPU.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._restarts = True

    def restart(self) -> None:
        """Measures from now on."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            try:
                _RESET.write_text("5", encoding="utf-8")
            except OSError:  # no Linux, or a container that forbids it
                self._restarts = False

    def measure(self) -> int | None:
        """[bytes]; None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if not self._restarts:
            return None
        try:
            (line,) = (line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        except (OSError, ValueError):
            return None
        return int(line.split()[1]) * 1024
