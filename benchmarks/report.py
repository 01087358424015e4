"""What every benchmark leaves behind: a JSON file and a Markdown table, with machine, versions and date."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table as RichTable

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "logs" / "bench"

_PACKAGES = ("vllm", "torch", "nixl", "numpy", "pyzmq", "msgspec", "matplotlib", "pyperf")

Cell = str | int | float


class Table(msgspec.Struct, frozen=True):
    """Rows of cells, each as long as ``columns``. Numbers stay numbers in the JSON file."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one benchmark. ``date`` is ISO 8601, UTC. ``command`` repeats the run."""

    name: str
    command: str
    date: str
    machine: dict[str, Cell]
    versions: dict[str, str]
    assumptions: dict[str, Cell] = {}
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    data: dict[str, Any] = {}


def new_report(
    name: str,
    arguments: Sequence[str],
    tables: Sequence[Table],
    notes: Sequence[str] = (),
    assumptions: Mapping[str, Cell] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Report:
    """A report of a run that has just ended on this machine."""
    return Report(
        name=name,
        command=" ".join(["scripts/bench", name, *_without_folder(arguments)]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=_machine(),
        versions=_versions(),
        assumptions=dict(assumptions or {}),
        tables=tuple(tables),
        notes=tuple(notes),
        data=dict(data or {}),
    )


def _without_folder(arguments: Sequence[str]) -> list[str]:
    """Where a report was stored is no part of it: it may be tracked, and tracked files name no machine's paths."""
    kept, rest = [], iter(arguments)
    for argument in rest:
        if argument == "--out":
            next(rest, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    return kept


def write(report: Report, folder: Path) -> list[Path]:
    """Store NAME.json and NAME.md in a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        folder / f"{report.name}.json": msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n",
        folder / f"{report.name}.md": markdown(report),
    }
    for path, text in files.items():
        path.write_text(text)
    return list(files)


def read(path: Path) -> Report:
    """A report that ``write`` has stored. Raises msgspec.DecodeError when it is none."""
    return msgspec.json.decode(path.read_bytes(), type=Report)


def markdown(report: Report) -> str:
    """The report for a reader: where and when, what was assumed, the tables, the notes."""
    parts = [f"# {report.name}", f"`{report.command}`, {report.date}.", _sentence("Machine", report.machine)]
    parts.append(_sentence("Versions", report.versions))
    if report.assumptions:
        parts.append("Assumed:")
        parts.append(_grid(("what", "value"), list(report.assumptions.items())))
    for table in report.tables:
        parts += [f"## {table.title}", _grid(table.columns, table.rows)]
    if report.notes:
        parts.append("\n".join(f"- {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def show(report: Report, console: Console) -> None:
    """The same on a screen."""
    for table in report.tables:
        shown = RichTable(*table.columns, title=table.title, title_justify="left")
        for row in table.rows:
            shown.add_row(*map(_text, row))
        console.print(shown)
    for note in report.notes:
        console.print(f"- {note}", highlight=False)


def _sentence(title: str, facts: Mapping[str, Cell]) -> str:
    return f"{title}: {', '.join(f'{name} {_text(value)}' for name, value in facts.items())}."


def _grid(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(cell: Cell) -> str:
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return cell


def _machine() -> dict[str, Cell]:
    facts: dict[str, Cell] = {
        "CPU": _processor(),
        "cores": os.cpu_count() or 0,
        "memory GiB": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "accelerator": _accelerator(),
        "load average": round(os.getloadavg()[0], 1),
    }
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _accelerator() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return "none"
    return " + ".join(filter(None, found)) or "none"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "pd_transfer": _commit()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The commit that is checked out."""
    asked = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return metadata.version("pd_transfer")
