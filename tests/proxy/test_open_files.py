"""When the proxy itself has too few files: what it does at its start, and whom it blames."""

import asyncio
import errno
import resource
import socket
import sys

import pytest
from multidict import CIMultiDict

from proxy.config import Timeouts
from proxy.engines import EngineClient
from proxy.errors import EngineFailedError, FailureKind
from proxy.health import Check
from proxy.http1.pool import Pool
from proxy.registry import Engine, Load
from proxy.routing import Role
from tests.proxy.fake_engines import asynchronous


async def started(limit):
    """What a proxy logs up to its first line, and its limits once it listens."""
    command = f"ulimit {limit}; exec {sys.executable} -m proxy --prefill http://p:1 --decode http://d:1 --port 0"
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    await process.stdout.readline()
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    process.terminate()
    _, errors = await process.communicate()
    return soft, hard, errors.decode()


@asynchronous
async def test_the_soft_limit_is_raised_to_the_hard_one():
    soft, hard, _ = await started("-Sn 128")
    assert soft == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@asynchronous
async def test_a_hard_limit_that_is_too_low_is_told():
    soft, hard, errors = await started("-n 512")
    assert soft == hard == 512
    assert "at most 512 files may be open, and 16384 requests at once need 32768" in errors


@asynchronous
@pytest.mark.parametrize(
    ("number", "kind", "found"),
    [
        (errno.EMFILE, FailureKind.OWN, Check.NOT_MADE),
        (errno.ENFILE, FailureKind.OWN, Check.NOT_MADE),
        (errno.ENOBUFS, FailureKind.OWN, Check.NOT_MADE),
        (errno.ENETUNREACH, FailureKind.UNREACHABLE, Check.UNWELL),
    ],
)
async def test_no_engine_is_blamed_for_what_the_proxy_lacks(number, kind, found):
    async def lacking(*_args, **_kwargs):
        raise OSError(number, "no")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with Pool(connect=lacking) as pool:
            client = EngineClient(pool, Timeouts())
            assert await client.check(url, 1.0) is found
            with pytest.raises(EngineFailedError) as failure:
                await client.forward("GET", "/", CIMultiDict(), None, Load(Engine(Role.DECODE, url), 0))
    assert failure.value.kind is kind
    assert failure.value.as_proxy_error().status == 503
