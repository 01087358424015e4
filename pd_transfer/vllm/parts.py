"""The outside world of a connector, as one value: tests hand in the fakes that ship."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pd_transfer.config import PdConfig, parse_host_port
from pd_transfer.core.layout import DescriptorRow, MemoryRange
from pd_transfer.core.params import Address
from pd_transfer.sidechannel.base import SideChannel
from pd_transfer.sidechannel.curve import read_keys
from pd_transfer.sidechannel.zmq import ZmqSideChannel
from pd_transfer.transport.base import PullTransport, ServeTransport


@dataclass(frozen=True, slots=True)
class Parts:
    """How to open a side channel (bound or not), to serve (region, lease words), and to pull (region, rows)."""

    open_side_channel: Callable[[Address | None], SideChannel]
    serve: Callable[[str, MemoryRange, MemoryRange], ServeTransport]
    pull: Callable[[str, MemoryRange, Sequence[DescriptorRow]], PullTransport]


def real_parts(config: PdConfig) -> Parts:
    """ZeroMQ and NIXL. Opening a side channel reads the key file, so that only scheduler processes hold keys."""
    parameters = config.nixl_backend_params
    reserved = frozenset(Address(*parse_host_port(peer)) for peer in config.peers)

    def open_side_channel(bind: Address | None) -> SideChannel:
        keys = read_keys(Path(config.key_file)) if config.key_file else None
        return ZmqSideChannel(bind, keys, reserved=reserved)

    def serve(name: str, region: MemoryRange, words: MemoryRange) -> ServeTransport:
        from pd_transfer.transport.nixl import NixlServeTransport  # only workers need NIXL

        return NixlServeTransport(name, region, words, backend_params=parameters)

    def pull(name: str, region: MemoryRange, rows: Sequence[DescriptorRow]) -> PullTransport:
        from pd_transfer.transport.nixl import NixlPullTransport

        return NixlPullTransport(name, region, rows, backend_params=parameters)

    return Parts(open_side_channel, serve, pull)
