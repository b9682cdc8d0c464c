"""``rlft-fast view RUN [RUN2]``: writes one page with the curves and samples of a run, or of two runs."""

from rlft_fast.cli.parser import Parser, path
from rlft_fast.errors import printable


def run(arguments: list[str]) -> int:
    parser = Parser(
        prog="rlft-fast view",
        description="Write one HTML file with the curves, steps and samples of a run, or of two runs side by side.",
    )
    parser.add_argument("run", metavar="RUN", type=path, help="output_dir of a training run")
    parser.add_argument("other", metavar="RUN2", nargs="?", type=path, help="output_dir of a run to compare with")
    parser.add_argument(
        "--output", metavar="FILE", type=path, help="page to write, FILE.html (default for one run: RUN/view.html)"
    )
    parser.add_argument(
        "--max-mib", metavar="N", type=int, default=16,
        help="newest samples of a run to show, and newest numbers of its tokens, in MiB each (default: 16)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.output is None and options.other is not None:
        parser.error("two runs go into one page: name it with --output FILE.html")
    output = options.output or options.run / "view.html"
    if output.suffix != ".html":
        parser.error(f"--output {output} must end in .html")
    if options.output is not None and not output.parent.is_dir():
        parser.error(f"--output {output} cannot be written: there is no folder {output.parent}")
    if options.max_mib < 1:
        parser.error(f"--max-mib is {options.max_mib}, expected at least 1")
    from rlft_fast.view import write_view

    write_view([run for run in (options.run, options.other) if run is not None], output, options.max_mib * 2**20)
    print(printable(output))
    return 0
