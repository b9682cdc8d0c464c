"""``rlft-fast plot RUN...``: draws the curves of training runs, and the timeline of one run."""

from rlft_fast.cli.parser import Parser, path
from rlft_fast.errors import printable


def run(arguments: list[str]) -> int:
    parser = Parser(prog="rlft-fast plot", description="Draw the curves of one or more training runs into one picture.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=path, help="output_dir of a training run")
    parser.add_argument(
        "--output", metavar="FILE", type=path,
        help="picture of the curves (default for one run: RUN/curve.png, with RUN/timeline.png)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.output is None and len(options.runs) > 1:
        parser.error("several runs go into one picture: name it with --output FILE")
    output = options.output or options.runs[0] / "curve.png"
    if not output.suffix:
        parser.error(f"--output {output} has no suffix that names the picture's format: png, svg or pdf")
    if options.output is not None and not output.parent.is_dir():
        parser.error(f"--output {output} cannot be written: there is no folder {output.parent}")
    from rlft_fast.run import draw_timeline
    from rlft_fast.trainer import plot_runs

    plot_runs(options.runs, output)
    print(printable(output))
    if options.output is None and draw_timeline(options.runs[0], timeline := output.with_name("timeline.png")):
        print(printable(timeline))
    return 0
