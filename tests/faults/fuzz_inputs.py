"""Inputs that are almost right: messages, params and grants that were bent in one or several places, and plain junk."""

import base64
import hmac
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from pd_transfer.core.messages import PROTOCOL_VERSION, Message, encode
from pd_transfer.core.params import parse_grant


class Chance(Random):
    """Random numbers in half the time; that some come up a trifle more often does not matter here."""

    def choice(self, seq: Any) -> Any:
        return seq[int(self.random() * len(seq))]

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        assert step == 1
        return int(self.random() * start) if stop is None else start + int(self.random() * (stop - start))


Tree = Any
"""What msgpack or JSON is made of: dicts, lists and leaves."""

ODD_LEAVES: tuple[Tree, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
    *(0.5, 1.0, -0.0, 1e308, math.inf, math.nan),
    *("", "x", "0", "\0", "line\nbreak\r\x1b[2J", "é" * 40, "x" * 70, "y" * 9000),
    *([], {}, [[]], [None] * 3, list(range(1500)), [[0, 0, 0]], [[1, 2**63, -1]]),
    *({"type": "Hello"}, {"": {}}, {"0": [1.5]}),
)
ODD_BYTES: tuple[Tree, ...] = (b"", b"\0", b"\xff" * 40, bytes(range(256)))
DEEP = tuple(msgspec.Raw(opening * depth + b"\xc0") for opening in (b"\x91", b"\x81\xa0") for depth in (60, 5000))
"""Nested further than a decoder that recurses can follow."""
LONG = tuple(
    msgspec.Raw(bytes([head]) + size + b"\xc0") for head in b"\xdd\xdf\xdb\xc6" for size in (b"\0\1\0\0", b"\xff" * 4)
)
"""Lists, maps, texts and bytes that claim a length and do not have it."""


def message_tree(message: Message) -> Tree:
    """A message as its codec's maps and lists."""
    return msgspec.msgpack.decode(encode(message)[1:])


def bent(random: Random, tree: Tree, odd: Sequence[Tree]) -> Tree:
    """A copy of the tree that differs in one place; most places are deep inside."""
    if isinstance(tree, dict | list) and tree and random.random() < 0.9:
        key = random.choice(list(tree)) if isinstance(tree, dict) else random.randrange(len(tree))
        copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
        copy[key] = bent(random, tree[key], odd)
        return copy
    return random.choice(_BENDS)(random, tree, odd)


def _odd(random: Random, _: Tree, odd: Sequence[Tree]) -> Tree:
    return random.choice(odd)


def _nudged(random: Random, leaf: Tree, odd: Sequence[Tree]) -> Tree:
    """Still of its type, as a rule."""
    match leaf:
        case bool():
            return not leaf
        case int():
            changed = random.choice(
                [leaf + 1, leaf - 1, -leaf, leaf ^ 1 << random.randrange(63), leaf * 2, float(leaf)]
            )
            return changed if -(2**63) <= changed < 2**64 else 0
        case str() | bytes():
            return leaf[: random.randrange(len(leaf) + 1)] + leaf[random.randrange(len(leaf) + 1) :]
        case dict() | list():
            return _reshaped(random, leaf, odd)
    return random.choice(odd)


def _reshaped(random: Random, tree: Tree, odd: Sequence[Tree]) -> Tree:
    """Something too much, too little, or in another order."""
    if isinstance(tree, list):
        some = random.sample(tree, random.randrange(len(tree) + 1))
        return random.choice([some, tree + some, tree * random.choice([0, 2, 3]), [*tree, random.choice(odd)]])
    if isinstance(tree, dict):
        kept = {key: value for key, value in tree.items() if random.random() < 0.8}
        return (
            kept if random.random() < 0.5 else {**tree, random.choice(["type", "extra", "x" * 300]): random.choice(odd)}
        )
    return (
        [tree] * random.choice([1, 2, 1500])
        if random.random() < 0.3
        else _nudged(random, {} if tree is None else tree, odd)
    )


_BENDS: tuple[Callable[[Random, Tree, Sequence[Tree]], Tree], ...] = (_odd, _nudged, _nudged, _reshaped)


def bent_often(random: Random, tree: Tree, odd: Sequence[Tree]) -> Tree:
    """Bent in one place as a rule, so that what is checked later is reached."""
    for _ in range(random.choice([1, 1, 1, 1, 2, 2, 3, 8])):
        tree = bent(random, tree, odd)
    return tree


def bent_bytes(random: Random, payload: bytes) -> bytes:
    """Flipped, cut, stretched or joined to itself; the first byte is the version as often as not."""
    changed = bytearray(payload)
    for _ in range(random.choice([1, 1, 2, 5, 30])):
        at = random.randrange(len(changed) + 1)
        match random.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = random.randbytes(random.choice([1, 4, 60]))
            case 3:
                del changed[at : at + random.choice([1, 4, 60])]
            case 4:
                changed += changed[at : at + 2000]
        del changed[100_000:]
    return bytes(changed)


class Payloads:
    """What may come over a side channel instead of ``samples``: bent, cut, junk, and sometimes one of them as it is."""

    def __init__(self, random: Random, samples: Sequence[Message]) -> None:
        self._random = random
        self._good = [encode(message) for message in samples]
        self._trees = [message_tree(message) for message in samples]
        self._odd = (*ODD_LEAVES, *ODD_BYTES, *DEEP, *LONG, *(tree["type"] for tree in self._trees))

    def take(self) -> bytes:
        """The next one."""
        random, chance = self._random, self._random.random()
        if chance < 0.6:
            tree = bent_often(random, random.choice(self._trees), self._odd)
            return bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(tree)
        if chance < 0.8:
            return bent_bytes(random, random.choice(self._good))
        if chance < 0.9:
            return random.randbytes(random.choice([0, 1, 2, 9, 200, 5000]))
        return random.choice(self._good)


class Params:
    """What may come as ``kv_transfer_params`` instead of good ones."""

    def __init__(self, random: Random, hosts: Sequence[str]) -> None:
        self._random = random
        # Python hands such text on from JSON; msgpack has none.
        self._odd = (*ODD_LEAVES, "\ud800", *hosts, [[[[[]]]]], "true")
        self._hosts = hosts

    def take(self, good: dict[str, Any], keys: Sequence[bytes]) -> object:
        """``keys`` are those that a forger, or somebody who found out, would seal with."""
        random, chance = self._random, self._random.random()
        if chance < 0.1:
            return bent(random, random.choice(self._odd), self._odd)
        if chance < 0.4:
            return bent_often(random, good, self._odd)
        if chance < 0.5:
            return good | {"remote_host": random.choice(self._hosts), "remote_port": random.randrange(5600, 5604)}
        changed = good | {"grant": self.grant(good["grant"], keys)}
        return changed if random.random() < 0.7 else bent_often(random, changed, self._odd)

    def grant(self, text: str, keys: Sequence[bytes]) -> str:
        """A grant with other content and the old seal, or one of the forger's; or other text altogether."""
        random = self._random
        raw = base64.urlsafe_b64decode(text)
        chance = random.random()
        if chance < 0.3:
            return base64.urlsafe_b64encode(bent_bytes(random, raw)).decode()
        if chance < 0.4:
            return bent_bytes(random, text.encode()).decode("latin-1")
        sealed = parse_grant(text)
        assert not isinstance(sealed, str)
        odd = (*ODD_LEAVES, *ODD_BYTES, *DEEP, *LONG)
        payload = msgspec.msgpack.encode(bent_often(random, msgspec.msgpack.decode(sealed.payload), odd))
        seal = sealed.seal if random.random() < 0.5 else forged_seal(payload, random.choice(keys))
        return base64.urlsafe_b64encode(raw[:1] + seal + payload).decode()


def forged_seal(payload: bytes, key: bytes) -> bytes:
    """A seal as ``core.params`` makes it, also for payloads that no Grant encodes to."""
    return hmac.digest(key, payload, "sha256")[:16]
