"""Reading a settings file, TOML or YAML, as the command line that it stands for.

Both formats hold the same: one level of settings, whose names are the long options without the dashes in front.
"""

import tomllib
from pathlib import Path

import yaml

from proxy.config import ConfigError

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
