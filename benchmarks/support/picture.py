"""What the reports' pictures have in common: the colour of our bars, and how a picture is written."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

OURS_COLOR = "#d1495b"


def save(figure: Figure, path: Path, subtitle: str) -> None:
    """Writes the figure as a picture with a subtitle, and closes it."""
    figure.suptitle(subtitle, x=0.01, ha="left", fontsize=9, color="#66707c")
    figure.savefig(path, dpi=150)
    plt.close(figure)
