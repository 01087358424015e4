"""``pdt keys``: make a deployment's key files, and let engines in or out. See docs/adr/0007."""

import argparse
import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pd_transfer.errors import ConfigError
from pd_transfer.sidechannel.curve import (
    ANYBODY,
    CurveKeys,
    new_client_keys,
    new_server_keys,
    read_keys,
    removed_on_failure,
    replace_keys,
    write_keys,
)

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

SERVER = "prefill"
FIRST_CLIENT = "decode"

_RESTART = f"copy {SERVER}.key to every prefill engine and restart them"


def add_to(commands: "Commands") -> None:
    """Register the command and its verbs."""
    verbs = commands.add_parser("keys", help="make key files for the side channel").add_subparsers(
        required=True, metavar="VERB"
    )
    new = verbs.add_parser("new", help=f"a new deployment: {SERVER}.key and {FIRST_CLIENT}.key")
    new.set_defaults(run=_new)
    add = verbs.add_parser("add", help="a key file for one more engine that asks")
    add.set_defaults(run=_add)
    remove = verbs.add_parser("remove", help="an engine may not ask any more")
    remove.set_defaults(run=_remove)
    for verb in (new, add, remove):
        verb.add_argument("folder", type=Path, metavar="FOLDER")
    for verb in (add, remove):
        verb.add_argument("name", metavar="NAME")


def _new(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder):
        _make(folder)


def _make(folder: Path) -> None:
    server = new_server_keys(SERVER)
    client = new_client_keys(server)
    files = {
        folder / f"{FIRST_CLIENT}.key": client,
        folder / f"{SERVER}.key": _with_clients(server, {**server.clients, FIRST_CLIENT: client.client_public}),
    }
    for path in files:
        _must_be_new(path)
    for path, keys in files.items():
        write_keys(path, keys)
        print(f"{path}: set it as key_file on {path.stem} engines")


def _add(arguments: argparse.Namespace) -> None:
    name = _valid_name(arguments.name)
    server_path, path = arguments.folder / f"{SERVER}.key", arguments.folder / f"{name}.key"
    with _locked(arguments.folder):
        server = read_keys(server_path, ANYBODY)  # it is the engine's; whoever may write it may run this command
        if name in server.clients:
            raise ConfigError(f"{server_path} lists {name!r} already; remove it first, or choose another name")
        _must_be_new(path)
        client = new_client_keys(server)
        write_keys(path, client)
        with removed_on_failure(path):  # nobody would list it
            replace_keys(server_path, _with_clients(server, {**server.clients, name: client.client_public}))
    print(f"{path}: set it as key_file on the new engine; {_RESTART}")


def _remove(arguments: argparse.Namespace) -> None:
    name = _valid_name(arguments.name)
    server_path = arguments.folder / f"{SERVER}.key"
    with _locked(arguments.folder):
        server = read_keys(server_path, ANYBODY)  # it is the engine's; whoever may write it may run this command
        if name not in server.clients:
            raise ConfigError(f"{server_path} does not list {name!r}; it lists {', '.join(server.clients)}")
        others = {other: key for other, key in server.clients.items() if other != name}
        replace_keys(server_path, _with_clients(server, others))
        (arguments.folder / f"{name}.key").unlink(missing_ok=True)
    print(f"{name} is not listed any more; {_RESTART}: until then it keeps what it has")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two commands at once would each write back the list that they read."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _with_clients(server: CurveKeys, clients: dict[str, str]) -> CurveKeys:
    return msgspec.structs.replace(server, clients=clients)


def _valid_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name == SERVER:
        raise ConfigError(f"{name!r} is no engine's name here: use letters, digits, '.', '_', '-', and not {SERVER!r}")
    return name


def _must_be_new(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} exists and is not written over: remove it first, or choose another folder")
