"""What can go wrong with a message or a connection. A connection that breaks is Python's own ``ConnectionError``."""


class MessageError(Exception):
    """A client sent what is no HTTP, or more than is taken. ``status`` is the answer to that."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ConnectError(Exception):
    """There is no connection, so that not a byte was sent. The cause tells why, if the system did."""


class StaleConnectionError(ConnectionResetError):
    """A connection that was kept ended before a byte of an answer came: the peer may not have seen the request."""
