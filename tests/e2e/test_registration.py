"""Real engines that register themselves at a proxy that was started with none."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from tests.e2e.pair import TOKENS_VERIFIED, Pair, assert_nothing_held, gain, same_settings
from tests.e2e.proxy_stack import proxy_of, until
from tests.stack.engines import REPOSITORY, START_SECONDS, Engine, EngineSettings, ServerProcess, complete, free_port
from tests.stack.engines import running as running_servers
from tests.stack.exactness import TOP_LOGPROBS, difference, generated, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKEN = "0123456789abcdef"
ANSWER = {"max_tokens": 4, "logprobs": TOP_LOGPROBS, "ignore_eos": True}
NUM_TOKENS = 159


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


def registering(settings: EngineSettings, proxy: ServerProcess, token_file: Path) -> EngineSettings:
    """An engine that registers at a proxy, and has the time to take itself off."""
    port = free_port()
    extra = {
        "register_at": [proxy.url],
        "register_as": f"http://127.0.0.1:{port}",
        "register_token_file": str(token_file),
    }
    return replace(settings, port=port, extra=extra, arguments=(*settings.arguments, "--shutdown-timeout", "10"))


def listed(proxy: ServerProcess) -> dict[str, str]:
    """Role -> address of the engines that the proxy knows."""
    reply = requests.get(proxy.url + "/admin/engines", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=10)
    return {engine["role"]: engine["url"] for engine in reply.json()["engines"]}


def is_ready(proxy: ServerProcess) -> bool:
    return requests.get(proxy.url + "/ready", timeout=10).status_code == 200


def test_engines_come_and_go_by_themselves(random_models: Mapping[str, Path], token_file: Path) -> None:
    logs = REPOSITORY / "logs" / "e2e" / "registration"
    with proxy_of([], [], logs, "--admin-token-file", str(token_file)) as proxy:
        proxy.wait_ready(seconds=30)
        assert not is_ready(proxy)
        settings = same_settings(random_models["hybrid"], "--block-size", "32")
        prefill, decode = (registering(each, proxy, token_file) for each in settings)
        pair = Pair(Engine("prefill", prefill, logs), Engine("decode", decode, logs), logs)
        with running_servers(pair.prefill, pair.decode):
            until(lambda: is_ready(proxy), "an engine of each role", seconds=START_SECONDS)
            assert listed(proxy) == {"prefill": pair.prefill.url, "decode": pair.decode.url}
            prompt = random_prompt(NUM_TOKENS, seed=46, num_words=250)

            def ask() -> None:
                got = generated(complete(proxy.url, prompt, cache_salt="registered", **ANSWER))
                assert difference(got, generated(pair.single(prompt, "registered", **ANSWER))) == 0.0

            gained = gain(pair.decode, ask, {TOKENS_VERIFIED: NUM_TOKENS - 1})
            assert gained[TOKENS_VERIFIED] == NUM_TOKENS - 1
            assert_nothing_held(pair)
            pair.decode.stop()
            # By its own word: the proxy would forget it much later.
            until(lambda: listed(proxy) == {"prefill": pair.prefill.url}, "the end of decode")
            assert not is_ready(proxy)
    assert TOKEN not in "".join(path.read_text(errors="replace") for path in logs.iterdir())
