"""How Orbax describes arrays on disk: the chunks in an array's zarr.json, and the lists of arrays beside them."""

import base64
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.serialization import tensorstore_utils
from orbax.checkpoint._src.serialization import types as serialization_types

from jaxckpt.errors import SnapshotError
from jaxckpt.snapshot import direct, paths
from jaxckpt.snapshot.shards import array_directory

REMOTE_CHUNK_BYTES = 4 << 20  # the least of a chunk where it costs a request to a server
PROBE = "probe"


def store_checked_chunks(is_ours: Callable[[str], bool]) -> None:
    """Makes Orbax store our arrays in small chunks with a crc32c each, for which it has no option.

    Raises SnapshotError where this Orbax would not.
    """
    found = "another function build_array_write_spec"
    try:
        # How often tensorstore asks a server again: an Orbax Context does not carry it.
        tensorstore_utils._BASE_TS_CONTEXT.update(paths.tensorstore_context())
        build = tensorstore_utils.build_array_write_spec

        def build_checked(info: Any, *args: Any, **kwargs: Any) -> Any:
            spec = build(info, *args, **kwargs)
            if is_ours(info.parent_dir.as_posix()) or info.name is PROBE:
                _set_chunks(spec.json)
            return spec

        tensorstore_utils.build_array_write_spec = build_checked
        spec = build_checked(
            array_info(PROBE, "/nowhere"),
            global_shape=(4, 4),
            local_shape=(2, 4),
            dtype=np.dtype("float32"),
            use_ocdbt=False,
        )
        found = json.dumps(spec.json)
        layout = direct.layout_of({**spec.json["metadata"], "data_type": spec.json["dtype"]})
        assert layout == direct.Layout((4, 4), (2, 4), (2, 4), np.dtype("float32"))
    except (AttributeError, TypeError, LookupError, AssertionError) as e:
        raise SnapshotError(
            "this orbax-checkpoint cannot be made to write checksums: expected the codecs sharding_indexed[bytes, crc32c], "
            f"found {found}. Install the version that jaxckpt's pyproject.toml asks for."
        ) from e


def _set_chunks(spec: dict[str, Any]) -> None:
    array = spec.get("base", spec)  # a cast stands around the array's own spec
    shard = tuple(array["metadata"]["chunk_grid"]["configuration"]["chunk_shape"])
    itemsize = jnp.dtype(array["dtype"]).itemsize
    if array["kvstore"]["driver"] == "file":
        chunk = direct.local_chunk_shape(shard, itemsize)
    else:
        chunk = direct.chunk_shape(shard, itemsize, least_bytes=REMOTE_CHUNK_BYTES)
    assert array["metadata"]["codecs"][0]["name"] == "sharding_indexed"
    array["metadata"]["codecs"] = direct.codecs(chunk)


def array_info(name: str, directory: str | os.PathLike[str]) -> Any:
    """What Orbax knows of an array that it writes to `directory`/`name`."""
    return serialization_types.ParamInfo(
        name=name, parent_dir=epath.Path(directory), use_zarr3=True, use_compression=False, is_ocdbt_checkpoint=False,
        ts_context=tensorstore_utils.get_ts_context(use_ocdbt=False),
    )  # fmt: skip


def add_arrays(state: epath.Path, layouts: Mapping[str, tuple[direct.Layout, Any]]) -> None:
    """Adds arrays, {path: (layout, sharding)}, to the item `state` that Orbax has written: their zarr.json and their
    entries in Orbax's lists. Their shard files are for the caller to bring."""
    names = {path: array_directory(path) for path in layouts}
    for path, (layout, _) in layouts.items():
        _create(state, names[path], layout)
    with _edited(state / "_METADATA") as metadata:
        for path, (layout, _) in layouts.items():
            keys = path.split("/")
            metadata["tree_metadata"][str(tuple(keys))] = {
                "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
                "value_metadata": {
                    "value_type": "jax.Array",
                    "skip_deserialize": False,
                    "write_shape": list(layout.shard),
                },
            }
    with _edited(state / "_sharding") as shardings:
        for path, (_, sharding) in layouts.items():
            found = sharding_metadata.from_jax_sharding(sharding)
            if found is not None:
                shardings[base64.b64encode(names[path].encode()).decode()] = found.to_serialized_string()
    (state / "array_metadatas").mkdir(exist_ok=True)  # not there where Orbax had no array to write
    with _edited(state / "array_metadatas" / "process_0") as arrays:
        arrays["array_metadatas"] = arrays.get("array_metadatas", []) + [
            {
                "array_metadata": {
                    "param_name": names[path],
                    "write_shape": list(layout.shard),
                    "chunk_shape": list(layout.shard),
                    "ext_metadata": None,
                }
            }
            for path, (layout, _) in layouts.items()
        ]


_DICT_KEY = 2  # Orbax's KeyType.DICT


def _create(state: epath.Path, name: str, layout: direct.Layout) -> None:
    spec = tensorstore_utils.build_array_write_spec(
        array_info(name, state),
        global_shape=layout.shape,
        local_shape=layout.shard,
        dtype=layout.dtype,
        use_ocdbt=False,
    ).json
    spec["metadata"]["codecs"] = direct.codecs(layout.chunk)
    ts.open(ts.Spec(spec), create=True, open=True, context=tensorstore_utils.get_ts_context(use_ocdbt=False)).result()


@contextlib.contextmanager
def _edited(file: epath.Path) -> Iterator[dict[str, Any]]:
    content = json.loads(file.read_text()) if file.exists() else {}
    yield content
    file.write_text(json.dumps(content))
