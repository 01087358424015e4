"""The command line's entry point: parse, run, one line for what the operator has to change."""

import argparse
import sys
from collections.abc import Sequence

from pd_transfer.cli import keys, plan
from pd_transfer.errors import PdTransferError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, or 1 after an error of the operator's."""
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except (PdTransferError, OSError) as error:
        print(f"pdt: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdt", description="Tools for operators of pd_transfer.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (keys, plan):  # each registers itself and sets ``run``
        command.add_to(commands)
    return parser
