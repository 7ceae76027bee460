"""Walking sections, and the trees of plain values (nested mappings) that become sections."""

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

Section = type[BaseModel]


def sections_of(annotation: Any) -> list[Section]:
    """The section classes that a key may hold, its variants if several; none for a key that holds a value."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    if get_origin(annotation) in (Union, UnionType):
        return [section for arg in get_args(annotation) for section in sections_of(arg)]
    return []


def variant_name(section: Section) -> str:
    """The `name` that selects `section` among its variants."""
    return section.model_fields["name"].default


def all_keys(section: Section, prefix: str = "") -> Iterator[tuple[str, str, FieldInfo]]:
    """(dotted key, the variant that it belongs to or '', field) of every key of every variant."""
    for key, field in section.model_fields.items():
        children = sections_of(field.annotation)
        if not children or _is_optional(field):
            yield prefix + key, "", field
        for child in children:
            for dotted, owner, leaf in all_keys(child, f"{prefix}{key}."):
                yield dotted, variant_name(child) if len(children) > 1 else owner, leaf


def filled(section: Section, tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """`tree` with the defaults of absent keys, null sections as {}, and the `name` that selects a section's variant."""
    result = dict(tree)
    for key, field in section.model_fields.items():
        children, value = sections_of(field.annotation), result.get(key)
        if not children or (value is None and _is_optional(field)):
            if key not in result and not field.is_required():
                result[key] = field.default
            continue
        value = {} if value is None else value
        if isinstance(value, Mapping) and len(children) > 1:
            value = {"name": variant_name(children[0]), **value}
        chosen = _chosen(children, value)
        result[key] = filled(chosen, value) if chosen else value
    return result


def valid_leaves(section: Section, tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a filled tree, without the keys whose values are not of their type."""
    leaves = {}
    for key, field in section.model_fields.items():
        if key not in tree:
            continue
        if chosen := _chosen(sections_of(field.annotation), tree[key]):
            leaves |= valid_leaves(chosen, tree[key], f"{prefix}{key}.")
            continue
        try:
            # The None stands for a field without metadata: Annotated wants at least one.
            kind: Any = Annotated[field.annotation, *field.metadata, None]
            leaves[prefix + key] = TypeAdapter(kind).validate_python(tree[key])
        except ValidationError:
            continue
    return leaves


def _is_optional(field: FieldInfo) -> bool:
    return NoneType in get_args(field.annotation)


def _chosen(children: list[Section], value: Any) -> Section | None:
    """The section that `value` is to be read as; None where it is no mapping, or names no variant."""
    if not isinstance(value, Mapping):
        return None
    if len(children) > 1:
        children = [child for child in children if variant_name(child) == value.get("name")]
    return children[0] if children else None
