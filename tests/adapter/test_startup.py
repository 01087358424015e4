"""Start-up: what is refused and how, the three roles, and the names under which vLLM finds the connector."""

from importlib.metadata import entry_points

import pytest
import torch
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from pd_transfer.errors import ConfigError, UnsupportedError
from pd_transfer.vllm import connector, plugin
from tests.adapter.fake_model import continuation, prompt_of
from tests.adapter.geometry import Settings, engine_config
from tests.adapter.harness import tensor_parallel_rank
from tests.adapter.outside import FakeWorldConnector

pytestmark = pytest.mark.vllm

MODULE = "pd_transfer.vllm.connector"
SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)
PROMPT = prompt_of(100)


@pytest.fixture
def config(model_folder):
    return engine_config("x", Settings(model=model_folder, connector=("PdConnector", MODULE)))


def make(config, groups, role=KVConnectorRole.SCHEDULER):
    kv_cache_config = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
    with tensor_parallel_rank(0):
        return KVConnectorFactory.create_connector(config, role, kv_cache_config)


def group(*names, spec, **fields):
    return KVCacheGroupSpec([f"model.layers.{name}" for name in names], spec, **fields)


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (group(1, 3, spec=ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=32)), "ChunkedLocalAttentionSpec"),
        (group(1, 3, spec=MLAAttentionSpec(**SHAPE)), "MLAAttentionSpec"),
        (group(1, 3, spec=MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,))), "MambaSpec"),
        (group(1, 3, spec=FullAttentionSpec(**SHAPE, non_causal=True)), "is not causal"),
        (group(1, 3, spec=FULL, enable_kv_transfer=False), "does not take part in KV transfer"),
        (group(1, 3, spec=FULL, host_resident=True), "does not take part in KV transfer"),
    ],
    ids=["chunked local", "MLA", "Mamba", "not causal", "not transferred", "on the host"],
)
def test_a_layer_group_that_is_not_supported_is_named(config, odd, reason, role):
    with pytest.raises(UnsupportedError, match=reason) as caught:
        make(config, [group(0, 2, spec=FULL), odd], role)
    assert "KV cache group 1 (model.layers.1, model.layers.3)" in str(caught.value)
    assert "docs/limits.md" in str(caught.value)


@pytest.mark.parametrize("layout", ["BHLNC", "LHBNC"])
def test_a_layout_that_spreads_a_block_is_refused(config, layout):
    spread = KVCacheConfig(10, [], [group(0, spec=FULL)], kv_cache_layout=layout)
    with tensor_parallel_rank(0), pytest.raises(UnsupportedError, match=f"{layout} spreads a block's bytes"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, spread)


def test_supported_groups_are_accepted(config):
    groups = [group(0, spec=FULL), group(1, spec=SlidingWindowSpec(**SHAPE, sliding_window=64))]
    for role in KVConnectorRole:
        made = make(config, groups, role)
        assert type(made) is connector.PdConnector
        made.shutdown()


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize(
    ("part", "setting", "value", "said"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode context parallelism"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill context parallelism"),
        ("model_config", "enable_sleep_mode", True, "sleep mode"),
        ("model_config", "is_encoder_decoder", True, "an encoder-decoder model"),
        ("cache_config", "calculate_kv_scales", True, "dynamic KV scales"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value and "config" not in value else "",
)
def test_an_engine_setting_that_is_not_supported_is_named(config, part, setting, value, said, role):
    vars(getattr(config, part))[setting] = value
    with pytest.raises(UnsupportedError, match=f"does not support {said}"):
        make(config, [group(0, spec=FULL)], role)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"lease_second": 3}, "no setting 'lease_second': did you mean"),
        ({"read_seconds": -1}, "read_seconds is -1"),
        ({"read_seconds": "x"}, "read_seconds"),
        ({"peers": ["nonsense"]}, "peers has 'nonsense'"),
        ({"side_channel_host": "0.0.0.0"}, "set 'insecure': true"),
    ],
    ids=range(5),
)
def test_settings_that_cannot_work_are_named(config, extra, said):
    config.kv_transfer_config.kv_connector_extra_config = extra
    with pytest.raises(ConfigError, match=said):
        make(config, [group(0, spec=FULL)])


def test_a_consumer_with_keys_is_told_whom_to_ask(config):
    transfer = config.kv_transfer_config
    transfer.kv_role, transfer.kv_connector_extra_config = "kv_consumer", {"key_file": "k"}
    with pytest.raises(ConfigError, match="list the prefill engines in 'peers'"):
        make(config, [group(0, spec=FULL)])
    transfer.kv_connector_extra_config = {"key_file": "k", "allowed_peers": ["10.0.0.0/8"]}
    make(config, [group(0, spec=FULL)])
    transfer.kv_role, transfer.kv_connector_extra_config = "kv_both", {"key_file": "k"}
    make(config, [group(0, spec=FULL)])


def test_a_token_to_register_with_that_cannot_be_read_stops_the_start(config, tmp_path):
    config.kv_transfer_config.kv_connector_extra_config = {
        "register_at": ["http://127.0.0.1:1"],
        "register_as": "http://127.0.0.1:2",
        "register_token_file": str(tmp_path / "missing"),
    }
    with pytest.raises(ConfigError, match=r"register_token_file .*missing cannot be read \(No such file"):
        make(config, [group(0, spec=FULL)])
    # Workers hold no token.
    make(config, [group(0, spec=FULL)], KVConnectorRole.WORKER)


def test_workers_of_another_connector(lab):
    engine = lab.engine("x")
    with pytest.raises(ConfigError, match="another connector's workers"):
        engine.connector.set_xfer_handshake_metadata({0: KVConnectorHandshakeMetadata()})


def test_pipeline_ranks_in_the_handshake(lab):
    engine = lab.engine("x")
    description = engine.workers[0].connector.get_handshake_metadata()
    with pytest.raises(ValueError, match="pp_rank > 0"):
        engine.connector.set_xfer_handshake_metadata_pp_aware({(1, 0): description})


def test_ranks_with_different_layouts(lab):
    few, many = lab.engine("few", num_blocks=600), lab.engine("many")
    ranks = {
        0: few.workers[0].connector.get_handshake_metadata(),
        1: many.workers[0].connector.get_handshake_metadata(),
    }
    with pytest.raises(UnsupportedError, match="2 different KV layouts"):
        few.connector.set_xfer_handshake_metadata(ranks)


def test_a_cache_that_is_not_where_its_configuration_says(lab):
    worker = lab.engine("x").workers[0]
    swapped = dict(worker.caches)
    swapped["model.layers.0"] = worker.caches["model.layers.6"]
    with tensor_parallel_rank(0), pytest.raises(UnsupportedError, match=r"layer model\.layers\.0 lies at byte"):
        worker.connector.register_kv_caches(swapped)
    apart = {**worker.caches, "model.layers.3": worker.caches["model.layers.3"].clone()}
    with tensor_parallel_rank(0), pytest.raises(UnsupportedError, match="lies in 2 storages"):
        worker.connector.register_kv_caches(apart)


def test_layers_that_share_anothers_cache_need_nothing(lab):
    engine = lab.engine("x")
    FakeWorldConnector.outside = engine.outside
    with tensor_parallel_rank(0):
        made = KVConnectorFactory.create_connector(engine.config, KVConnectorRole.WORKER, engine.kv_cache_config)
        caches = engine.workers[0].caches
        made.register_kv_caches({**caches, "model.layers.99": caches["model.layers.0"]})
    described = made.get_handshake_metadata().worker.layout
    assert described == engine.workers[0].connector.get_handshake_metadata().worker.layout
    made.shutdown()


def test_the_built_in_connectors_port_variable_is_understood(lab, monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5731")
    assert lab.engine("x").address == ("127.0.0.1", 5731)


def test_a_producer_and_a_consumer(lab):
    prefill, decode = lab.engine("p", role="kv_producer"), lab.engine("d", role="kv_consumer")
    assert not prefill.outside.pulling
    assert not decode.outside.serving
    assert decode.outside.side_channels[0].bound_port is None
    assert lab.decode(decode, PROMPT, lab.hand_off(prefill, PROMPT)).tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"receive_verified": 1}


def test_roles_ignore_what_is_not_theirs(lab):
    prefill, decode = lab.engine("p", role="kv_producer"), lab.engine("d", role="kv_consumer")
    params = lab.hand_off(prefill, PROMPT)
    # A producer is asked to pull, a consumer to hand off, and to hand off what it has pulled.
    assert lab.decode(prefill, PROMPT, params, "r").tokens == continuation(PROMPT, 4)
    assert lab.decode(decode, PROMPT, {"do_remote_decode": True}, "r").tokens == continuation(PROMPT, 4)
    assert decode.results["r"].params is None
    assert not decode.outcomes
    prefill.end_leases()


@pytest.mark.parametrize("name", ["PdConnector", "NixlConnector"])
def test_found_by_module_path(config, name):
    transfer = KVTransferConfig(kv_connector=name, kv_connector_module_path=MODULE, kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(transfer) is getattr(connector, name)
    assert KVConnectorFactory.supports_hma_config(transfer)
    config.kv_transfer_config = transfer
    made = make(config, [group(0, spec=FULL)])
    # One class under both names: MultiConnector and the metrics know it by the class's name.
    assert type(made) is connector.PdConnector
    assert type(made).get_required_kvcache_layout(config) == "LBHNC"
    made.shutdown()


def test_found_by_name_once_the_plugin_has_registered(monkeypatch):
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    transfer = KVTransferConfig(kv_connector="PdConnector", kv_role="kv_both")
    with pytest.raises(ValueError, match="Unsupported connector type"):
        KVConnectorFactory.get_connector_class(transfer)
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class(transfer) is connector.PdConnector
    assert KVConnectorFactory.supports_hma_config(transfer)


def test_vllm_finds_the_plugin():
    (entry,) = entry_points(group="vllm.general_plugins", name="pd_transfer")
    assert entry.load() is plugin.register


def test_shutting_down_twice_is_the_same_as_once(lab):
    engine = lab.engine("x")
    lab.hand_off(engine, PROMPT)
    engine.end_leases()
    lab.settle()
    engine.close()
    engine.close()
    assert engine.outside.side_channels[0].poll(0) == []
    del lab.engines["x"]


def test_after_shutdown_no_grant_is_good(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    lab.introduce(prefill, decode)
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.run(lambda: lab.fabric.reads)
    prefill.close()
    lab.fabric.let_go()
    lab.finish(decode, "r")
    del lab.engines["p"]
    assert decode.results["r"].tokens == continuation(PROMPT, 4)
    assert decode.outcomes["receive_failed"] == 1
