"""Settings in a file, TOML or YAML, and the command line that it stands for.

Both formats hold the same: one level of settings, whose names are the long options without the dashes in front.
"""

import json
import tomllib
from dataclasses import asdict
from pathlib import Path

import yaml

from proxy.config import ConfigError, ProxyConfig

YAML_SUFFIXES = (".yaml", ".yml")
"""A file whose name ends so is YAML, any other one TOML."""


def arguments_of_file(path: Path) -> list[str]:
    """The settings of a file as a command line. Raises ``ConfigError`` if it holds anything else."""
    parse = _parse_yaml if path.suffix in YAML_SUFFIXES else tomllib.loads
    try:
        settings = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    arguments = []
    for name, value in settings.items():
        for single in value if isinstance(value, list) else [value]:
            if name == "config" or isinstance(single, bool) or not isinstance(single, str | int | float):
                raise ConfigError(
                    f"{path}: {name} = {value!r} is no setting: write a text, a number or a list of them, "
                    "under the name of an option of pd-proxy --help"
                )
            arguments.append(f"--{str(name).replace('_', '-')}={single}")
    return arguments


def text_of(config: ProxyConfig) -> str:
    """A configuration as a TOML file that stands for the same; what is off is left out."""
    limits = {
        name.replace("queue_seconds", "queue_timeout_seconds"): value for name, value in asdict(config.limits).items()
    }
    times = {
        f"{name.removesuffix('_seconds')}_timeout_seconds": value for name, value in asdict(config.timeouts).items()
    }
    times["health_interval_seconds"] = times.pop("health_timeout_seconds")
    settings = {
        "prefill": list(config.prefill_urls),
        "decode": list(config.decode_urls),
        "host": config.host,
        "port": config.port,
        "admin_token_file": config.admin_token_file and str(config.admin_token_file),
        "otlp_endpoint": config.otlp_endpoint,
        "canary": config.canary_seconds or None,
        "prefill_policy": config.routing.prefill_policy,
        "decode_policy": config.routing.decode_policy,
        "min_remote_tokens": config.routing.min_remote_tokens,
        "fallback": "decode-only" if config.routing.decode_only_fallback else "none",
        "data_parallel_ranks": config.routing.num_ranks,
        **times,
        **limits,
    }
    # What JSON writes of texts, numbers and lists of texts, TOML reads.
    return "\n".join(
        f"{name.replace('_', '-')} = {json.dumps(value, ensure_ascii=False)}"
        for name, value in settings.items()
        if value is not None
    )


def _parse_yaml(text: str) -> dict[object, object]:
    """The settings of a YAML text. Raises ``ValueError`` for what TOML could not say either: a name that comes twice,
    of which YAML would keep the last, and anything but names and values.
    """
    try:
        top = yaml.compose(text, Loader=yaml.SafeLoader)
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(_one_line(error)) from error
    if top is None:
        return {}
    if not isinstance(settings, dict):
        raise ValueError("this is no list of settings: write each as NAME: VALUE, for example port: 8000")  # noqa: TRY004
    names = [name.value for name, _ in top.value]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{repeated[0]} is given twice: write one list, {repeated[0]}: [FIRST, SECOND]")
    return settings


def _one_line(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the excerpt that PyYAML draws."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    wrong = " ".join(part for part in (error.context, error.problem) if part)
    return f"{wrong} (at line {mark.line + 1}, column {mark.column + 1})"
