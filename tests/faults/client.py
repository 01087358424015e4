"""Clients of decode: one that waits for its answer, for as long as a deadline says, and one that leaves."""

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import requests

from tests.faults.verdicts import Reply

_PATH = "/v1/completions"


def post(url: str, body: Mapping[str, Any], seconds: float) -> Reply:
    """Ask, and tell what came of it. Never raises for what the server does."""
    try:
        reply = requests.post(url + _PATH, json=body, timeout=seconds)
    except requests.Timeout:
        return Reply(None, trouble=f"no answer within {seconds:.0f} s", timed_out=True)
    except requests.RequestException as error:
        return Reply(None, trouble=str(error))
    try:
        return Reply(reply.status_code, reply.json())
    except ValueError:
        return Reply(reply.status_code, reply.text)


class LeavingClient:
    """Asks when it is made, and hangs up when it is told to; it never reads an answer."""

    def __init__(self, url: str, body: Mapping[str, Any]) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        self._connection.request("POST", _PATH, json.dumps(body), {"Content-Type": "application/json"})

    def leave(self) -> None:
        """Close the connection."""
        self._connection.close()
