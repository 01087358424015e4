"""``pdt plan``: what one prompt's transfer costs, for a model's geometry; no engine, no GPU, no vLLM."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pd_transfer.cli.models import Model, load_model
from pd_transfer.cli.transfers import Comparison, Transfer, compare
from pd_transfer.errors import ConfigError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_WIDTH = 110
"""For output that is not a terminal."""


def add_to(commands: "Commands") -> None:
    """Register the command."""
    command = commands.add_parser("plan", help="bytes and descriptors of one prompt's transfer, for a model's geometry")
    command.set_defaults(run=_plan)
    command.add_argument("--model", type=Path, required=True, metavar="CONFIG_OR_DIR", help="config.json or its folder")
    command.add_argument("--prompt-tokens", type=int, required=True, metavar="N")
    command.add_argument(
        "--block-size", type=int, default=16, metavar="B", help="vLLM's --block-size, in tokens (default: 16)"
    )
    command.add_argument(
        "--tp", type=int, nargs=2, default=(1, 1), metavar=("P", "D"), help="tensor parallel sizes of the two engines"
    )


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.prompt_tokens < 2:
        raise ConfigError("--prompt-tokens has to be 2 or more: of a prompt of one token nothing is handed off")
    if arguments.block_size < 1 or min(arguments.tp) < 1:
        raise ConfigError("--block-size and --tp have to be 1 or more")
    prefill_ranks, decode_ranks = arguments.tp
    models = [load_model(arguments.model, num_ranks) for num_ranks in dict.fromkeys(arguments.tp)]
    console = Console(width=None if Console().is_terminal else _WIDTH, highlight=False)
    if prefill_ranks != decode_ranks:
        console.print(
            f"Not supported yet: prefill with tensor parallel {prefill_ranks} and decode with {decode_ranks}. Decode "
            "refuses such a peer at the handshake and computes its prompts itself (docs/limits.md). With equal sizes:\n"
        )
    for model in models:
        _show(console, model, arguments.prompt_tokens, arguments.block_size)


def _show(console: Console, model: Model, num_prompt_tokens: int, block_size_tokens: int) -> None:
    found = compare(model, num_prompt_tokens, block_size_tokens)
    console.print(
        f"{model.name}: a prompt of {num_prompt_tokens:,} tokens, blocks of {block_size_tokens}, {model.dtype}, "
        f"tensor parallel {model.num_ranks}" + (", figures of one rank" if model.num_ranks > 1 else "")
    )
    console.print(_group_table(found))
    console.print(_transfer_table(found))
    if found.refusal:
        console.print(f"pd_transfer refuses this model at start-up: {found.refusal}; see docs/limits.md.")
    if found.built_in_fault:
        console.print(f"The built-in connector at this length: {found.built_in_fault}.")
    if found.ours and model.num_ranks > 1:
        console.print(f"All {model.num_ranks} ranks together: {_bytes(found.ours.num_bytes * model.num_ranks)}.")


def _group_table(found: Comparison) -> Table:
    table = Table(
        "group", "layers", "attention", "block", "bytes of a block", title="Groups: blocks", title_justify="left"
    )
    for column in ("whole prompt", "built-in", "ours", "bytes, ours"):
        table.add_column(column, justify="right")
    for index, group in enumerate(found.groups):
        reach = f" {group.reach_tokens}" if group.reach_tokens else ""
        pages = group.page_bytes()
        table.add_row(
            str(index),
            str(len(group.layers)),
            f"{group.attention}{reach}",
            f"{group.block_size_tokens}",
            _bytes(min(pages)) if min(pages) == max(pages) else f"{_bytes(min(pages))} to {_bytes(max(pages))}",
            f"{found.flat.num_blocks[index]:,}",
            f"{found.built_in.num_blocks[index]:,}",
            *_ours(found, index),
        )
    return table


def _ours(found: Comparison, index: int) -> tuple[str, str]:
    if found.ours is None:
        return "refused", ""
    count = found.ours.num_blocks[index]
    return f"{count:,}", _bytes(count * sum(found.groups[index].page_bytes()))


def _transfer_table(found: Comparison) -> Table:
    table = Table("transfer", title="Descriptors and bytes", title_justify="left")
    for column in ("descriptors", "bytes", "of the least"):
        table.add_column(column, justify="right")

    def add(name: str, size: Transfer) -> None:
        share = f"{size.num_bytes / found.least.num_bytes:.2f}" if found.least.num_bytes else ""
        table.add_row(name, f"{size.num_descriptors:,}", _bytes(size.num_bytes), share)

    add("flat: every group as full attention", found.flat)
    add("built-in hybrid: windows and a block more", found.built_in)
    if found.ours:
        add("ours", found.ours)
        for name, count in found.merged.items():
            add(f"ours, merged, blocks {name}", replace(found.ours, num_descriptors=count))
    else:
        table.add_row("ours", "refused", "", "")
    add("least: what the last token looks at", found.least)
    return table


def _bytes(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.5g} {unit}"
    return f"{count} B"
