"""What benchmarks leave behind, and the entry point that runs them."""

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.report import Table, markdown, new_report, read, write

TABLE = Table("Bytes", ("what", "how many", "ratio"), (("ours", 1234567, 1.0), ("theirs", 2345678, 1.9)))


def report(**changes):
    return new_report("sample", ["--fast"], [TABLE], ["a note"], {"engines": 1000}, {"raw": [1, 2]}, **changes)


def test_json_holds_all_that_was_measured(tmp_path):
    written = report()
    assert {path.name for path in write(written, tmp_path / "new")} == {"sample.json", "sample.md"}
    stored = json.loads((tmp_path / "new" / "sample.json").read_text())
    assert stored["command"] == "scripts/bench sample --fast"
    assert stored["tables"][0]["rows"] == [["ours", 1234567, 1.0], ["theirs", 2345678, 1.9]]
    assert stored["data"] == {"raw": [1, 2]}
    assert stored["date"].endswith("+00:00")
    assert stored["machine"]["cores"] >= 1
    assert {"python", "pd_transfer", "numpy"} <= stored["versions"].keys()
    assert read(tmp_path / "new" / "sample.json") == written


def test_a_file_that_is_no_report(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(msgspec.DecodeError):
        read(tmp_path / "x.json")


def test_markdown_is_for_readers():
    lines = markdown(report()).splitlines()
    assert lines[0] == "# sample"
    for line in ("| ours | 1,234,567 | 1 |", "| theirs | 2,345,678 | 1.9 |", "| engines | 1,000 |", "- a note"):
        assert line in lines
    assert (
        len({line.count("|") for line in lines if line.startswith(("| ours", "| what | how", "| --- | --- | ---"))})
        == 1
    )


@pytest.mark.parametrize("folder", [["--out", "/somewhere/else"], ["--out=/somewhere/else"]])
def test_no_report_names_a_folder(folder):
    """Results are tracked, and tracked files name no paths."""
    made = new_report("sample", ["--fast", *folder, "--last"], [TABLE])
    assert made.command == "scripts/bench sample --fast --last"
    assert "somewhere" not in markdown(made)
    assert str(Path.home()) not in markdown(made)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_name_leads_to_a_module(name):
    module, what = BENCHMARKS[name]
    assert importlib.util.find_spec(module) is not None
    assert what


@pytest.mark.parametrize(
    ("arguments", "status", "word"), [([], 2, "required: NAME"), (["nothing"], 2, "'plan'"), (["--help"], 0, "  plan ")]
)
def test_words_that_are_missing_or_wrong(arguments, status, word, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == status
    assert word in "".join(capsys.readouterr())
