"""The side channel's CURVE keys: what an engine has to hold, how keys are made, and the files that they lie in.

A key file is JSON with the fields of ``CurveKeys``. Its reader and its maker are both here; who may read it is checked
on the open file.
"""

import contextlib
import os
import stat
import struct
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zmq
from zmq.utils import z85

from pd_transfer.errors import ConfigError

_Z85Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z")]
_MAX_FILE_BYTES = 1 << 20


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One engine's keys in Z85, 40 characters each. The server pair is the same on every engine of a deployment.

    server_public: whom an asker accepts as a server of this deployment.
    client_public, client_secret: what this engine shows when it asks.
    server_secret: needed to serve; None in an engine that only asks.
    clients: name -> public key of everybody who may ask here; of no meaning in an engine that only asks.
    """

    server_public: _Z85Key
    client_public: _Z85Key
    client_secret: _Z85Key
    server_secret: _Z85Key | None = None
    clients: dict[str, _Z85Key] = {}

    def __repr__(self) -> str:
        """Without the secrets: keys end up in logs and tracebacks."""
        kind = "asks" if self.server_secret is None else f"serves {', '.join(self.clients)}"
        return f"CurveKeys(client_public={self.client_public!r}, server_public={self.server_public!r}, {kind})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich's tracebacks show of it; msgspec's own would show every field."""
        return [("client_public", self.client_public), ("server_public", self.server_public)]


def new_server_keys(name: str) -> CurveKeys:
    """Keys of a new deployment's serving engines, who may ask each other under ``name``."""
    server_public, server_secret = _new_pair()
    client_public, client_secret = _new_pair()
    return CurveKeys(
        server_public=server_public,
        server_secret=server_secret,
        client_public=client_public,
        client_secret=client_secret,
        clients={name: client_public},
    )


def new_client_keys(server: CurveKeys) -> CurveKeys:
    """Keys of an engine that asks a deployment's servers, once they list its ``client_public``."""
    client_public, client_secret = _new_pair()
    return CurveKeys(server_public=server.server_public, client_public=client_public, client_secret=client_secret)


ANYBODY = range(1 << 32)
"""All user ids."""


def read_keys(path: Path, owners: Container[int] | None = None) -> CurveKeys:
    """The keys in a file of one of ``owners``: user ids, by default root's and the effective one.

    Raises ConfigError, which says what to do and shows nothing of the file.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            owners = (0, os.geteuid()) if owners is None else owners
            if advice := unsafe_access(path, status.st_uid, stat.S_IMODE(status.st_mode), owners):
                raise ConfigError(f"key file {path} {advice}")
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"key file {path} cannot be read ({error.strerror}): make one with 'pdt keys new', or correct key_file"
        ) from error
    try:
        keys = msgspec.json.decode(content, type=CurveKeys)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # The cause is not chained: some decoders' errors carry the whole document.
        raise _malformed(path, error) from None
    _check_keys(keys, path)
    return keys


def unsafe_access(path: Path, owner: int, mode: int, owners: Container[int]) -> str | None:
    """What is wrong with who may touch a key file, and what mends it; None when nothing is.

    Root's files may be readable by a group: so Kubernetes mounts a Secret for a container that does not run as root.
    """
    if owner not in owners:
        return f"belongs to user {owner}, who could change it: chown it to the user that runs the engine, or to root"
    allowed = 0o740 if owner == 0 else 0o700
    if mode & 0o777 & ~allowed:
        return f"is open to others than its owner ({mode:04o}): chmod 600 {path}"
    return None


def write_keys(path: Path, keys: CurveKeys) -> None:
    """A new file that only its owner can read, whole and on the disk, or none.

    Raises FileExistsError and other OSErrors.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with removed_on_failure(path):
        _fill(descriptor, keys)
        _sync_folder(path.parent)


def replace_keys(path: Path, keys: CurveKeys) -> None:
    """Write over a key file in one step: a reader sees the old one or the new one, after a crash too.

    Its owner, group and mode stay. Raises OSError, and then the old file is there.
    """
    old = path.stat()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    draft = Path(name)
    with removed_on_failure(draft):
        _fill(descriptor, keys)
        os.chown(draft, old.st_uid, old.st_gid)
        draft.chmod(stat.S_IMODE(old.st_mode))
        draft.replace(path)
    _sync_folder(path.parent)


@contextlib.contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Take a new file away again when what makes it worth having fails."""
    try:
        yield
    except BaseException:
        path.unlink()
        raise


def _fill(descriptor: int, keys: CurveKeys) -> None:
    """Write keys to an open file, wait until the disk has them, and close it."""
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _check_keys(keys: CurveKeys, path: Path) -> None:
    """Keys that no handshake could use make handshakes that fail without a word."""
    pairs = {"client": (keys.client_public, keys.client_secret), "server": (keys.server_public, keys.server_secret)}
    for name, each in [*pairs.items(), *((f"clients.{name}", (key,)) for name, key in keys.clients.items())]:
        if not all(key is None or _is_z85(key) for key in each):
            raise _malformed(path, f"{name} has characters that stand for no key")
    for name, (public, secret) in pairs.items():
        if secret is not None and zmq.curve_public(secret.encode()).decode() != public:
            raise _malformed(path, f"{name}_secret does not belong to {name}_public")


def _is_z85(key: str) -> bool:
    """Whether characters of Z85 stand for bytes: some groups of five mean more than their four bytes hold."""
    try:
        return len(z85.decode(key)) == 32
    except struct.error:
        return False


def _malformed(path: Path, reason: object) -> ConfigError:
    return ConfigError(f"key file {path} is malformed ({reason}): make it anew with 'pdt keys'")
