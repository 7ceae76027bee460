"""Keys, types and problems in the words of the one who writes the file."""

import difflib
import json
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import JsonValue
from pydantic.fields import FieldInfo

from jaxckpt.config.sections import RunConfig
from jaxckpt.config.tree import Section, all_keys, sections_of, variant_name
from jaxckpt.config.values import SIZE

_WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", NoneType: "null"}


def show(value: Any) -> str:
    """A value as a user would write it in YAML."""
    if isinstance(value, str):
        return repr(value)
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A field's type with its bounds, such as 'integer greater than 0 or null'."""
    origin: Any = get_origin(annotation)
    args: Any = get_args(annotation)
    if origin is Annotated:
        return type_text(args[0], [*args[1:], *metadata])
    flat = [m for outer in metadata for m in (outer.metadata if isinstance(outer, FieldInfo) else [outer])]
    bound = {n: v for m in flat for n in ("gt", "ge", "lt", "le", "pattern") if (v := getattr(m, n, None)) is not None}
    if origin is Literal:
        return "one of " + ", ".join(map(str, args)) if len(args) > 1 else str(args[0])
    if origin in (Union, UnionType):
        return " or ".join(type_text(arg) for arg in args)
    if origin is list:
        return f"list of {type_text(args[0])}"
    if origin is tuple:
        return f"[{', '.join(type_text(arg) for arg in args)}]"
    if origin is dict:
        free = args[1] is JsonValue
        return "mapping with text keys" if free else f"mapping of {type_text(args[0])} to {type_text(args[1])}"
    if sections_of(annotation):
        return "section"
    if SIZE in flat:
        return "number of bytes such as 512MiB or 4GB"
    if "pattern" in bound:
        return "text like host:port" if "\\d" in bound["pattern"] else "text like pkg.mod:thing"
    if {"gt", "ge"} & set(bound) and {"lt", "le"} & set(bound):
        low = f"({bound['gt']}" if "gt" in bound else f"[{bound['ge']}"
        high = f"{bound['lt']})" if "lt" in bound else f"{bound['le']}]"
        return f"{_WORDS[annotation]} in {low}, {high}"
    words = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "of at most"}
    return " ".join([_WORDS[annotation], *(f"{words[n]} {v}" for n, v in bound.items())])


def _expected(field: FieldInfo) -> str:
    text = type_text(field.annotation, field.metadata)
    article = "" if text.startswith(("one of", "true", "text")) else "an " if text[0] in "aeiou" else "a "
    return article + text


def explain(error: Any, tree: Mapping[str, Any]) -> str:
    """One of pydantic's errors on the filled `tree` as a line that starts with the key as the user writes it."""
    key, field, value = _place(error["loc"], tree)
    kind = error["type"]
    if field is None:
        return _no_such_key(key, tree)
    if kind == "missing":
        return f"{key}: missing; expected {_expected(field)}: {one_line(field.description)}"
    if kind == "union_tag_invalid":
        names, name = [variant_name(s) for s in sections_of(field.annotation)], value["name"]
        hint = did_you_mean(_close(name, names))
        return f"{key}.name: expected one of {', '.join(names)}, found {show(name)}{hint}"
    if kind == "value_error":
        return f"{key}: {error['ctx']['error']}"
    if sections_of(field.annotation):
        return f"{key}: expected a section (keys below it), found {show(value)}"
    return f"{key}: expected {_expected(field)}, found {show(value)}"


def _place(loc: Sequence[Any], tree: Mapping[str, Any]) -> tuple[str, FieldInfo | None, Any]:
    """(dotted key, its field or None where there is no such key, its value) of the place that pydantic calls `loc`."""
    section: Section = RunConfig
    value: Any = tree
    keys, field, parts = [], None, iter(loc)
    for part in parts:
        keys.append(str(part))
        value = value.get(part) if isinstance(value, Mapping) else None
        field = section.model_fields.get(str(part))
        children = sections_of(field.annotation) if field else []
        if len(children) > 1:  # pydantic names the variant next in the path, users do not
            name = next(parts, None)
            children = [child for child in children if variant_name(child) == name]
        if not children:  # a value, or the end of the path
            break
        section = children[0]
    return ".".join(keys), field, value


def _no_such_key(key: str, tree: Mapping[str, Any]) -> str:
    owners = [owner for known, owner, _ in all_keys(RunConfig) if known == key]
    if owners:  # a key of another variant of its section
        top = key.partition(".")[0]
        return f"{key}: no such key with {top}.name={tree[top]['name']}; it belongs to {', '.join(owners)}"
    chosen = {top: value["name"] for top, value in tree.items() if isinstance(value, Mapping) and "name" in value}
    known = [k for k, owner, _ in all_keys(RunConfig) if owner in ("", chosen.get(k.partition(".")[0], owner))]
    return f"{key}: no such key{did_you_mean(suggestions(key, known))}"


def suggestions(key: str, known: Sequence[str]) -> list[str]:
    """The known keys or sections that `key` may stand for: those of that name, else a close one nearby, or anywhere."""
    names = dict.fromkeys([*known, *(k.rpartition(".")[0] for k in known if "." in k)])
    parent, _, leaf = key.rpartition(".")
    leaf_of = {name: name.rpartition(".")[2] for name in names}
    siblings = {leaf_of[name]: name for name in names if name.rpartition(".")[0] == parent}
    if same := [name for name in names if leaf_of[name] == leaf]:
        return sorted(same, key=lambda name: name.partition(".")[0] != key.partition(".")[0])[:3]
    if near := _close(leaf, siblings):
        return [siblings[near[0]]]
    near = _close(leaf, set(leaf_of.values())) if parent == "" or parent in names else []
    return [name for name in names if leaf_of[name] in near][:3] or _close(key, names)


def _close(word: Any, choices: Any) -> list[str]:
    return difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.6)


def did_you_mean(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())
