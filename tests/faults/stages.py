"""Holds a real read at a stage of its life, from another process, by files in a folder.

The test's half is ``Stages``: it puts ``hold-STAGE`` into the folder and waits for ``reached-STAGE-TRANSFER``. The
engine's half is ``StagedPull``, around the real pull transport, in the engine's pull thread alone.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pd_transfer.core.layout import DescriptorRow, RemoteMemory
from pd_transfer.core.params import PeerKey, Transfer
from pd_transfer.errors import TransportError
from pd_transfer.transport.base import Indices, PullTransport

FOLDER_VARIABLE = "PD_FAULTS_FOLDER"
_DAMAGE = "damage"
_LOOK_SECONDS = 0.005


class Stage(StrEnum):
    """Where a read can be held.

    BEFORE_READ: ordered, not submitted. DURING_READ: submitted, its end not reported. BEFORE_WORD: the KV has arrived,
    the read of its lease word is not submitted. AFTER_WORD: the word has arrived, which is not reported.
    """

    BEFORE_READ = "before-read"
    DURING_READ = "during-read"
    BEFORE_WORD = "before-word"
    AFTER_WORD = "after-word"


class Stages:
    """The test's half. One folder belongs to one engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.clear()

    def clear(self) -> None:
        """Hold and damage nothing."""
        for path in self.folder.iterdir():
            path.unlink()

    @contextlib.contextmanager
    def holding(self, stage: Stage) -> Iterator[None]:
        """Inside, every read that reaches the stage stays there."""
        hold = self.folder / f"hold-{stage}"
        hold.touch()
        try:
            yield
        finally:
            hold.unlink(missing_ok=True)

    @contextlib.contextmanager
    def damaging(self) -> Iterator[None]:
        """Inside, every block that is read becomes zero, and nobody is told: the verdict's positive control."""
        damage = self.folder / _DAMAGE
        damage.touch()
        try:
            yield
        finally:
            damage.unlink(missing_ok=True)

    def num_reached(self, stage: Stage) -> int:
        """How many reads have been held at a stage since ``clear``."""
        return sum(1 for _ in self.folder.glob(f"reached-{stage}-*"))

    def wait(self, stage: Stage, seconds: float, count: int = 1) -> None:
        """Wait until as many reads were held at a stage. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while self.num_reached(stage) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.num_reached(stage)} reads came to {stage} within {seconds} s, of {count}")
            time.sleep(_LOOK_SECONDS)


@dataclass(slots=True)
class _Read:
    """One transfer as the connector knows it. ``inner`` is the real one's name, once it is submitted.

    A read that sets up a connection has no stages.
    """

    submit: Callable[[], Transfer]
    before: Stage | None = None
    after: Stage | None = None
    local: Indices | None = None
    inner: Transfer | None = None
    failure: str | None = None
    is_over: bool = False

    @property
    def is_warm_up(self) -> bool:
        return self.before is None and self.after is None


class StagedPull:
    """A pull transport whose reads stay at a stage for as long as a file says so."""

    def __init__(self, inner: PullTransport, rows: Sequence[DescriptorRow], folder: Path) -> None:
        self._inner = inner
        self._rows = rows
        self._folder = folder
        self._reads: dict[Transfer, _Read] = {}
        self._num_submitted = 0
        self._proof_is_next = False

    def submit_read(self, key: PeerKey, local: Indices, remote: Indices) -> Transfer:
        """See ``PullTransport``, here and below. A read that is held is submitted by a later ``poll``."""
        submit = lambda: self._inner.submit_read(key, local, remote)  # noqa: E731 - it has no other name
        return self._begin(_Read(submit, Stage.BEFORE_READ, Stage.DURING_READ, local))

    def submit_word_read(self, key: PeerKey, slot: int) -> Transfer:
        read = _Read(lambda: self._inner.submit_word_read(key, slot))
        if self._proof_is_next:
            # The connector asks for the proof in the same breath in which it learns that the KV has arrived.
            read.before, read.after = Stage.BEFORE_WORD, Stage.AFTER_WORD
        self._proof_is_next = False
        return self._begin(read)

    def submit_warm_up(self, key: PeerKey) -> Transfer:
        # A word read that follows belongs to the connection, even after KV that nobody wanted a proof of any more.
        self._proof_is_next = False
        return self._begin(_Read(lambda: self._inner.submit_warm_up(key)))

    def _begin(self, read: _Read) -> Transfer:
        if not self._is_held(read.before):
            read.inner = read.submit()
        self._num_submitted += 1
        transfer = Transfer(self._num_submitted)
        self._reads[transfer] = read
        return transfer

    def poll(self, transfer: Transfer) -> bool:
        try:
            read = self._reads[transfer]
        except KeyError:
            raise ValueError(f"transfer {transfer} is unknown or released") from None
        try:
            return self._advance(transfer, read)
        except TransportError as error:
            read.failure, read.is_over = str(error), True
            raise

    def _advance(self, transfer: Transfer, read: _Read) -> bool:
        if read.failure is not None:
            raise TransportError(read.failure)
        if read.is_over:
            return True
        if read.inner is None:
            if self._stays(transfer, read.before):
                return False
            read.inner = read.submit()
        # What a word says is settled before it is held back; a read of KV is left to itself.
        if read.after is Stage.DURING_READ and self._stays(transfer, read.after):
            return False
        if not self._inner.poll(read.inner) or self._stays(transfer, read.after):
            return False
        read.is_over = True
        self._arrived(read)
        return True

    def _arrived(self, read: _Read) -> None:
        if read.local is None:
            return
        self._proof_is_next = True
        if (self._folder / _DAMAGE).exists():
            for row, block in zip(*divmod(read.local, self._rows[0].count), strict=True):
                place = self._rows[row]
                ctypes.memset(place.address + int(block) * place.stride_bytes, 0, place.length_bytes)

    def _is_held(self, stage: Stage | None) -> bool:
        return stage is not None and (self._folder / f"hold-{stage}").exists()

    def _stays(self, transfer: Transfer, stage: Stage | None) -> bool:
        if not self._is_held(stage):
            return False
        # A fault in the middle of connecting is another fault, and another case.
        if not any(read.is_warm_up and not read.is_over for read in self._reads.values()):
            (self._folder / f"reached-{stage}-{transfer}").touch()
        return True

    def take_word(self, transfer: Transfer) -> int:
        read = self._reads[transfer]
        if not read.is_over or read.inner is None:
            raise ValueError(f"transfer {transfer} is not a finished word read")
        word = self._inner.take_word(read.inner)
        del self._reads[transfer]
        return word

    def release(self, transfer: Transfer) -> None:
        read = self._reads.get(transfer)
        if read is None or not read.is_over:
            return
        del self._reads[transfer]
        if read.inner is not None:
            self._inner.release(read.inner)

    def num_outstanding(self) -> int:
        return len(self._reads)

    def rebuild(self) -> None:
        self._fail_all()
        self._inner.rebuild()

    def close(self) -> None:
        self._fail_all()
        self._inner.close()

    def _fail_all(self) -> None:
        for read in self._reads.values():
            if not read.is_over:
                read.failure, read.is_over = "the agent was destroyed", True

    def add_peer(self, key: PeerKey, memory: RemoteMemory, rows: Sequence[DescriptorRow]) -> None:
        self._inner.add_peer(key, memory, rows)

    def remove_peer(self, key: PeerKey) -> None:
        self._inner.remove_peer(key)
