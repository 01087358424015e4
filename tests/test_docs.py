"""The pages say what the code says: diagrams, settings, metrics, the tests that they name, the rows of promises."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from pd_transfer.config import PdConfig
from pd_transfer.core.outcomes import Level, Outcome, Quantity
from tests.test_budgets import machine_traces

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above. Raises ValueError without it."""
    lines = text.splitlines()
    start = lines.index(heading)
    level = len(heading) - len(heading.lstrip("#"))
    end = next((i for i in range(start + 1, len(lines)) if re.match(rf"#{{1,{level}}} ", lines[i])), len(lines))
    return "\n".join(lines[start + 1 : end])


def rows(text: str) -> Iterator[list[str]]:
    """The cells of every table row, headers and rules left out."""
    lines = [*text.splitlines(), ""]
    for line, following in pairwise(lines):
        if line.startswith("| ") and not following.startswith("|-"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def first_table(text: str) -> str:
    """The first table of a text, and what stands before it."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return "\n".join(lines[:end])


# ------------------------------------------------------------------------------------------------------------- diagrams


def draw(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "draw_state_machines"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_diagrams_are_current():
    result = draw("--check")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        ("READY --> RETIRING: PeerLost", "READY --> RETIRED: PeerLost", 1),
        ("HELD --> RETIRING: LeaseReset\n", "", 1),
        ("<!-- diagram: receive -->", "<!-- diagram: recieve -->", 2),  # codespell:ignore recieve
    ],
)
def test_control_diagrams(tmp_path, old, new, status):
    page, good = tmp_path / "page.md", text_of("protocol.md")
    assert old in good
    page.write_text(good.replace(old, new))
    assert draw("--check", page).returncode == status
    assert draw(page).returncode == (2 if status == 2 else 0)
    assert (page.read_text() == good) == (status == 1)


# ------------------------------------------------------------------------------------------------- settings and metrics


def documented_settings(page: str) -> dict[str, str]:
    """Name -> default of the table of settings, as written."""
    table = first_table(section(page, "## Settings"))
    return {cells[0].strip("`"): cells[1].strip("`") for cells in rows(table)}


def settings() -> dict[str, str]:
    """Name -> default of every setting, as JSON."""
    defaults = msgspec.to_builtins(PdConfig())
    return {name: json.dumps(defaults[name]) for name in PdConfig.__struct_fields__}


def test_every_setting_is_documented_with_its_default():
    assert list(documented_settings(text_of("operations.md")).items()) == list(settings().items())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| `read_seconds` | `30.0`", "| `read_seconds` | `3.0`"),
        ("| `peers` ", "| `peer` "),
        ("`insecure` | `false`", "x"),
    ],
)
def test_control_settings(old, new):
    page = text_of("operations.md")
    assert old in page
    assert documented_settings(page.replace(old, new)) != settings()


METRICS = {
    '### `pd_transfer:outcomes_total{outcome="..."}`': Outcome,
    "### Quantities, over verified reads only": Quantity,
    '### `pd_transfer:held{what="..."}`': Level,
}


def documented_metrics(page: str, heading: str) -> list[str]:
    """The names in the first column of a section's table that have a meaning beside them."""
    return [cells[0].strip("`") for cells in rows(first_table(section(page, heading))) if cells[1]]


@pytest.mark.parametrize("heading", METRICS)
def test_every_metric_is_documented(heading):
    assert documented_metrics(text_of("operations.md"), heading) == [member.value for member in METRICS[heading]]


@pytest.mark.parametrize(
    ("heading", "name"), [*zip(METRICS, ["receive_stale", "descriptors", "quarantined_blocks"], strict=True)]
)
def test_control_metrics(heading, name):
    page = text_of("operations.md")
    assert name not in documented_metrics(re.sub(rf"\n\| `{name}` .*", "", page), heading)
    assert name not in documented_metrics(re.sub(rf"\n\| `{name}` \|[^|]*\|", f"\n| `{name}` | |", page), heading)


# ---------------------------------------------------------------------------------------------------------- named tests

REFERENCE = re.compile(r"`(tests/[\w/.]+\.py)((?:::\w+)*)`")


def missing_tests(text: str) -> list[str]:
    """The tests that a text names (``file.py`` or ``file.py::Class::name``) and that do not exist."""
    return [
        path + names
        for path, names in REFERENCE.findall(text)
        if not (ROOT / path).is_file() or not _is_defined((ROOT / path).read_text(), names.split("::")[1:])
    ]


def _is_defined(source: str, names: Iterable[str]) -> bool:
    body: list[ast.stmt] = ast.parse(source).body
    for name in names:
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        node = next((node for node in found if node.name == name), None)
        if node is None:
            return False
        body = node.body
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page):
    assert missing_tests(page.read_text()) == []


@pytest.mark.parametrize("page", ["limits.md", "requirements.md", "security.md"])
def test_pages_of_promises_name_tests(page):
    assert len(REFERENCE.findall(text_of(page))) > 10


@pytest.mark.parametrize(
    ("name", "is_missing"),
    [
        ("tests/test_docs.py", False),
        ("tests/test_docs.py::test_control_named_tests", False),
        ("tests/contracts/test_transport.py::TestTransport::test_close_is_for_good", False),
        ("tests/contracts/test_transport.py::test_close_is_for_good", True),
        ("tests/test_docs.py::test_of_nothing", True),
        ("tests/test_nothing.py::test_control_named_tests", True),
    ],
)
def test_control_named_tests(name, is_missing):
    assert missing_tests(f"see `{name}`.") == ([name] if is_missing else [])


# --------------------------------------------------------------------------------------------------------- requirements

SEED_ROWS = [f"S{part}.{row}" for part, last in ((1, 27), (2, 17), (3, 14), (4, 3)) for row in range(1, last + 1)]
STATES = {"kept", "answered", "superseded", "later"}


def requirement_faults(page: str) -> list[str]:
    """What is wrong with the table of promises: rows missing or repeated, states unknown, nothing to show."""
    table = {cells[0]: cells for cells in rows(page) if re.fullmatch(r"S\d\.\d+", cells[0])}
    counts = Counter(cells[0] for cells in rows(page) if cells[0] in table)
    faults = [f"{row} is there {counts[row]} times" for row in SEED_ROWS if counts[row] != 1]
    faults += [f"{row} is no row" for row in table if row not in SEED_ROWS]
    for row, (_, promise, state, why) in table.items():
        if state not in STATES or not promise or not why:
            faults.append(f"{row} lacks a promise, a state or a reason")
        if state == "kept" and not REFERENCE.search(why) and ".md" not in why:
            faults.append(f"{row} is kept and shown by nothing")
    return faults


def test_every_promise_has_one_row():
    assert requirement_faults(text_of("requirements.md")) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| S2.17 |", "| S2.71 |"),
        ("| S3.4 |", "| S3.3 |"),
        ("| kept |", "| held |"),
        ("`tests/adapter/test_decode.py::test_the_happy_path_step_by_step` |\n| S3.10", "a test |\n| S3.10"),
    ],
)
def test_control_requirements(old, new):
    page = text_of("requirements.md")
    assert old in page
    assert requirement_faults(page.replace(old, new))


# ---------------------------------------------------------------------------------------------------- paths and links


def foreign_lines(text: str) -> list[str]:
    """Lines that name a machine, or a folder beside the repository."""
    beside = [line.strip() for line in text.splitlines() if re.search(r"(?<![\w-])[s]hared/|\.\./\.\./", line)]
    return machine_traces(text) + beside


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_machine(page):
    assert foreign_lines(page.read_text()) == []


@pytest.mark.parametrize("parts", [("/work", "/x"), ("sh", "ared/design"), ("..", "/../seeds")])
def test_control_machines(parts):
    line = "".join(parts)
    assert foreign_lines(f"harmless\n{line}\n") == [line]


def broken_links(page: Path, text: str) -> list[str]:
    """Links of a page to files that do not exist."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [target for target in targets if "://" not in target and not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert broken_links(page, page.read_text()) == []


def test_control_links():
    text = "[a](limits.md) [b](limits.md#untested) [c](nothing.md) [d](https://example.org/x) [e](#here)"
    assert broken_links(DOCS / "protocol.md", text) == ["nothing.md"]
