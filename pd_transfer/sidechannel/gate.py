"""The door of a ROUTER with keys: admits the listed client keys, counts everybody else, and bounds how often they try.

libzmq asks a ZAP handler (ZeroMQ RFC 27) only about askers that have proven that they hold a client key. Whoever fails
before that - no keys, another server key, no ZeroMQ at all - shows only as events of the ROUTER's monitor. Both are
sockets that the side channel's own poll loop watches; there is no thread, and nobody is admitted while nobody polls.
"""

import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterable

import zmq
from zmq.utils.monitor import parse_monitor_message
from zmq.utils.z85 import encode as z85

from pd_transfer.sidechannel.strangers import WINDOW_SECONDS, StrangerBook

logger = logging.getLogger("pd_transfer.sidechannel")

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_MONITOR_ENDPOINT = "inproc://pd_transfer.gate"

_MONITOR_QUEUE = 100_000
"""Events that may wait, some 10 MB. When the queue is full, libzmq's I/O thread waits for us."""
_EVENTS_PER_TURN = 256
"""Then known peers get their turn."""

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_PROTOCOL_FAILURES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it has no keys; set key_file there",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "its keys are another deployment's",
}
_NO_HANDSHAKE = "it left, or was silent, before the handshake, as engines without keys and foreign programs do"


class Gate:
    """Stands in front of ``router``, from before it is bound. ``clients``: public keys in Z85 of who may ask.

    The owner polls ``sockets`` and calls ``work`` when one of them is readable.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", router: "zmq.Socket[bytes]", clients: Iterable[str]
    ) -> None:
        self.num_refused = 0
        self._clients = {key.encode() for key in clients}
        self._book = StrangerBook()
        self._host_by_descriptor: dict[int, str] = {}
        self._decided: Counter[str] = Counter()
        self._failure = ""
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP_ENDPOINT)
        router.monitor(_MONITOR_ENDPOINT, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, _MONITOR_QUEUE)
        self._monitor.connect(_MONITOR_ENDPOINT)
        self._router = router

    @property
    def sockets(self) -> "tuple[zmq.Socket[bytes], ...]":
        """What to poll for reading."""
        return self._zap, self._monitor

    def work(self) -> None:
        """Take in what is there, without waiting."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_EVENTS_PER_TURN):
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                self._take(event["event"], event["value"])
        with contextlib.suppress(zmq.Again):
            for _ in range(_EVENTS_PER_TURN):
                self._answer(self._zap.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        """Close the router, then what stands before it: at no time is there a router and nobody at its door."""
        # libzmq waits for room in the queue while it holds the lock that ends the monitor.
        with contextlib.suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close()
        self._zap.close(linger=0)

    def _answer(self, question: list[bytes]) -> None:
        _, request_id, _, address, _, _, key, *_ = question
        host, client = address.decode(), z85(key)
        if host in self._host_by_descriptor.values():
            self._decided[host] += 1
        if client in self._clients:
            self._book.admit(host)
            status = b"200"
        else:
            self._refuse(host, f"its key {client.decode()} is not listed; add it with 'pdt keys add'")
            status = b"400"
        self._zap.send_multipart([_ZAP_VERSION, request_id, status, b"", b"", b""])

    def _take(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._host_by_descriptor[value] = self._arrive(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._depart(self._host_by_descriptor.pop(value, ""))
        else:
            # The disconnection follows at once: one I/O thread serves the router, and it finishes what it began.
            self._failure = _PROTOCOL_FAILURES.get(value, _NO_HANDSHAKE)

    def _arrive(self, descriptor: int) -> str:
        """Who it is, an empty string if it has left already; hangs up when the address is shut out."""
        connection = accepted_at(descriptor, self._port())
        if connection is None:
            return ""
        with connection:
            try:
                host = str(connection.getpeername()[0])
                if not self._book.may_try(host):
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                return ""
            return host

    def _port(self) -> int:
        return int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def _depart(self, host: str) -> None:
        """A connection ended. That it failed is known from an event, or from its never having been decided on."""
        failure, self._failure = self._failure, ""
        if not failure and self._decided[host] > 0:
            self._decided[host] -= 1
        else:
            self._refuse(host, failure or _NO_HANDSHAKE)
        if host not in self._host_by_descriptor.values():
            del self._decided[host]

    def _refuse(self, host: str, reason: str) -> None:
        self.num_refused += 1
        if self._book.may_log(host):
            logger.warning(
                "refused a connection to the side channel from %s: %s. More are counted, not logged, for %.0f s",
                host or "an address that was gone at once",
                reason,
                WINDOW_SECONDS,
            )


def accepted_at(descriptor: int, port: int) -> socket.socket | None:
    """The connection to ``port`` of this process that libzmq said has this descriptor; None when there is none.

    The descriptor is libzmq's and may be closed, or anything else's, by now: what is returned is a duplicate, which
    cannot change any more. It is the caller's to close.
    """
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:  # it is no socket
        os.close(duplicate)
        return None
    with contextlib.suppress(OSError):
        # AF_UNIX and others have names of other shapes, or none.
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == port:
            return connection
    connection.close()
    return None
