"""Which model an engine runs: a digest of its configuration, and a sampled digest of its weights.

A decode engine with another fine-tune of the same shape would accept KV that means something else. Weights are sampled
from the checkpoint files, because a connector never sees the loaded parameters.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig

_SAMPLE_BYTES = 64 * 1024
_SAMPLES_PER_FILE = 16
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")
_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "architectures_source"})


def config_digest(config: VllmConfig) -> str:
    """16 hex digits over everything that changes what KV means: architecture, dtype, quantization, cache dtype."""
    model = config.model_config
    rope = [getattr(model.hf_config, name, None) for name in ("rope_scaling", "rope_parameters")]
    settings = {
        "model": _plain(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "cache_dtype": config.cache_config.cache_dtype,
        "load_format": str(config.load_config.load_format) if config.load_config.load_format == "dummy" else "real",
        # LongRoPE takes other factors when an engine is started for long contexts.
        "max_model_len": model.max_model_len if "longrope" in json.dumps(rope, default=str) else None,
        "seed": model.seed if config.load_config.load_format == "dummy" else None,
    }
    return _digest(json.dumps(settings, sort_keys=True, default=str).encode())


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in _NOT_THE_MODEL}


def weights_digest(config: VllmConfig) -> str:
    """16 hex digits over samples of every weight file; the model's name and revision when no file is at hand."""
    model = config.model_config
    folder = _checkpoint_folder(str(model.model), model.revision)
    files = sorted(path for path in folder.glob("*") if path.suffix in _WEIGHT_SUFFIXES) if folder else []
    if not files:
        return _digest(f"{model.model}@{model.revision}".encode())
    digest = hashlib.sha256()
    for path in files:
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()[:16]


def _checkpoint_folder(name: str, revision: str | None) -> Path | None:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield f"{path.name}:{size}".encode()
    with path.open("rb") as file:
        for index in range(_SAMPLES_PER_FILE):
            file.seek(index * max(0, size - _SAMPLE_BYTES) // (_SAMPLES_PER_FILE - 1))
            yield file.read(_SAMPLE_BYTES)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
