"""The side channel's ZeroMQ sockets: their options, their keys, and how frames get in and out of them.

With keys, a ROUTER admits nobody while no ``Gate`` answers for it.
"""

import contextlib

import zmq

from pd_transfer.errors import SideChannelError
from pd_transfer.sidechannel.base import MAX_MESSAGE_BYTES
from pd_transfer.sidechannel.curve import CurveKeys

LINGER_MILLISECONDS = 200
"""How long a closing socket may still deliver: enough for a last Release, and a shutdown nobody notices."""

RECEIVE_QUEUE = 64
"""Unread messages per connection before TCP pushes back, and messages that one ``take`` takes from a socket. Times
``MAX_MESSAGE_BYTES`` it bounds what a hostile peer can park here: 1 GiB per connection."""

MAIN_IO_THREAD = 0b01
NAMES_IO_THREAD = 0b10
"""Affinities. libzmq resolves a peer's name on the I/O thread that connects, which then waits for the resolver (libzmq
issue 3243). Named peers share a thread of their own, so that a slow resolver delays only them."""
NUM_IO_THREADS = 2

_OPTIONS: dict[int, int | bytes] = {
    zmq.LINGER: LINGER_MILLISECONDS,
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    zmq.RCVHWM: RECEIVE_QUEUE,
    # A step may release a thousand leases at once.
    zmq.SNDHWM: 4096,
    # A stranger who connects and says nothing is shown out.
    zmq.HANDSHAKE_IVL: 10_000,
    # Any name here makes libzmq refuse ZMTP 1 and 2, whose greeting is so short that HTTP or noise passes for messages.
    zmq.ZAP_DOMAIN: b"pd_transfer",
}

_ROUTER_OPTIONS: dict[int, int | bytes] = {
    # A reply to a peer that is gone, or whose queue is full, fails and is counted; otherwise it vanishes silently.
    zmq.ROUTER_MANDATORY: 1,
    # A stranger who claims a routing id in use is refused instead of receiving another asker's replies.
    zmq.ROUTER_HANDOVER: 0,
    zmq.AFFINITY: MAIN_IO_THREAD,
}

_DEALER_OPTIONS: dict[int, int | bytes] = {
    # Connecting takes a while; the first request must wait for it. IMMEDIATE would refuse it.
    zmq.IMMEDIATE: 0,
    # Where nobody listens yet: a refused connection costs microseconds, so that one a second is not worth saving.
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
    # Where nobody answers the SYN: the system's own retries wait up to a minute for a host that is back.
    zmq.CONNECT_TIMEOUT: 5000,
}


def new_router(
    context: "zmq.Context[zmq.Socket[bytes]]", heartbeat_seconds: float, keys: CurveKeys | None
) -> "zmq.Socket[bytes]":
    """A ROUTER, not bound. Raises SideChannelError when the keys are an asker's, ZMQError when they are malformed."""
    options = _OPTIONS | _ROUTER_OPTIONS
    if keys is not None:
        if keys.server_secret is None:
            raise SideChannelError(
                "This engine serves, and its key file has no server_secret: set key_file to the deployment's "
                "prefill.key."
            )
        options |= {
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: keys.server_secret.encode(),
            # libzmq admits every client key when nobody answers its questions, unless this is set.
            zmq.ZAP_ENFORCE_DOMAIN: 1,
        }
    return _new_socket(context, zmq.ROUTER, heartbeat_seconds, options)


def new_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", heartbeat_seconds: float, keys: CurveKeys | None
) -> "zmq.Socket[bytes]":
    """A DEALER, not connected. Raises ZMQError when the keys are malformed, or descriptors are used up."""
    options = _OPTIONS | _DEALER_OPTIONS
    if keys is not None:
        options |= {
            zmq.CURVE_SERVERKEY: keys.server_public.encode(),
            zmq.CURVE_PUBLICKEY: keys.client_public.encode(),
            zmq.CURVE_SECRETKEY: keys.client_secret.encode(),
        }
    return _new_socket(context, zmq.DEALER, heartbeat_seconds, options)


def _new_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, heartbeat_seconds: float, options: dict[int, int | bytes]
) -> "zmq.Socket[bytes]":
    heartbeat_milliseconds = int(heartbeat_seconds * 1000)
    heartbeats: dict[int, int | bytes] = {
        zmq.HEARTBEAT_IVL: heartbeat_milliseconds,
        zmq.HEARTBEAT_TIMEOUT: 2 * heartbeat_milliseconds,
    }
    with contextlib.ExitStack() as undo:
        new = undo.enter_context(contextlib.closing(context.socket(kind)))
        for option, value in (options | heartbeats).items():
            new.setsockopt(option, value)
        undo.pop_all()
        return new


def send(via: "zmq.Socket[bytes]", frames: list[bytes]) -> bool:
    """Send without waiting. False when it is impossible: too long, the queue is full, or the asker is gone."""
    if len(frames[-1]) > MAX_MESSAGE_BYTES:
        return False
    try:
        via.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError:
        return False
    return True


def take(source: "zmq.Socket[bytes]", num_frames: int) -> tuple[list[list[bytes]], int]:
    """Messages of ``num_frames`` frames that have arrived, without waiting; and how many others were dropped."""
    messages: list[list[bytes]] = []
    num_dropped = 0
    with contextlib.suppress(zmq.Again):
        for _ in range(RECEIVE_QUEUE):
            frames = source.recv_multipart(zmq.NOBLOCK)
            if len(frames) == num_frames:
                messages.append(frames)
            else:
                num_dropped += 1
    return messages, num_dropped
