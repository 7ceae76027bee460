"""A YAML file and `key=value` overrides, merged and checked as a whole."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import ValidationError

from jaxckpt.config.conflicts import conflicts
from jaxckpt.config.explain import explain
from jaxckpt.config.sections import RunConfig, to_dict
from jaxckpt.config.tree import filled, valid_leaves
from jaxckpt.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads the YAML file `path`, merges overrides such as 'optimizer.lr=1e-3' in order, and checks the result.

    Raises ConfigError with every problem at once, a line each.
    """
    try:
        tree = OmegaConf.load(path)
    except OSError as error:
        reason = error.strerror or "the file holds a single value, expected a mapping of keys"
        raise ConfigError(f"{path}: cannot be read as a configuration: {reason}") from None
    except Exception as error:  # PyYAML's and OmegaConf's errors share no base class below Exception
        raise ConfigError(f"{path}: {_yaml_problem(error)}") from None
    # OmegaConf reads a lone text as {text: null}, so a mapping is recognised by a value or by the colon in the file.
    if not OmegaConf.is_dict(tree) or (":" not in Path(path).read_text(encoding="utf-8") and len(tree)):
        raise ConfigError(f"{path}: expected a mapping of keys (`steps: 100`), found a list or a single value")
    problems = []
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key.strip():
            problems.append(f"override {item!r}: expected key=value, such as optimizer.lr=1e-3")
            continue
        try:
            tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([item]))
        except Exception as error:
            problems.append(f"override {item!r}: {_yaml_problem(error)}")
    try:
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except Exception as error:  # an interpolation ${...} that leads nowhere, or a ??? never filled in
        raise _config_error(str(path), [*problems, _yaml_problem(error)]) from None
    return validated(plain, str(path), problems)


def to_yaml(config: RunConfig) -> str:
    """Every key, as YAML that `load_config` reads back into an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def validated(tree: Any, origin: str, problems: Sequence[str] = ()) -> RunConfig:
    """The config that `tree` holds. Raises ConfigError with `problems` and all those of the tree, under `origin`."""
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        full = filled(RunConfig, tree)
        # The problem of the root are the conflicts, which pydantic only looks for once all keys are right.
        keys = [explain(e, full) for e in error.errors() if e["loc"]]
        raise _config_error(origin, [*problems, *keys, *conflicts(valid_leaves(RunConfig, full))]) from None
    if problems:
        raise _config_error(origin, problems)
    return config


def _config_error(origin: str, problems: Sequence[str]) -> ConfigError:
    lines = list(dict.fromkeys(problems))  # a union's alternatives report one value several times
    return ConfigError("\n  ".join([f"{origin}: {len(lines)} problem{'s' * (len(lines) > 1)}", *lines]))


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}{getattr(error, 'problem', None) or str(error).splitlines()[0]}"
