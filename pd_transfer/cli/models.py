"""A model's ``config.json`` (Hugging Face form) -> what each layer keeps of a token. Imports neither vLLM nor torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pd_transfer.errors import ConfigError, UnsupportedError


class Attention(StrEnum):
    """What a layer's queries look at: all earlier tokens, the last few, their own chunk, or a latent of all."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "MLA"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """``reach_tokens`` is a window's or a chunk's length, None without. ``token_bytes``: one token's KV on one rank."""

    attention: Attention
    reach_tokens: int | None
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """The layers that keep KV, in the model's order, as one of ``num_ranks`` tensor parallel ranks holds them."""

    name: str
    dtype: str
    num_ranks: int
    layers: tuple[LayerKind, ...]


_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Published Gemma 3 configurations leave out what equals transformers' defaults. Source: Gemma3TextConfig.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
}

# Every n-th layer is full attention, for models whose configuration may leave ``layer_types`` out.
_FULL_EVERY = {"gpt_oss": 2, "gemma2": 2, "cohere2": 4, "gemma4_text": 6, "llama4_text": 4}
_ALL_SLIDE = frozenset({"mistral", "mixtral", "starcoder2", "phi3"})
_LAYER_TYPES = {
    "full_attention": Attention.FULL,
    "sliding_attention": Attention.SLIDING,
    "chunked_attention": Attention.CHUNKED,
}


class _Fields:
    """The text model's part of a configuration; what is missing or of the wrong kind raises ConfigError."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def text(self, name: str, default: str) -> str:
        return str(self._values.get(name) or default)

    def is_off(self, name: str) -> bool:
        """Whether a switch is there and false."""
        return self._values.get(name) is False

    def number(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(f"it has no {name!r}; use the model's complete config.json")
        if not isinstance(value, int) or value < least:
            raise self.error(f"{name!r} is {value!r}; it has to be a whole number, {least} or more")
        return value

    def items(self, name: str, length: int) -> list[Any]:
        """A list with one entry for each layer."""
        value = self._values[name]
        if not isinstance(value, list) or len(value) != length:
            raise self.error(f"{name!r} has to list one entry for each of the {length} layers")
        return value

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: {what}")


def load_model(path: Path, num_ranks: int = 1) -> Model:
    """Read a ``config.json``, or the one in a folder.

    Raises ConfigError when it cannot be used, UnsupportedError for a model that keeps something else than attention KV.
    """
    path = path / "config.json" if path.is_dir() else path
    whole = _read(path)
    inner = whole.get("text_config")
    values = {**whole, **inner} if isinstance(inner, dict) else whole
    values = {**_DEFAULTS.get(str(values.get("model_type")), {}), **values}
    fields = _Fields(path, values)
    _check_family(fields, values)
    dtype = fields.text("dtype", fields.text("torch_dtype", "bfloat16"))
    if dtype not in _DTYPE_BYTES:
        raise fields.error(f"its dtype is {dtype!r}; known are {', '.join(_DTYPE_BYTES)}")
    name = str(whole.get("_name_or_path") or (path.parent.name if path.name == "config.json" else path.stem))
    return Model(name, dtype, num_ranks, _layers(fields, _DTYPE_BYTES[dtype], num_ranks))


def _read(path: Path) -> dict[str, Any]:
    try:
        whole = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); name a model's config.json or its folder"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); name a model's config.json or its folder") from error
    if not isinstance(whole, dict):
        raise ConfigError(f"{path} is no model's configuration: it holds no JSON object")
    return whole


def _check_family(fields: _Fields, values: Mapping[str, Any]) -> None:
    state = [name for name in values if name.startswith(("mamba_", "ssm_", "linear_num_"))]
    if state:
        raise UnsupportedError(f"the model keeps state beside KV ({state[0]}); see docs/limits.md")
    if values.get("is_encoder_decoder"):
        raise UnsupportedError("encoder-decoder models are not supported; see docs/limits.md")


def _layers(fields: _Fields, element_bytes: int, num_ranks: int) -> tuple[LayerKind, ...]:
    num_layers = fields.number("num_hidden_layers")
    if "kv_lora_rank" in fields:
        # One latent and one rotary key for all heads; every rank holds all of it.
        latent = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim")
        return (LayerKind(Attention.MLA, None, latent * element_bytes),) * num_layers
    attentions = _attentions(fields, num_layers)
    kinds = {attention: _kind(fields, attention, element_bytes, num_ranks) for attention in set(attentions)}
    # The last layers of some models read an earlier layer's KV and keep none.
    num_shared = fields.number("num_kv_shared_layers", 0, least=0)
    if num_shared >= num_layers:
        raise fields.error(f"all {num_layers} layers share the KV of others ('num_kv_shared_layers' is {num_shared})")
    return tuple(kinds[attention] for attention in attentions[: num_layers - num_shared])


def _attentions(fields: _Fields, num_layers: int) -> list[Attention]:
    if "layer_types" in fields:
        return [_named(name) for name in fields.items("layer_types", num_layers)]
    model_type = fields.text("model_type", "of no type")
    if "attention_chunk_size" in fields:
        if "no_rope_layers" in fields:
            ropes = fields.items("no_rope_layers", num_layers)
            return [Attention.CHUNKED if rope else Attention.FULL for rope in ropes]
        return _every(fields, model_type, num_layers, Attention.CHUNKED)
    if "sliding_window" not in fields or fields.is_off("use_sliding_window"):
        return [Attention.FULL] * num_layers
    if model_type in _ALL_SLIDE:
        return [Attention.SLIDING] * num_layers
    return _every(fields, model_type, num_layers, Attention.SLIDING)


def _every(fields: _Fields, model_type: str, num_layers: int, local: Attention) -> list[Attention]:
    """Every n-th layer sees everything, the others do not."""
    if "sliding_window_pattern" not in fields and model_type not in _FULL_EVERY:
        raise fields.error(
            f"it does not say which layers see everything, and model type {model_type!r} is not known here: "
            'add "layer_types", with "full_attention" or "sliding_attention" for each layer'
        )
    period = fields.number("sliding_window_pattern", _FULL_EVERY.get(model_type))
    return [local if (layer + 1) % period else Attention.FULL for layer in range(num_layers)]


def _named(name: object) -> Attention:
    if name not in _LAYER_TYPES:
        known = ", ".join(_LAYER_TYPES)
        raise UnsupportedError(f"layers of type {name!r} are not supported, known are {known}; see docs/limits.md")
    return _LAYER_TYPES[str(name)]


def _kind(fields: _Fields, attention: Attention, element_bytes: int, num_ranks: int) -> LayerKind:
    num_query_heads = fields.number("num_attention_heads")
    num_heads = fields.number("num_key_value_heads", num_query_heads)
    head_size = fields.number("head_dim" if "head_dim" in fields else "hidden_size")
    if "head_dim" not in fields:
        head_size //= num_query_heads
    if attention is Attention.FULL and "global_head_dim" in fields:
        head_size = fields.number("global_head_dim")
        if not fields.is_off("attention_k_eq_v"):
            num_heads = fields.number("num_global_key_value_heads", num_heads)
    if num_query_heads % num_ranks or (num_heads % num_ranks and num_ranks % num_heads):
        raise fields.error(
            f"{num_query_heads} query heads and {num_heads} KV heads cannot be divided among {num_ranks} ranks; "
            "choose another --tp"
        )
    reach = {Attention.SLIDING: "sliding_window", Attention.CHUNKED: "attention_chunk_size"}.get(attention)
    return LayerKind(
        attention,
        None if reach is None else fields.number(reach),
        2 * max(1, num_heads // num_ranks) * head_size * element_bytes,
    )
