"""The picture of ``scripts/bench plan``: bytes and descriptors over prompt lengths."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from pd_transfer.cli.transfers import Comparison

SHOWN = ("gemma-3-27b", "gemma-4-like", "gpt-oss-120b", "llama-3-8b")


def draw(found: Mapping[str, Mapping[int, Comparison]], block_size: int, path: Path) -> Path:
    """Store the picture as PNG: a column for each of four models, bytes above, descriptors below."""
    figure = Figure(figsize=(14, 6.5), layout="constrained")
    axes = figure.subplots(2, len(SHOWN), sharex=True, sharey="row")
    for column, name in enumerate(SHOWN):
        _bytes(axes[0, column], found[name])
        _descriptors(axes[1, column], found[name])
        axes[0, column].set_title(name)
        axes[1, column].set_xlabel("prompt, tokens")
    axes[0, 0].set_ylabel("GiB moved")
    axes[1, 0].set_ylabel("descriptors")
    axes[0, 0].legend(fontsize=8)
    axes[1, -1].legend(fontsize=8)
    figure.suptitle(f"One prompt from prefill to decode, blocks of {block_size} tokens, one rank")
    figure.savefig(path, dpi=110)
    return path


def _bytes(axes: Axes, by_length: Mapping[int, Comparison]) -> None:
    lengths = list(by_length)
    for label, style, values in (
        ("flat", {"color": "0.6"}, [each.flat.num_bytes for each in by_length.values()]),
        ("built-in hybrid", {"color": "tab:orange"}, [each.built_in.num_bytes for each in by_length.values()]),
        ("ours", {"color": "tab:blue"}, [each.ours.num_bytes if each.ours else 0 for each in by_length.values()]),
        ("least", {"color": "k", "linestyle": ":"}, [each.least.num_bytes for each in by_length.values()]),
    ):
        axes.plot(lengths, [value / 2**30 for value in values], label=label, **style)
    _scale(axes)


def _descriptors(axes: Axes, by_length: Mapping[int, Comparison]) -> None:
    lengths = list(by_length)
    axes.plot(lengths, [each.flat.num_descriptors for each in by_length.values()], color="0.6", label="flat")
    built_in = [each.built_in.num_descriptors for each in by_length.values()]
    axes.plot(lengths, built_in, color="tab:orange", label="built-in, before merging")
    for name, style in (("runs of 8", "--"), ("contiguous", "-")):
        merged = [each.merged.get(name, 0) for each in by_length.values()]
        axes.plot(lengths, merged, color="tab:blue", linestyle=style, label=f"ours merged, {name}")
    _scale(axes)


def _scale(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1024:g}k"))
    axes.grid(visible=True, which="major", alpha=0.3)
