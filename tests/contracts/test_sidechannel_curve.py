"""Key files: who can read them, what is wrong with them, and that nothing shows their secrets."""

import os
import re
import stat
from pathlib import Path

import msgspec
import pytest

from pd_transfer.errors import ConfigError

pytest.importorskip("zmq")

from pd_transfer.sidechannel.curve import (
    ANYBODY,
    CurveKeys,
    new_client_keys,
    new_server_keys,
    read_keys,
    replace_keys,
    unsafe_access,
    write_keys,
)


@pytest.fixture(scope="module")
def server():
    return new_server_keys("prefill")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prefill.key"


def secrets_of(keys: CurveKeys) -> list[str]:
    return [secret for secret in (keys.client_secret, keys.server_secret) if secret is not None]


def written(path, keys, **changes):
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(keys) | changes))
    return path


def test_what_is_written_is_read(path, server):
    write_keys(path, server)
    assert read_keys(path) == server
    client = new_client_keys(server)
    replace_keys(path, client)
    assert read_keys(path) == client
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_only_the_owner_may_read(path, server):
    write_keys(path, server)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    replace_keys(path, server)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_is_not_written_over(path, server):
    write_keys(path, server)
    with pytest.raises(FileExistsError):
        write_keys(path, new_server_keys("other"))
    assert read_keys(path) == server


@pytest.mark.parametrize("mode", [0o604, 0o610, 0o620, 0o602, 0o601])
def test_a_file_that_others_may_touch_is_refused(path, server, mode):
    write_keys(path, server)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{path} is open to others.*{mode:04o}.*chmod 600 {path}"):
        read_keys(path)
    path.chmod(0o400)
    assert read_keys(path) == server


ENGINE, ELSE = 1000, 1001


@pytest.mark.parametrize(
    ("owner", "mode", "wrong"),
    [
        (ENGINE, 0o600, None),
        (ENGINE, 0o400, None),
        (ENGINE, 0o700, None),
        (ENGINE, 0o640, "0640"),
        (ENGINE, 0o604, "0604"),
        (0, 0o400, None),
        (0, 0o440, None),
        (0, 0o640, None),
        (0, 0o460, "0460"),
        (0, 0o450, "0450"),
        (0, 0o444, "0444"),
        (0, 0o442, "0442"),
        (0, 0o441, "0441"),
        (ELSE, 0o600, f"belongs to user {ELSE}.*chown it to the user that runs the engine"),
        (ELSE, 0o440, f"belongs to user {ELSE}.*chown it to the user that runs the engine"),
    ],
    ids=lambda value: f"{value:o}" if isinstance(value, int) else "",
)
def test_whose_file_may_be_how_open(owner, mode, wrong):
    """A Kubernetes Secret is root's, and its group's to read."""
    advice = unsafe_access(Path("prefill.key"), owner, mode, (0, ENGINE))
    assert (advice is None) == (wrong is None)
    if wrong is not None:
        assert re.search(wrong, advice)


@pytest.fixture
def as_root():
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")


def test_somebody_elses_file_is_refused(path, server, as_root):
    write_keys(path, server)
    os.chown(path, ELSE, -1)
    with pytest.raises(ConfigError, match=f"{path} belongs to user {ELSE}.*chown it"):
        read_keys(path)
    assert read_keys(path, ANYBODY) == server
    os.chown(path, 0, ELSE)
    path.chmod(0o440)
    assert read_keys(path) == server


def test_who_may_read_stays_when_a_file_is_replaced(path, server, as_root):
    write_keys(path, server)
    os.chown(path, ENGINE, ELSE)
    path.chmod(0o440)
    replace_keys(path, new_client_keys(server))
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (ENGINE, ELSE, 0o440)


def test_a_file_that_is_not_there(path):
    with pytest.raises(ConfigError, match=rf"{path} cannot be read \(No such file or directory\).*pdt keys new"):
        read_keys(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[]", b"{}", b"not json", b'{"server_public": "\xc3"}', b"[" * 100_000],
    ids=["empty", "bytes", "list", "no fields", "text", "bad utf-8", "deep"],
)
def test_a_file_that_is_no_key_file(path, content):
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"key file {path} is malformed"):
        read_keys(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"server_public": "short"},
        {"client_secret": "~" * 40},
        {"client_secret": 5},
        {"server_secret": "\u00e9" * 40},
        {"clients": ["x"]},
        {"clients": {"decode": "short"}},
        {"client_secret": "#" * 40},
        {"clients": {"decode": "0" * 40 + "\n"}},
        {"clients": {"decode": "#" * 40}},
        {"clients": {"client": "#" * 40}},
        {"unknown": 1},
    ],
    ids=str,
)
def test_fields_that_are_no_keys(path, server, changes):
    with pytest.raises(ConfigError, match=f"key file {path} is malformed"):
        read_keys(written(path, server, **changes))
    assert read_keys(written(path, server)) == server


@pytest.mark.parametrize("half", ["client", "server"])
def test_halves_that_do_not_belong_together(path, server, half):
    other = msgspec.to_builtins(new_server_keys("prefill"))
    with pytest.raises(ConfigError, match=f"{half}_secret does not belong to {half}_public"):
        read_keys(written(path, server, **{f"{half}_secret": other[f"{half}_secret"]}))


# -------------------------------------------------------------------------------------------------------------- secrets


def shown_by(error: BaseException) -> str:
    """All that a log of an exception could show, causes and contexts included."""
    shown = []
    while error is not None:
        shown.append(f"{error} {error!r} {error.args!r} {vars(error)!r}")
        error = error.__cause__ or error.__context__
    return "\n".join(shown)


def test_secrets_are_not_shown(server):
    client = new_client_keys(server)
    for keys in (server, client):
        for text in (repr(keys), str(keys), f"{keys}", f"{[keys]}"):
            assert keys.client_public in text, "the control: it does show which keys these are"
            assert not any(secret in text for secret in secrets_of(keys))
        shown = dict(keys.__rich_repr__())
        assert shown["client_public"] == keys.client_public
        assert not any(secret in shown.values() for secret in secrets_of(keys))
        assert not shown.keys() - {"client_public", "server_public"}


@pytest.mark.parametrize(
    "changes",
    [{"unknown": 1}, {"clients": 1}, {"server_public": "x"}, {"client_public": "0" * 40}, {"server_public": "#" * 40}],
)
def test_errors_do_not_show_secrets(path, server, changes):
    with pytest.raises(ConfigError) as raised:
        read_keys(written(path, server, **changes))
    assert not any(secret in shown_by(raised.value) for secret in secrets_of(server))


def test_an_error_of_broken_json_does_not_show_secrets(path, server):
    content = written(path, server).read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match="malformed") as raised:
        read_keys(path)
    assert not any(secret in shown_by(raised.value) for secret in secrets_of(server))
    assert server.client_secret in shown_by(ValueError(content.decode())), "the control: it would be seen"
