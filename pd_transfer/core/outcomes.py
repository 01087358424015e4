"""Everything that this project counts, by name. One list: metrics, logs and documentation follow it."""

from collections import Counter
from enum import StrEnum


class Outcome(StrEnum):
    """How something ended. Each is counted once per event, by the engine that decided it."""

    # Prefill: hand-offs.
    LEASE_OPENED = "lease_opened"
    LEASE_RELEASED = "lease_released"
    LEASE_EXPIRED = "lease_expired"
    LEASE_RESET = "lease_reset"
    HAND_OFF_IMPOSSIBLE = "hand_off_impossible"
    """The prompt cannot be split before its last token; decode computes it."""
    HAND_OFF_OVER_LIMIT = "hand_off_over_limit"
    """Too much of the pool is under lease already; decode computes the prompt."""
    # Prefill: side channel.
    HELLO_WELCOMED = "hello_welcomed"
    HELLO_REFUSED = "hello_refused"
    MESSAGE_MALFORMED = "message_malformed"
    MESSAGE_DROPPED = "message_dropped"
    """The side channel could not deliver it, or took it for junk."""
    HANDSHAKE_REFUSED = "handshake_refused"
    """Somebody without the right keys, or nobody of ours at all, connected to the side channel."""
    # Decode: requests whose params could not be used; the prompt is computed locally.
    PARAMS_INVALID = "params_invalid"
    GRANT_MALFORMED = "grant_malformed"
    GRANT_FORGED = "grant_forged"
    GRANT_OTHER_PROMPT = "grant_other_prompt"
    GRANT_OTHER_LAYOUT = "grant_other_layout"
    GRANT_OTHER_BOOT = "grant_other_boot"
    """Prefill has restarted since it sealed the grant."""
    GRANT_USED = "grant_used"
    GRANT_EXPIRED = "grant_expired"
    HANDSHAKE_TIMED_OUT = "handshake_timed_out"
    PEER_UNREACHABLE = "peer_unreachable"
    """A request waited for a handshake that failed."""
    PEER_REFUSED = "peer_refused"
    PEER_NOT_ALLOWED = "peer_not_allowed"
    # Decode: requests that needed no read.
    NOTHING_TO_READ = "nothing_to_read"
    WITHDRAWN = "withdrawn"
    """The request ended before its read began."""
    # Decode: reads.
    RECEIVE_VERIFIED = "receive_verified"
    RECEIVE_STALE = "receive_stale"
    """The lease word had changed: the lease was over before the last byte arrived."""
    RECEIVE_FAILED = "receive_failed"
    RECEIVE_RETRIED = "receive_retried"
    """A transfer failed; its receive began anew. How that ended is counted apart."""
    RECEIVE_TIMED_OUT = "receive_timed_out"
    RECEIVE_UNCOVERED = "receive_uncovered"
    """The grant did not offer a block that decode needed."""
    RECEIVE_ABORTED = "receive_aborted"
    AGENT_REBUILT = "agent_rebuilt"
    INTERNAL_ERROR = "internal_error"
    """An exception that should not exist was contained. Please report it: the log has it."""


class Quantity(StrEnum):
    """How much was moved; summed over verified reads only."""

    TOKENS_VERIFIED = "tokens_verified"
    BYTES_VERIFIED = "bytes_verified"
    DESCRIPTORS = "descriptors"
    DESCRIPTORS_MERGED = "descriptors_merged"
    READ_MICROSECONDS = "read_microseconds"


class Level(StrEnum):
    """What is held at this moment. All of them are zero on an idle engine that has stepped since its last request."""

    LEASES = "leases"
    LEASED_BLOCKS = "leased_blocks"
    ADMISSIONS = "admissions"
    BORROWED_LEASES = "borrowed_leases"
    RECEIVES = "receives"
    TRANSFERS = "transfers"
    QUARANTINED_BLOCKS = "quarantined_blocks"


Outcomes = Counter[Outcome]
