"""Our numbers on their way through vLLM: from a scheduler to ``/metrics`` and to the periodic log line."""

import json

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from pd_transfer.core.outcomes import Level
from pd_transfer.vllm.connector import PdConnector
from pd_transfer.vllm.metrics import PdStats
from tests.adapter.fake_model import prompt_of
from tests.adapter.outside import FakeWorldConnector
from tests.adapter.siblings import Control, Sibling

pytestmark = pytest.mark.vllm

PROMPT = prompt_of(100)


@pytest.fixture
def registered():
    """Metrics that a test registers are taken back."""
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


@pytest.fixture(params=["alone", "beside a sibling"])
def settings(request):
    Sibling.control = Control()
    sibling = {
        "kv_connector": "Sibling",
        "kv_connector_module_path": "tests.adapter.siblings",
        "kv_role": "kv_both",
    }
    return {"siblings": (sibling,)} if request.param != "alone" else {}


def ours() -> dict[str, float]:
    """Our lines of ``/metrics``."""
    lines = [line for line in generate_latest(REGISTRY).decode().splitlines() if line.startswith("pd_transfer:")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines) if "_created" not in name}


def test_counters_and_gauges(lab, registered, settings):
    prefill, decode = lab.engine("p", **settings), lab.engine("d", **settings)
    prometheus = KVConnectorProm(decode.config, ["model_name", "engine"], {0: ["m", "0"]})
    lab.decode(decode, PROMPT, lab.hand_off(prefill, PROMPT))
    lab.settle()
    assert not ours()
    for stats in decode.raw_stats:
        prometheus.observe(json.loads(json.dumps(stats)), 0)

    found = ours()
    labels = 'engine="0",model_name="m"'
    assert found[f'pd_transfer:outcomes_total{{{labels},outcome="receive_verified"}}'] == 1
    assert found[f"pd_transfer:tokens_verified_total{{{labels}}}"] == 99
    assert found[f"pd_transfer:bytes_verified_total{{{labels}}}"] == decode.quantities["bytes_verified"] == 64 * 1024
    assert found[f"pd_transfer:descriptors_total{{{labels}}}"] == 64
    assert 0 < found[f"pd_transfer:descriptors_merged_total{{{labels}}}"] <= 64
    blocks = [value for name, value in found.items() if name.startswith("pd_transfer:blocks_verified_total")]
    assert sorted(blocks) == [5] * 5 + [7]
    held = {name: value for name, value in found.items() if name.startswith("pd_transfer:held")}
    assert len(held) == len(Level)
    assert not any(held.values())


def test_the_log_line_adds_up_intervals(lab, monkeypatch, settings):
    prefill, decode = lab.engine("p", **settings), lab.engine("d", **settings)
    # MultiConnector looks its children up by name here, whatever their module path.
    monkeypatch.setitem(KVConnectorFactory._registry, "FakeWorldConnector", lambda: FakeWorldConnector)
    logging = KVConnectorLogging(decode.config.kv_transfer_config)
    lab.decode(decode, PROMPT, lab.hand_off(prefill, PROMPT))
    lab.decode(decode, PROMPT, {"do_remote_prefill": True}, "bad")
    lab.settle()
    said = []
    for stats in decode.raw_stats:
        logging.observe(json.loads(json.dumps(stats)))
    logging.log(lambda text, *arguments: said.append(text % arguments))
    (line,) = said
    for part in ("outcomes receive_verified", "outcomes params_invalid", "quantities tokens_verified"):
        assert part in line
    assert "levels" not in line


def test_our_name_is_known_wherever_our_module_is_loaded():
    """MultiConnector, which looks its children up by name for the log line, would end the API server otherwise."""
    assert KVConnectorFactory.get_connector_class_by_name("PdConnector") is PdConnector


def test_levels_are_the_latest_and_counts_are_sums():
    first = PdStats({"outcomes": {"a": 1}, "levels": {"leases": 3}})
    second = PdStats({"outcomes": {"a": 2, "b": 1}, "quantities": {"q": 5}, "levels": {"leases": 1}})
    total = first.aggregate(second)
    assert total.data == {"outcomes": {"a": 3, "b": 1}, "quantities": {"q": 5}, "levels": {"leases": 1}}
    assert total.reduce() == {"outcomes a": 3, "outcomes b": 1, "quantities q": 5, "levels leases": 1}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert total.reduce() == {"idle": 0}


def test_an_idle_engine_says_nothing_more_than_once(lab):
    engine = lab.engine("x")
    for _ in range(5):
        engine.step()
    assert len(engine.raw_stats) == 1
