"""Small models with random weights: what KV transfer tests need when the text does not matter.

Two hybrid models of one shape, that differ in their weights only, and one model without sliding window. All
speak bytes: token ``4 + b`` is a byte, so a prompt of n ASCII characters has n tokens.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RECIPE_FILE = "recipe.json"

_SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL_TOKENS) + 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Five sliding layers and one full layer, twice.
_HYBRID = _SIZES | {
    "num_hidden_layers": 12,
    "sliding_window": 128,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "query_pre_attn_scalar": 64,
}
_SINGLE_GROUP = _SIZES | {"num_hidden_layers": 4}


class Recipe(NamedTuple):
    """All that decides a model's bytes."""

    architecture: str
    seed: int
    config: dict[str, Any]

    def as_json(self) -> str:
        return json.dumps(self._asdict() | {"chat_template": CHAT_TEMPLATE}, indent=1)


RECIPES = {
    "hybrid": Recipe("Gemma3", 0, _HYBRID),
    "hybrid_other_weights": Recipe("Gemma3", 1, _HYBRID),
    "single_group": Recipe("Qwen3", 0, _SINGLE_GROUP),
}


def write_models(folder: Path | str, report: Callable[[str], None] = lambda line: None) -> dict[str, Path]:
    """Write every model of ``RECIPES`` that is not in ``folder`` yet; the models' folders by name.

    A model appears whole or not at all, and is written anew when its recipe changed.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    paths = {name: root / name for name in RECIPES}
    for name, path in paths.items():
        if _recipe_of(path) == RECIPES[name].as_json():
            report(f"{name}: there already")
            continue
        _write_model(RECIPES[name], path)
        report(f"{name}: written to {path}")
    return paths


def _recipe_of(path: Path) -> str | None:
    try:
        return (path / RECIPE_FILE).read_text()
    except OSError:
        return None


def _write_model(recipe: Recipe, path: Path) -> None:
    # Beside the target, so that the rename is one step.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        unfinished.chmod(0o755)
        _save_weights(recipe, unfinished)
        _save_tokenizer(unfinished)
        (unfinished / RECIPE_FILE).write_text(recipe.as_json())
        if path.exists():
            shutil.rmtree(path)
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _save_weights(recipe: Recipe, folder: Path) -> None:
    # Importing these takes seconds, which callers that find their models written need not spend.
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(recipe.architecture, f"{recipe.architecture}Config")
    config = getattr(transformers, config_name)(**recipe.config)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = getattr(transformers, f"{recipe.architecture}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *letters])}
    # Without merges the byte pairs stay single bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {f"{token.strip('<>')}_token": token for token in SPECIAL_TOKENS}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHAT_TEMPLATE,
        model_max_length=_SIZES["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **names,
    ).save_pretrained(folder)
