"""HTTP/1.1 on asyncio's protocols, both ends, as far as the proxy needs it (ADR 0013).

    timing      a deadline that costs nothing to move
    flow        what goes out, and the wait until it is taken
    body        what comes in, and the hold on whoever sends more than is read
    heads       heads as bytes
    content     the same without its coding
    request     what a client wants, and its answer        server    connections of clients
    response    what an engine answers                     client    connections to engines, kept for the next request

httptools cuts bytes into messages. What it refuses is refused here, and nothing that a peer sends raises in a protocol.
Nothing here knows what the proxy is for.
"""
