"""The outside world of an engine's connectors: the fakes that ship, and the connector class that is given them."""

import threading
from typing import Any, ClassVar

from pd_transfer.config import PdConfig
from pd_transfer.core.messages import decode
from pd_transfer.core.params import Address
from pd_transfer.sidechannel.base import Received, ReplyReceived
from pd_transfer.sidechannel.memory import MemoryNetwork, MemorySideChannel
from pd_transfer.transport.memory import MemoryFabric, MemoryPullTransport, MemoryRead, MemoryServeTransport
from pd_transfer.vllm.connector import PdConnector
from pd_transfer.vllm.parts import Parts


class LockedFabric(MemoryFabric):
    """Every rank's I/O thread and the test use the fabric at once."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()

    @property
    def reads(self) -> list[MemoryRead]:
        with self._lock:
            return super().reads

    def start(self, *args: Any, **kwargs: Any) -> MemoryRead:
        with self._lock:
            return super().start(*args, **kwargs)


class RecordingSideChannel(MemorySideChannel):
    """Remembers what its engine asked of others, and what they answered."""

    def __init__(self, network: MemoryNetwork, address: Address | None) -> None:
        super().__init__(network, address)
        self.asked: list[object] = []
        self.answers: list[object] = []

    def send_request(self, address: Address, payload: bytes) -> None:
        self.asked.append(decode(payload))
        super().send_request(address, payload)

    def poll(self, timeout_seconds: float | None) -> list[Received]:
        received = super().poll(timeout_seconds)
        self.answers += [decode(each.payload) for each in received if isinstance(each, ReplyReceived)]
        return received


class Outside:
    """What one engine's connectors are handed, and what they made of it."""

    def __init__(self, network: MemoryNetwork, fabric: MemoryFabric) -> None:
        self.network = network
        self.fabric = fabric
        self.side_channels: list[RecordingSideChannel] = []
        self.serving: list[MemoryServeTransport] = []
        self.pulling: list[MemoryPullTransport] = []

    def parts(self) -> Parts:
        def keep(things: list[Any], thing: Any) -> Any:
            things.append(thing)
            return thing

        return Parts(
            lambda address: keep(self.side_channels, RecordingSideChannel(self.network, address)),
            lambda name, region, words: keep(self.serving, MemoryServeTransport(self.fabric, name, region, words)),
            lambda _, region, rows: keep(self.pulling, MemoryPullTransport(self.fabric, region, rows)),
        )


class FakeWorldConnector(PdConnector):
    """The connector with fakes around it. vLLM loads it by this module's path; ``outside`` is set just before."""

    outside: ClassVar[Outside]

    @classmethod
    def make_parts(cls, config: PdConfig) -> Parts:
        return cls.outside.parts()
