"""What a transport must do: one-sided reads of KV blocks and of lease words.

A prefill worker *serves* memory and takes no part in a read. A decode worker *pulls*. Each side has one object, owned
by one thread. Nothing here waits: a submitted read is polled until it is done or has raised. A read cannot be
cancelled; ``rebuild`` is the last resort and fails every read that is outstanding.
"""

from collections.abc import Sequence
from typing import Protocol

from pd_transfer.core.layout import DescriptorRow, RemoteMemory
from pd_transfer.core.params import PeerKey, Transfer
from pd_transfer.core.plan import Indices


class ServeTransport(Protocol):
    """The prefill worker's side: keeps memory readable for whoever knows the metadata."""

    @property
    def remote_memory(self) -> RemoteMemory:
        """What readers need; constant for the life of the object."""

    def close(self) -> None:
        """Stop serving. Idempotent, never raises."""


class PullTransport(Protocol):
    """The decode worker's side. All methods are called by one thread. Local descriptor rows are fixed at construction."""

    def add_peer(self, key: PeerKey, memory: RemoteMemory, rows: Sequence[DescriptorRow]) -> None:
        """Make a peer's worker readable; ``rows`` are its KV descriptors at their remote addresses.

        Raises TransportError (and leaves nothing behind) when the peer cannot be reached or its metadata is junk,
        ValueError when the key is in use.
        """

    def remove_peer(self, key: PeerKey) -> None:
        """Forget a peer. Unknown keys are ignored; never raises. Its reads must have ended before."""

    def submit_read(self, key: PeerKey, local: Indices, remote: Indices) -> Transfer:
        """Start reading remote descriptor ``remote[i]`` into local descriptor ``local[i]`` for every i.

        Both arrays are int32, equally long and not empty. Raises TransportError when it cannot even start.
        """

    def submit_word_read(self, key: PeerKey, slot: int) -> Transfer:
        """Start reading the peer's lease word ``slot``. Raises TransportError."""

    def poll(self, transfer: Transfer) -> bool:
        """True once every byte has arrived, False while it is outstanding. Raises TransportError when it failed.

        After True or an error the transfer is over: nothing will be written to local memory any more.
        """

    def take_word(self, transfer: Transfer) -> int:
        """The value that a finished word read brought; ends the life of the transfer."""

    def release(self, transfer: Transfer) -> None:
        """Forget a transfer that is over. Unknown transfers are ignored; never raises."""

    def num_outstanding(self) -> int:
        """Transfers submitted and not yet released or taken."""

    def rebuild(self) -> None:
        """Destroy the agent and make a new one: no outstanding read can write any more, all peers are forgotten."""

    def close(self) -> None:
        """Destroy the agent. Idempotent, never raises."""
