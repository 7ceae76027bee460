"""Randomness in an example as a function of (seed, number of the example): augmentation, masking, span corruption."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import grain
import numpy as np

from jaxckpt.data.mixture import Mixture
from jaxckpt.data.shuffle import reads_rows
from jaxckpt.errors import DataError

Transform = Callable[[Any, np.random.Generator], Any]
"""transform(example, rng) -> example, the same shapes and dtypes for every example"""


class Randomized(grain.MapDataset):
    """Element i is transform(source[i], generator(seed, i)): the same at every reading, in any order, by any process.

    In an endless `source` an example that comes again in another epoch has another number, and so other draws.
    """

    def __init__(self, source: Any, transform: Transform, *, seed: int):
        super().__init__(source if isinstance(source, grain.MapDataset) else ())
        self._source: Any = source
        self._transform, self._seed = transform, seed
        if reads_rows(source):
            self.read_rows = self._read

    @property
    def mixture(self) -> Mixture | None:
        return getattr(self._source, "mixture", None)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._transform(self._source[index], generator(self._seed, index))

    def __str__(self) -> str:
        return f"Randomized(seed={self._seed})"

    def _read(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        rows = self._source.read_rows(numbers)
        fields: dict[str, np.ndarray] = {}
        for row, number in enumerate(numbers.tolist()):
            example = {name: values[row] for name, values in rows.items()}
            try:
                changed = self._transform(example, generator(self._seed, number))
            except Exception as e:
                raise DataError(f"example {number}: the transform raised {type(e).__name__}: {e}") from e
            if not isinstance(changed, Mapping) or (fields and set(changed) != set(fields)):
                raise DataError(
                    f"example {number}: the transform must return a mapping of arrays, always of the same fields "
                    f"({', '.join(fields) or ', '.join(example)}); found {changed!r}"
                )
            for name, value in changed.items():
                value = np.asarray(value)
                if row == 0:
                    fields[name] = np.empty((numbers.size, *value.shape), value.dtype)
                if (value.shape, value.dtype) != (fields[name].shape[1:], fields[name].dtype):
                    expected = f"{fields[name].dtype}{list(fields[name].shape[1:])}"
                    raise DataError(
                        f"example {number}: the transform makes field '{name}' {value.dtype}{list(value.shape)}, but "
                        f"{expected} for the examples before it. Pad, cut or cast to one shape and dtype."
                    )
                fields[name][row] = value
        return fields


def generator(seed: int, number: int) -> np.random.Generator:
    """The generator of example `number`: Philox (Salmon et al. 2011), keyed by a hash of both."""
    key = hashlib.sha256(f"jaxckpt example {seed} {number}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
