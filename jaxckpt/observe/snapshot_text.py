"""What the commands say of snapshots, as text. No line is wrapped or cut to a width: it may go into a pipe."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxckpt.snapshot.diff import Difference


def of_steps(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `inspect.list_steps`."""
    if not rows:
        return "no snapshots"
    cells = [
        (str(r["step"]), _time(r["committed_at"]), _size(r["bytes"]), ", ".join(r["pins"]), _metrics(r), r["status"])
        for r in rows
    ]
    return "\n".join(_table(("step", "saved", "size", "pins", "metrics", "status"), cells, right=(0, 2)))


def of_step(found: Mapping[str, Any]) -> str:
    """What `inspect.inspect` gives."""
    pins = f", pinned as {', '.join(found['pins'])}" if found["pins"] else ""
    lines = [
        found["path"],
        f"step {found['step']}, saved {_time(found['committed_at'])}, {_size(found['bytes'])}{pins}",
        *([_metrics(found)] if found["metrics"] else []),
        f"steps of this run: {', '.join(map(str, found['steps']))}",
        "",
    ]
    groups = [(name, str(g["leaves"]), f"{g['elements']:,}", _size(g["bytes"])) for name, g in found["groups"].items()]
    lines += _table(("group", "leaves", "elements", "size"), groups, right=(1, 2, 3))
    leaves = [
        (path, f"{x['dtype']}{x['shape']}", _spec(x["spec"]), str(x["tier"]), _size(x["bytes"]))
        for path, x in found["leaves"].items()
    ]
    lines += ["", *_table(("leaf", "array", "sharding", "tier", "size"), leaves, right=(4,))]
    for title, values in (("data position", found["data"]), ("saved with", found["meta"])):
        lines += ["", title, *(f"  {key}: {_short(value)}" for key, value in _flat(values))]
    return "\n".join(lines)


def of_difference(found: "Difference") -> str:
    """What `diff.diff` gives."""
    lines = []
    for title, pairs in (
        ("configuration differs", found.config),
        ("data position differs", found.data),
        ("structure differs", found.structure),
        ("different, and no influence on the state", found.elsewhere),
    ):
        if pairs:
            lines += [title, *(f"  {key}: {_short(x)} -> {_short(y)}" for key, (x, y) in pairs.items())]
    if found.leaves:
        rows = [
            (
                path,
                f"{x.differing:,} of {x.elements:,}",
                f"{x.max_abs:.3g}",
                f"{x.max_rel:.3g}",
                f"{x.nans:,}",
                str(x.first),
            )
            for path, x in found.leaves.items()
        ]
        header = ("leaf", "elements", "max abs", "max rel", "NaNs", "first at")
        lines += ["leaves differ", *(f"  {line}" for line in _table(header, rows, right=(1, 2, 3, 4)))]
    end = "The snapshots are equal." if found.is_equal else "The snapshots differ."
    return "\n".join([*lines, f"{found.num_equal} leaves are equal, {len(found.leaves)} differ. {end}"])


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Columns as wide as their longest cell; those in `right` are flush right."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    align = lambda i, cell: cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
    return ["  ".join(align(i, cell) for i, cell in enumerate(row)).rstrip() for row in table]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters, --json shows them)"


def _spec(spec: Sequence[Any]) -> str:
    axes = ["+".join(a) if isinstance(a, list) else a or "-" for a in spec]
    return f"({', '.join(axes)})" if any(spec) else "replicated"


def _metrics(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in row["metrics"].items() if value is not None)


def _time(seconds: float | None) -> str:
    return "?" if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "?"
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min(3, (num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / 1024**power:.2f} {'KMG'[power - 1]}iB"
