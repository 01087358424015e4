"""A router in front of prefill and decode engines: every request is prefilled on one and decoded on another.

    rules, pure:       fields, endpoints, dialects   what becomes of a body, and how errors are written
                       relay, prompts, affinity      the two legs' bodies, lists of prompts, keys of a request
                       routing, health               which engine, and whether it can be trusted
    what is known:     registry                      engines, their loads and standing
                       admission                     requests inside and waiting
    what is done:      engines                       HTTP to an engine, and its failures
                       exchange, releases            one request across both legs, and the KV that nobody will use
                       checks, config_file           beside the requests
    what is told:      story, journal, metrics, tracing, spans; ``sight`` holds them together
    faces:             server, respond               clients
                       operations, admin, status.html   operators
                       command_line, config          whoever starts it
    HTTP/1.1:          http1                         connections of clients and to engines, and nothing of the above
    put together:      service, __main__

Room for the next feature is told where it would go: a field in ``fields``, an endpoint in ``endpoints``, a policy in
``routing``, evidence about an engine in ``health``, an option in ``command_line``, a fact about a request in
``journal``.
"""
