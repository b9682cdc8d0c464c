"""``rlft-fast watch RUN``: shows a run in the terminal, as it goes on."""

from rlft_fast.cli.parser import Parser, path


def run(arguments: list[str]) -> int:
    parser = Parser(
        prog="rlft-fast watch",
        description="Show the curves of a run in the terminal, the times of its last step, and a sample, until the run "
        "has ended or Ctrl-C is pressed. Where the output is no terminal they are shown once. Nothing is written.",
    )
    parser.add_argument("run", metavar="RUN", type=path, help="output_dir of a training run")
    parser.add_argument(
        "--every", metavar="SECONDS", type=float, default=2.0, help="time between two pictures (default: 2)"
    )
    options = parser.parse_args(arguments)
    if not 0 < options.every < 86_400:
        parser.error(f"--every is {options.every:g}, expected seconds above 0 and below a day")
    from rlft_fast.view import watch_run

    try:
        watch_run(options.run, options.every)
    except KeyboardInterrupt:  # the way to leave
        print()
    return 0
