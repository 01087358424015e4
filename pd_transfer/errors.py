"""Every error that this package raises.

PdTransferError
 +-- ConfigError               the operator's settings cannot work; the message says what to change
 |    +-- UnsupportedError     the model or the parallel layout is outside docs/limits.md
 +-- TransportError            a transfer or a peer connection failed; the peer or the network is at fault
 +-- SideChannelError          the side channel could not be opened
 +-- InvalidTransitionError    an event that a state machine does not allow; always a bug of ours

Bytes and JSON from outside never raise: they become refusals (see ``core.params`` and ``core.messages``).
"""


class PdTransferError(Exception):
    """Base of all errors of this package."""


class ConfigError(PdTransferError):
    """The operator's settings cannot work. The message names the setting and what to do."""


class UnsupportedError(ConfigError):
    """The model or the parallel layout is not supported. The message names the layer group and the reason."""


class TransportError(PdTransferError):
    """A transfer, or the connection to a peer's worker, failed."""


class SideChannelError(PdTransferError):
    """The side channel could not be opened."""


class InvalidTransitionError(PdTransferError):
    """A state machine was given an event that its table does not allow. Carries the subject's story."""
