"""``pdt keys``: what lies in the folder afterwards, and whom the prefill engines admit."""

import os
import stat
import subprocess
import sys

import pytest

from pd_transfer.core.params import Address
from tests.contracts.sidechannel_beds import address_of, until

pytest.importorskip("zmq")

from pd_transfer.cli.main import main
from pd_transfer.sidechannel.curve import read_keys
from pd_transfer.sidechannel.zmq import ZmqSideChannel


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "keys"


def run(*arguments) -> int:
    return main(["keys", *map(str, arguments)])


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def is_admitted(folder, name: str) -> bool:
    server = ZmqSideChannel(Address("127.0.0.1", 0), read_keys(folder / "prefill.key"))
    asker = ZmqSideChannel(keys=read_keys(folder / f"{name}.key"))
    try:
        asker.send_request(address_of(server, "127.0.0.1"), b"hello")
        return until(lambda: (server.poll(0.01) and "heard") or (server.num_refused and "refused")) == "heard"
    finally:
        asker.close()
        server.close()


def test_new_makes_keys_that_work_and_that_only_the_owner_reads(folder, capsys):
    assert run("new", folder) == 0
    assert names(folder) == {"prefill.key", "decode.key"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert is_admitted(folder, "decode")
    assert is_admitted(folder, "prefill"), "engines that do both ask each other"
    shown = capsys.readouterr()
    for path in folder.iterdir():
        keys = read_keys(path)
        assert str(path) in shown.out
        assert keys.client_secret not in shown.out + shown.err


def test_an_engine_that_only_asks_cannot_serve(folder):
    run("new", folder)
    assert read_keys(folder / "decode.key").server_secret is None
    assert read_keys(folder / "prefill.key").server_secret is not None


@pytest.mark.parametrize("existing", ["prefill.key", "decode.key"])
def test_new_writes_nothing_over(folder, capsys, existing):
    folder.mkdir()
    (folder / existing).write_text("mine")
    assert run("new", folder) == 1
    assert names(folder) == {existing}
    assert (folder / existing).read_text() == "mine"
    assert "exists and is not written over" in capsys.readouterr().err


def test_add_and_remove(folder):
    run("new", folder)
    assert run("add", folder, "decode-2") == 0
    assert read_keys(folder / "decode-2.key").server_secret is None
    assert is_admitted(folder, "decode-2")
    copied = (folder / "decode-2.key").read_bytes()
    assert run("remove", folder, "decode-2") == 0
    assert names(folder) == {"prefill.key", "decode.key"}
    (folder / "decode-2.key").touch(mode=0o600)
    (folder / "decode-2.key").write_bytes(copied)
    assert not is_admitted(folder, "decode-2"), "whoever kept the file gets nothing"
    assert is_admitted(folder, "decode")
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_engines_that_are_added_at_the_same_time_are_all_listed(folder):
    run("new", folder)
    names_added = [f"decode-{number}" for number in range(6)]
    add = "import sys; from pd_transfer.cli.main import main; input(); sys.exit(main(['keys', 'add', *sys.argv[1:]]))"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", add, str(folder), name], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        for name in names_added
    ]
    for each in started:
        each.stdin.write(b"\n")
        each.stdin.close()
    assert [each.wait(60) for each in started] == [0] * len(started)
    server = read_keys(folder / "prefill.key")
    assert {
        name: read_keys(folder / f"{name}.key").client_public for name in names_added
    }.items() <= server.clients.items()
    assert names(folder) == {"prefill.key", "decode.key", *(f"{name}.key" for name in names_added)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_lists_an_engine_in_a_file_that_was_given_away(folder):
    run("new", folder)
    os.chown(folder / "prefill.key", 1000, 1001)
    assert run("add", folder, "decode-2") == 0
    assert run("remove", folder, "decode-2") == 0
    status = (folder / "prefill.key").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1000, 1001, 0o600)


FAILING_ADD = """
import resource, sys
from pd_transfer.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(["keys", "add", sys.argv[2], "decode-2"]))
"""


@pytest.mark.parametrize("room", ["for neither file", "for the new file only"])
def test_a_disk_that_is_full_changes_nothing(folder, room):
    run("new", folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    num_bytes = (folder / "decode.key").stat().st_size + (-1 if room == "for neither file" else 0)
    assert (folder / "prefill.key").stat().st_size > num_bytes
    command = [sys.executable, "-c", FAILING_ADD, str(num_bytes), str(folder)]
    failed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (failed.returncode, failed.stderr) == (1, "pdt: [Errno 27] File too large\n")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert run("add", folder, "decode-2") == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("add", "decode"), "lists 'decode' already"),
        (("add", "prefill"), "'prefill' is no engine's name"),
        (("add", "../x"), "'../x' is no engine's name"),
        (("add", ""), "'' is no engine's name"),
        (("add", "kept"), "exists and is not written over"),
        (("remove", "nobody"), "does not list 'nobody'; it lists prefill, decode"),
        (("remove", "prefill"), "'prefill' is no engine's name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_change_nothing(folder, capsys, arguments, sentence):
    run("new", folder)
    (folder / "kept.key").write_text("mine")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    verb, name = arguments
    assert run(verb, folder, name) == 1
    assert sentence in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_without_a_deployment(tmp_path, capsys):
    assert run("add", tmp_path, "decode-2") == 1
    assert "prefill.key cannot be read" in capsys.readouterr().err


def test_a_folder_that_cannot_be(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run("new", tmp_path / "file") == 1
    assert capsys.readouterr().err.startswith("pdt: ")


@pytest.mark.parametrize("arguments", [[], ["keys"], ["keys", "new"], ["keys", "melt", "x"]], ids=" ".join)
def test_words_that_are_missing_or_wrong(arguments):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2


def test_it_runs_as_a_module(folder):
    command = [sys.executable, "-m", "pd_transfer.cli", "keys", "new", str(folder)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert names(folder) == {"prefill.key", "decode.key"}
