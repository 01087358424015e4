"""The side channel's CURVE keys: what an engine has to hold, how keys are made, and the files that they lie in.

A key file is JSON with the fields of ``CurveKeys``. Its reader and its maker are both here; who may read it is checked
on the open file.
"""

import os
import stat
from pathlib import Path
from typing import Annotated

import msgspec
import zmq

from pd_transfer.errors import ConfigError

_Z85Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")]
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


def read_keys(path: Path) -> CurveKeys:
    """The keys in a file. Raises ConfigError, which says what to do and shows nothing of the file."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(f"key file {path} is open to others than its owner ({mode:04o}): chmod 600 {path}")
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"key file {path} cannot be read ({error.strerror}): make one with 'pdt keys new', or correct key_file"
        ) from error
    try:
        keys = msgspec.json.decode(content, type=CurveKeys)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # The cause is not chained: some decoders' errors carry the whole document.
        raise ConfigError(f"key file {path} is malformed ({error}): make it anew with 'pdt keys'") from None
    _check_pairs(keys, path)
    return keys


def write_keys(path: Path, keys: CurveKeys) -> None:
    """A new file that only its owner can read. Raises FileExistsError and other OSErrors."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")


def replace_keys(path: Path, keys: CurveKeys) -> None:
    """Write over a key file in one step: a reader sees the old one or the new one. Raises OSError."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    write_keys(draft, keys)
    draft.replace(path)


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _check_pairs(keys: CurveKeys, path: Path) -> None:
    """Halves that do not belong together make handshakes that fail without a word."""
    pairs = {"client": (keys.client_public, keys.client_secret), "server": (keys.server_public, keys.server_secret)}
    for name, (public, secret) in pairs.items():
        if secret is not None and zmq.curve_public(secret.encode()).decode() != public:
            raise ConfigError(
                f"key file {path} is malformed ({name}_secret does not belong to {name}_public): "
                "make it anew with 'pdt keys'"
            )
