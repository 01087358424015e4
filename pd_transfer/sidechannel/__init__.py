"""How scheduler processes talk.

The protocol (``base``), a fake that ships (``memory``), and ZeroMQ (``zmq``): its sockets (``sockets``), whom it asks
(``dealers``), its keys (``curve``), its door (``gate``) and what that remembers (``strangers``).
"""
