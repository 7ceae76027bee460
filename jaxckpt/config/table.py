"""The table of keys."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic.fields import FieldInfo

from jaxckpt.config.explain import one_line, show, type_text
from jaxckpt.config.sections import RunConfig
from jaxckpt.config.tree import Section, all_keys, sections_of, variant_name


@dataclass(frozen=True)
class Row:
    """One key in words. `key` is `optimizer.lr`, or `model(llama).d_ff` where only that variant has it."""

    key: str
    type: str
    default: str
    meaning: str


def describe() -> list[Row]:
    """A row for every key; keys that all variants of a section share stand once, under the plain name."""
    rows = []
    for top, field in RunConfig.model_fields.items():
        variants = sections_of(field.annotation)
        if not variants:
            rows.append(_row(top, field))
        if len(variants) > 1:
            names = [variant_name(section) for section in variants]
            meaning = one_line(variants[0].model_fields["name"].description)
            rows.append(Row(f"{top}.name", "one of " + ", ".join(names), names[0], meaning))
        owners: dict[Row, list[Section]] = {}
        for section in variants:
            for key, _, leaf in all_keys(section):
                if key != "name":
                    owners.setdefault(_row(key, leaf), []).append(section)
        for row, found in owners.items():
            prefix = top if len(found) == len(variants) else f"{top}({'|'.join(map(variant_name, found))})"
            rows.append(replace(row, key=f"{prefix}.{row.key}"))
    return rows


def _row(key: str, field: FieldInfo) -> Row:
    plain = field.default if isinstance(field.default, str) else show(field.default)
    default = "required" if field.is_required() else plain
    return Row(key, type_text(field.annotation, field.metadata), default, one_line(field.description))


def format_table(rows: Sequence[Row], *, width: int = 120) -> str:
    """`rows` as plain text: a line of key, type and default each, and the meaning below it, wrapped to `width`."""
    pad = max((len(row.key) for row in rows), default=0)
    lines = []
    for row in rows:
        default = "  (required)" if row.default == "required" else f" = {row.default}"
        lines.append(f"{row.key:<{pad}}  {row.type}{default}")
        lines += textwrap.wrap(row.meaning, max(width, 40), initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
