"""The types of values, and the base of all sections. Their bounds are what the table of keys and the messages say."""

import math
import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

AXES = ("data", "fsdp", "tensor")


class Config(BaseModel):
    """A section. The class docstring is for readers of the code; users see the docstrings of the keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _number(value: Any) -> Any:
    """Text such as '1e-3' as a float (YAML 1.1 reads it as a string); true, false, inf and nan are no numbers here."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                raise PydanticCustomError("number", "not a number") from None
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise PydanticCustomError("number", "not a number")
    return value


def _bytes(value: Any) -> Any:
    """A number of bytes, or a text such as 512MiB, 4GiB or 4GB."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(i?)B\s*", value)):
        return int(float(match[1]) * (1024 if match[3] else 1000) ** (" KMGT".index(match[2])))
    return value


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    if not value:
        raise ValueError("an empty regular expression matches every path; write null, or leave the key out")
    return value


def _rules(rules: dict[str, list]) -> dict[str, list]:
    for pattern, dims in rules.items():
        _regex(pattern)
        axes = [axis for dim in dims for axis in (dim if isinstance(dim, list) else [dim]) if axis is not None]
        if unknown := [axis for axis in axes if axis not in AXES]:
            raise ValueError(f"{pattern!r} names {', '.join(map(repr, unknown))}; the mesh axes are {', '.join(AXES)}")
        if len(set(axes)) < len(axes):
            raise ValueError(f"{pattern!r} uses a mesh axis twice ({', '.join(axes)}); each may shard one dimension")
    return rules


def _run_directory(value: str) -> str:
    if not value.strip():
        raise ValueError("expected a directory or gs://bucket/prefix, found an empty text")
    if odd := sorted(set("*?[") & set(value)):
        raise ValueError(
            f"found {value!r}; {' and '.join(odd)} cannot be part of it, because Orbax takes them for a pattern"
        )
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/+", value)
    if scheme is None:
        return os.path.expanduser(value)
    if scheme[0] != "gs://":
        raise ValueError(f"found {value!r}; expected a local directory or gs://bucket/prefix, not {scheme[0]}")
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/+[^/]+)+/*", value):
        raise ValueError(f"found {value!r}; expected gs://bucket/prefix")
    return value.rstrip("/")


def _local_directories(values: list[str]) -> list[str]:
    if odd := [value for value in values if "://" in value]:
        raise ValueError(f"found {odd[0]!r}; expected a directory on a local disk")
    return values


Int = Annotated[int, BeforeValidator(_number)]
Count = Annotated[Int, Field(gt=0)]
SIZE = BeforeValidator(_bytes)
Bytes = Annotated[Count, SIZE]
Index = Annotated[Int, Field(ge=0)]
Float = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
Below1 = Annotated[Float, Field(ge=0, lt=1)]
Share = Annotated[Float, Field(ge=0, le=1)]
NonZeroShare = Annotated[Float, Field(gt=0, le=1)]
AxisSize = Annotated[Int, Field(ge=-1)]
Regex = Annotated[str, AfterValidator(_regex)]
Text = Annotated[str, Field(min_length=1)]
Target = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
Files = Annotated[list[Text], BeforeValidator(lambda v: [v] if isinstance(v, str) else v), Field(min_length=1)]
LocalDirectories = Annotated[Files, AfterValidator(_local_directories)]
RunDirectory = Annotated[str, AfterValidator(_run_directory)]
StepRange = tuple[Count, Count]
HostPort = Annotated[str, Field(pattern=r"^\S+:\d+$")]
Rules = Annotated[dict[str, list[str | list[str] | None]], AfterValidator(_rules)]
ComputeDtype = Literal["float32", "bfloat16"]
Tier = Literal["device", "pinned_host", "nvme"]
Remat = Literal[
    "none",
    "full",
    "offload",
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
]
