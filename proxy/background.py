"""Work that never ends, beside the requests."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import NoReturn

logger = logging.getLogger("proxy.background")


@asynccontextmanager
async def in_background(*works: Coroutine[None, None, NoReturn]) -> AsyncIterator[None]:
    """Have endless work done for as long as the context lasts. One that ends all the same is a bug, and is logged."""
    tasks = [asyncio.create_task(work) for work in works]
    for task in tasks:
        task.add_done_callback(_tell_of_a_bug)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tell_of_a_bug(task: asyncio.Task[NoReturn]) -> None:
    if not task.cancelled():
        logger.error("a bug in the proxy ended %s", task.get_coro(), exc_info=task.exception())
