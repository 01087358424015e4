"""How scheduler processes talk: the protocol (``base``), a fake that ships (``memory``), and ZeroMQ (``zmq``)."""
