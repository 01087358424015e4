"""``pdt plan``: its figures against an oracle of their own, vLLM's own groups, and files that are no configurations."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pd_transfer.cli.geometry import Group, block_tables, engine_layout, flattened, kv_groups
from pd_transfer.cli.main import main
from pd_transfer.cli.models import Attention, LayerKind, Model, load_model
from pd_transfer.cli.transfers import NUMBERINGS, attended_positions, compare, make_pull
from pd_transfer.core.layout import invalid_layout
from pd_transfer.errors import ConfigError, UnsupportedError

MODELS = Path(__file__).resolve().parents[2] / "benchmarks" / "plan" / "models"
ALL = sorted(path.stem for path in MODELS.glob("*.json"))
REFUSED = {"llama-4-scout-like", "deepseek-v3"}
SERVED = [name for name in ALL if name not in REFUSED]


def model(name: str, num_ranks: int = 1) -> Model:
    return load_model(MODELS / f"{name}.json", num_ranks)


def config(tmp_path, **values) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def show(capsys, *arguments) -> str:
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def descriptors(shown: str, transfer: str) -> int:
    """The number in a row of the last table."""
    (line,) = [line for line in shown.splitlines() if line.startswith(f"│ {transfer} ")]
    return int(line.split("│")[2].replace(",", ""))


# -------------------------------------------------------------------------------------------------------------- figures


def test_the_seeds_example(capsys):
    """Gemma-3-4b, blocks of 64, 4000 tokens."""
    shown = show(capsys, "--model", MODELS / "gemma-3-4b.json", "--prompt-tokens", 4000, "--block-size", 64)
    expected = {
        "flat: every group as full attention": 2142,
        "built-in hybrid: windows and a block more": 825,
        "ours": 808,
        "ours, merged, blocks contiguous": 34,
        "ours, merged, blocks scattered": 808,
        "least: what the last token looks at": 808,
    }
    assert {transfer: descriptors(shown, transfer) for transfer in expected} == expected
    assert "202 MiB" in shown


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("block_size", [16, 64])
def test_ours_is_the_least_at_every_length(name, block_size):
    rng = random.Random(name)
    lengths = [2, 3, block_size, block_size + 1, 127, 128, 129, *(rng.randrange(2, 3000) for _ in range(12))]
    for num_tokens in lengths:
        found = compare(model(name), num_tokens, block_size)
        assert found.ours is not None
        assert (found.ours.num_bytes, found.ours.num_descriptors) == (
            found.least.num_bytes,
            found.least.num_descriptors,
        )


@pytest.mark.parametrize("name", SERVED)
def test_merging_leaves_a_run_per_layer(name):
    """Cut at every eighth position of the block table, or never."""
    found = compare(model(name), 5000, 16)
    cuts = {"contiguous": 0, "runs of 8": 0}
    for group, count in zip(found.groups, found.ours.num_blocks, strict=True):
        positions = sorted(attended_positions(group, 5000))
        assert len(positions) == count
        cuts["contiguous"] += len(group.layers)
        cuts["runs of 8"] += len(group.layers) * len({position // 8 for position in positions})
    assert {name: found.merged[name] for name in cuts} == cuts
    assert found.merged["scattered"] == found.ours.num_descriptors


def brute_force(group: Group, num_tokens: int) -> set[int]:
    """The positions that a layer's last query reaches, from a mask of queries by keys."""
    reach = group.reach_tokens
    last = [
        key
        for key in range(num_tokens)
        if group.attention in (Attention.FULL, Attention.MLA)
        or (group.attention is Attention.SLIDING and key > num_tokens - 1 - reach)
        or (group.attention is Attention.CHUNKED and key >= (num_tokens - 1) - (num_tokens - 1) % reach)
    ]
    return {key // group.block_size_tokens for key in last if key != num_tokens - 1}


@pytest.mark.parametrize("attention", list(Attention))
def test_the_oracle_agrees_with_a_mask(attention):
    reach = 7 if attention in (Attention.SLIDING, Attention.CHUNKED) else None
    group = Group(4, (0,), (LayerKind(attention, reach, 2),), None)
    for num_tokens in range(1, 40):
        assert attended_positions(group, num_tokens) == brute_force(group, num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "lacks"), [(1022, False), (1023, True), (1024, False), (1039, True), (126, False)]
)
def test_where_the_built_in_connector_lacks_a_block(num_tokens, lacks):
    found = compare(model("gpt-oss-20b"), num_tokens, 16)
    assert (found.built_in_fault is not None) is lacks
    assert (found.built_in.num_bytes < found.least.num_bytes) is lacks


def test_blocks_are_longer_where_pages_are_smaller():
    groups = kv_groups(model("gemma-4-like"), 16)
    assert [(group.attention, group.block_size_tokens) for group in groups] == [(Attention.SLIDING, 16)] * 5 + [
        (Attention.FULL, 32)
    ]
    assert len({page for group in groups for page in group.page_bytes()}) == 1


def test_pages_that_cannot_be_made_equal_are_padded():
    layers = (LayerKind(Attention.SLIDING, 64, 200), LayerKind(Attention.FULL, None, 300)) * 2
    groups = kv_groups(Model("padded", "bfloat16", 1, layers), 16)
    assert [(group.block_size_tokens, group.page_bytes()[0], group.stride_bytes) for group in groups] == [
        (16, 3200, 4800),
        (16, 4800, 4800),
    ]
    found = compare(Model("padded", "bfloat16", 1, layers), 100, 16)
    assert found.merged["contiguous"] == found.ours.num_blocks[0] * 2 + 2, "padded blocks lie apart"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("numbering", NUMBERINGS)
def test_layouts_are_ones_that_a_peer_would_accept(name, numbering):
    for groups in (kv_groups(model(name), 16), kv_groups(flattened(model(name)), 16)):
        tables = block_tables(groups, 3000, NUMBERINGS[numbering])
        used = [block for table in tables for block in table if block]
        assert len(set(used)) == len(used)
        assert invalid_layout(engine_layout(groups, max(used) + 1)) is None


def test_a_rank_has_its_share():
    whole, half = (compare(model("llama-3-8b", ranks), 1000, 16).ours for ranks in (1, 2))
    assert (half.num_bytes, half.num_descriptors) == (whole.num_bytes / 2, whole.num_descriptors)
    assert compare(model("gemma-3-1b", 4), 1000, 16).ours == compare(model("gemma-3-1b"), 1000, 16).ours, "one KV head"


def test_layers_that_share_keep_nothing(tmp_path):
    shape = {"model_type": "gemma3_text", "num_hidden_layers": 12}
    all_layers = load_model(config(tmp_path, **shape)).layers
    assert load_model(config(tmp_path, **shape, num_kv_shared_layers=4)).layers == all_layers[:8]


# --------------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("name", "spec"), [("llama-4-scout-like", "ChunkedLocalAttentionSpec"), ("deepseek-v3", "MLAAttentionSpec")]
)
def test_a_model_that_is_refused_says_why(capsys, name, spec):
    shown = " ".join(show(capsys, "--model", MODELS / f"{name}.json", "--prompt-tokens", 16384).split())
    assert f"refuses this model at start-up: {spec} is not supported" in shown
    assert "│ ours │ refused │" in shown
    assert ("the decode engine dies" in shown) is (name == "llama-4-scout-like")


def test_unequal_tensor_parallel_sizes_are_not_supported_yet(capsys):
    arguments = ("--model", MODELS / "llama-3-8b.json", "--prompt-tokens", 1000)
    shown = show(capsys, *arguments, "--tp", 2, 1)
    assert "Not supported yet: prefill with tensor parallel 2 and decode with 1" in shown
    assert "tensor parallel 2, figures of one rank" in shown
    assert "tensor parallel 1\n" in shown
    equal = show(capsys, *arguments, "--tp", 2, 2)
    assert "Not supported" not in equal
    assert "All 2 ranks together: 126 MiB" in equal


def test_it_imports_no_engine():
    command = "import sys; from pd_transfer.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    arguments = ["plan", "--model", str(MODELS / "gemma-3-1b.json"), "--prompt-tokens", "100"]
    done = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "numpy" in imported
    assert not imported & {"vllm", "torch", "nixl", "transformers"}


# ------------------------------------------------------------------------------------------------------- configurations

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "it has no 'num_hidden_layers'; use the model's complete config.json"),
        ({**LLAMA, "num_hidden_layers": "two"}, "'num_hidden_layers' is 'two'; it has to be a whole number"),
        ({**LLAMA, "num_hidden_layers": 0}, "'num_hidden_layers' is 0; it has to be a whole number, 1 or more"),
        ({**LLAMA, "torch_dtype": "int3"}, "its dtype is 'int3'"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "one entry for each of the 2 layers"),
        ({**LLAMA, "sliding_window": 64}, 'add "layer_types"'),
        ({**LLAMA, "num_kv_shared_layers": 2}, "all 2 layers share the KV of others"),
    ],
)
def test_a_configuration_that_cannot_be_used(tmp_path, values, sentence):
    with pytest.raises(ConfigError, match=r"config\.json: ") as raised:
        load_model(config(tmp_path, **values))
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({**LLAMA, "layer_types": ["linear_attention"] * 2}, "layers of type 'linear_attention' are not supported"),
        ({**LLAMA, "mamba_d_state": 16}, "the model keeps state beside KV (mamba_d_state)"),
        ({**LLAMA, "is_encoder_decoder": True}, "encoder-decoder models are not supported"),
    ],
)
def test_a_model_without_attention_kv_alone(tmp_path, values, sentence):
    with pytest.raises(UnsupportedError) as raised:
        load_model(config(tmp_path, **values))
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        (LLAMA, [(Attention.FULL, None)] * 2),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 8}, [(Attention.SLIDING, 8)] * 2),
        ({**LLAMA, "sliding_window": 8, "use_sliding_window": False}, [(Attention.FULL, None)] * 2),
        (
            {**LLAMA, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            [(Attention.FULL, None), (Attention.SLIDING, 8)],
        ),
        (
            {**LLAMA, "attention_chunk_size": 8, "no_rope_layers": [1, 0]},
            [(Attention.CHUNKED, 8), (Attention.FULL, None)],
        ),
        ({**LLAMA, "sliding_window": 8, "sliding_window_pattern": 1}, [(Attention.FULL, None)] * 2),
    ],
)
def test_what_layers_look_at(tmp_path, values, kinds):
    found = load_model(config(tmp_path, **values))
    assert [(kind.attention, kind.reach_tokens) for kind in found.layers] == kinds
    assert found.layers[0].token_bytes == 2 * 4 * 16 * 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "cannot be read"), ("{", "is not JSON"), ("[1]", "holds no JSON object"), ("\xff", "is not JSON")],
)
def test_a_file_that_is_no_configuration(tmp_path, capsys, content, sentence):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    assert main(["plan", "--model", str(path), "--prompt-tokens", "100"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pdt: {path}")
    assert sentence in line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt-tokens", 1], "2 or more"),
        (["--prompt-tokens", 100, "--block-size", 0], "1 or more"),
        (["--prompt-tokens", 100, "--tp", 0, 1], "1 or more"),
        (["--prompt-tokens", 100, "--tp", 3, 3], "cannot be divided among 3 ranks; choose another --tp"),
    ],
)
def test_numbers_that_cannot_be(capsys, arguments, sentence):
    assert main(["plan", "--model", str(MODELS / "llama-3-8b.json"), *map(str, arguments)]) == 1
    assert sentence in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------- vLLM


def vllm_groups(found: Model, block_size: int):
    """What vLLM makes of the same layers: (layers, block size, bytes of a page with its padding) of each group."""
    import torch
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

    from tests.adapter.geometry import Settings, engine_config, write_model

    def spec(kind: LayerKind):
        shape = {
            "block_size": block_size,
            "num_kv_heads": 1,
            "head_size": kind.token_bytes // 4,
            "dtype": torch.bfloat16,
        }
        if kind.attention is Attention.SLIDING:
            return SlidingWindowSpec(**shape, sliding_window=kind.reach_tokens)
        if kind.attention is Attention.CHUNKED:
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=kind.reach_tokens)
        return FullAttentionSpec(**shape)

    def groups(folder: Path):
        specs = {str(layer): spec(kind) for layer, kind in enumerate(found.layers)}
        config = engine_config("geometry", Settings(write_model(folder)))
        return [
            (tuple(map(int, group.layer_names)), group.kv_cache_spec.block_size, group.kv_cache_spec.page_size_bytes)
            for group in kv_cache_utils.get_kv_cache_groups(config, specs)
        ]

    return groups


PADDED = Model("padded", "bfloat16", 1, (LayerKind(Attention.SLIDING, 64, 64), LayerKind(Attention.FULL, None, 96)) * 3)
BALANCED = Model(
    "balanced",
    "bfloat16",
    1,
    (LayerKind(Attention.SLIDING, 64, 64),) * 12 + (LayerKind(Attention.FULL, None, 64),) * 13,
)


@pytest.mark.vllm
@pytest.mark.parametrize("name", [*(name for name in ALL if name != "deepseek-v3"), "padded", "balanced"])
def test_groups_are_vllms_own(tmp_path, name):
    found = {"padded": PADDED, "balanced": BALANCED}.get(name) or model(name)
    for each in (found, flattened(found)):
        ours = [
            (
                group.layers,
                group.block_size_tokens,
                sum(group.page_bytes())
                if len({*group.page_bytes()}) > 1
                else group.stride_bytes or group.page_bytes()[0],
            )
            for group in kv_groups(each, 16)
        ]
        assert vllm_groups(each, 16)(tmp_path / "model") == ours


def test_a_pull_plans_what_it_was_given():
    pull = make_pull(kv_groups(model("gemma-3-1b"), 16), 1000, NUMBERINGS["runs of 8"])
    plan = pull.plan()
    assert plan.local.tolist() == plan.remote.tolist(), "both sides are numbered alike"
    assert len(plan.local) == sum(
        count * len(group.layers) for count, group in zip(plan.num_blocks_by_group, pull.layout.groups, strict=True)
    )
