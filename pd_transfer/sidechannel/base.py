"""What a side channel must do: carry opaque requests to peers' addresses and opaque replies back.

One endpoint per scheduler process, owned by one thread at a time (only ``wake``, ``num_dropped`` and ``num_refused``
may be used by others). It can serve (when bound), ask (any address), or both. Messages may be lost; nothing here waits
except ``poll``; nothing from the network raises. Messages between two endpoints keep their order in each direction.

After ``close`` every method does nothing, and ``poll`` returns an empty list at once.
"""

from dataclasses import dataclass
from typing import Protocol

from pd_transfer.core.params import Address

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Longer messages are dropped: by the sender, or with the connection by whoever receives one from a foreign sender.
A Welcome of 1,000 layers and 64 ranks is below 1 MiB."""


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """A peer asks. ``origin`` names where the reply must go; it means nothing else."""

    origin: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReplyReceived:
    """A peer that we asked at ``address`` answers."""

    address: Address
    payload: bytes


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The established connection to ``address`` broke. Requests without a reply by now will not get one.

    Comes after the last reply of that connection. The next request to the address connects anew. An address where
    nobody ever answered, or that we disconnected ourselves, is not reported.
    """

    address: Address


Received = RequestReceived | ReplyReceived | ConnectionLost


class SideChannel(Protocol):
    """One endpoint. See the module's docstring for who may call what."""

    @property
    def bound_port(self) -> int | None:
        """The port that peers can ask; None when this endpoint only asks."""

    @property
    def num_dropped(self) -> int:
        """Messages that this endpoint is known to have dropped: malformed, too long, or impossible to send."""

    @property
    def num_refused(self) -> int:
        """Connections to this endpoint that ended without the right keys. What they sent is dropped uncounted."""

    def poll(self, timeout_seconds: float | None) -> list[Received]:
        """Wait for the next messages, at most ``timeout_seconds`` (None: for ever), or until ``wake`` is called.

        Returns what has arrived, oldest first per peer; an empty list after a timeout or a wake-up. A flood comes in
        several calls.
        """

    def send_request(self, address: Address, payload: bytes) -> None:
        """Send to a peer, connecting on first use. Never blocks or raises; what cannot be sent is dropped.

        Where nobody listens, the request is dropped or waits for a listener until ``disconnect``.
        """

    def send_reply(self, origin: bytes, payload: bytes) -> None:
        """Answer a request. Never blocks or raises; dropped when the asker is gone."""

    def disconnect(self, address: Address) -> None:
        """Close the connection to an address. Unknown addresses are ignored; a later send connects anew."""

    def wake(self) -> None:
        """Make a waiting ``poll`` return, or the next one if none waits. From any thread; never blocks or raises."""

    def close(self) -> None:
        """Close everything. Idempotent; undelivered messages are dropped after at most 200 ms."""
