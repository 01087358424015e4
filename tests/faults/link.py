"""A link to a network namespace of its own on this machine, to be cut: prefill lives behind it."""

import contextlib
import functools
import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

_NAMESPACE = f"pdfaults{os.getpid()}"
_NEAR, _FAR = f"pdfn{os.getpid()}", f"pdff{os.getpid()}"
_NEAR_HOST, FAR_HOST = "10.99.7.1", "10.99.7.2"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


class Link:
    """Exists while entered. Processes behind it start with ``prefix``; ``near_device`` leads to them."""

    prefix = ("ip", "netns", "exec", _NAMESPACE)
    far_host = FAR_HOST
    near_device, far_device = _NEAR, _FAR

    def __enter__(self) -> Self:
        _ip("netns", "add", _NAMESPACE)
        try:
            _ip("link", "add", _NEAR, "type", "veth", "peer", "name", _FAR)
            _ip("link", "set", _FAR, "netns", _NAMESPACE)
            _ip("addr", "add", f"{_NEAR_HOST}/24", "dev", _NEAR)
            _ip("-n", _NAMESPACE, "addr", "add", f"{FAR_HOST}/24", "dev", _FAR)
            _ip("link", "set", _NEAR, "up")
            _ip("-n", _NAMESPACE, "link", "set", "lo", "up")
            _ip("-n", _NAMESPACE, "link", "set", _FAR, "up")
        except subprocess.CalledProcessError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The kernel takes its time to remove what is left in a namespace, and a name is free only then.
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", _NEAR)
        _ip("netns", "del", _NAMESPACE)

    def cut(self) -> None:
        """No packet passes any more, in either direction."""
        _ip("-n", _NAMESPACE, "link", "set", _FAR, "down")

    def heal(self) -> None:
        """Packets pass."""
        _ip("-n", _NAMESPACE, "link", "set", _FAR, "up")


@functools.cache
def why_no_link() -> str:
    """Why this machine cannot have such a link; empty when it can."""
    if shutil.which("ip") is None:
        return "there is no ip command"
    try:
        with Link():
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces do not work here: {error.stderr.decode().strip()}"
