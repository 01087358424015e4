"""A scheduler that registers its engine at a proxy, and takes it off."""

from types import SimpleNamespace

import pytest

from pd_transfer.vllm.scheduler import speaks_for_server
from tests.runtime.fake_proxy import Asked, fake_proxy

pytestmark = pytest.mark.vllm

TOKEN = "0123456789abcdef"
PATH = "/admin/registrations"


@pytest.fixture
def proxy():
    with fake_proxy() as proxy:
        yield proxy


@pytest.fixture
def settings(proxy, tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    return {"register_at": [proxy.url], "register_as": proxy.url, "register_token_file": str(token_file)}


@pytest.mark.parametrize(
    ("role", "roles"),
    [("kv_producer", ["prefill"]), ("kv_consumer", ["decode"]), ("kv_both", ["prefill", "decode"])],
)
def test_an_engine_registers_in_its_role_and_takes_itself_off(lab, proxy, settings, role, roles):
    engine = lab.engine("x", role=role, extra=settings)
    calls = [Asked("POST", PATH, f"Bearer {TOKEN}", {"role": name, "url": proxy.url}) for name in roles]
    assert [proxy.next() for _ in roles] == calls
    engine.close()
    assert proxy.asked_so_far() == [call._replace(method="DELETE") for call in calls]
    del lab.engines["x"]


def test_an_engine_without_the_setting_tells_nobody(lab, proxy):
    lab.engine("x").close()
    del lab.engines["x"]
    assert proxy.asked_so_far() == []


@pytest.mark.parametrize(
    ("index", "local_rank", "own_server", "speaks"),
    [
        (0, None, False, True),  # no data parallelism
        (0, 0, False, True),
        (1, 1, False, False),
        (2, 0, False, False),  # the second node of two, whose API server is on the first
        (2, 0, True, True),  # external or hybrid balancing: the second node has one of its own
        (3, 1, True, False),
    ],
)
def test_one_data_parallel_rank_speaks_for_an_api_server(index, local_rank, own_server, speaks):
    parallel = SimpleNamespace(
        data_parallel_index=index, data_parallel_rank_local=local_rank, local_engines_only=own_server
    )
    assert speaks_for_server(SimpleNamespace(parallel_config=parallel)) is speaks
