"""``rlft-fast export RUN``: writes the newest complete checkpoint as a Hugging Face folder, or its adapters alone."""

from rlft_fast.cli.parser import Parser, path
from rlft_fast.errors import printable


def run(arguments: list[str]) -> int:
    parser = Parser(
        prog="rlft-fast export",
        description="Write the newest complete checkpoint of a run as a Hugging Face folder.",
    )
    parser.add_argument("run", metavar="RUN", type=path, help="output_dir of a training run")
    parser.add_argument("--output", metavar="DIR", type=path, help="new folder to write (default: RUN/hf)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights (default: of the run's model)"
    )
    parser.add_argument(
        "--adapter", action="store_true",
        help="write the adapters of a run with actor.lora alone, as PEFT reads them (default folder: RUN/adapter)",
    )  # fmt: skip
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="push the folder to this repository of the Hugging Face Hub, too"
    )
    parser.add_argument("--public", action="store_true", help="with --push: a new repository is public, not private")
    options = parser.parse_args(arguments)
    if options.public and options.push is None:
        parser.error("--public is for --push")
    if not options.run.is_dir():
        raise ValueError(f"there is no run in {options.run}: give the output_dir of a training run")
    from rlft_fast.engine import HubRepository, export_run
    from rlft_fast.world import init_distributed, leaving_process_group

    world = init_distributed()
    with leaving_process_group():
        repository = None
        if options.push is not None and world.is_first:  # before minutes of work
            repository = HubRepository(options.push, public=options.public)
        output = export_run(options.run, options.output, options.dtype, world, adapter=options.adapter)
        if world.is_first:
            print(printable(output))
        if repository is not None:
            print(printable(repository.push(output, f"Export of {options.run.resolve().name}")))
    return 0
