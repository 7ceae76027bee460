"""Tokens per second of what feeds a run, each path beside plain Grain and torch's DataLoader on Hugging Face datasets.

    python benchmarks/data.py [--tokens 100_000_000] [--rounds 5] [--seconds 2]

One process, rows of 1024 tokens, 32 a batch, shuffled, warm page cache; every loader ends in jax.Arrays on the device.
All take turns in every round; figures are medians over the rounds.
Needs `pip install datasets torch` for the last two.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxckpt.data.store import FORMAT, StoreHeader, block_hashes, content_hash, header_bytes
from jaxckpt.data.stores import make_store_datasets
from jaxckpt.data.stream import BatchStream

SEQ_LEN, ROWS = 1024, 32


def write_store(path: Path, tokens: np.ndarray, lengths: np.ndarray) -> None:
    path.mkdir()
    tokens.tofile(path / "tokens.bin")
    np.concatenate([[0], np.cumsum(lengths)]).astype("<i8").tofile(path / "offsets.bin")
    blocks = {name: list(block_hashes(path / name)) for name in ("offsets.bin", "tokens.bin")}
    header = StoreHeader(
        format=FORMAT,
        dtype="uint16",
        tokens=tokens.size,
        documents=lengths.size,
        has_loss_mask=False,
        vocab_size=50000,
        eos=0,
        tokenizer="random",
        tokenizer_hash="0" * 64,
        content_hash=content_hash(blocks),
        blocks=blocks,
        sources=[],
        options={},
        jaxckpt="benchmark",
    )
    (path / "store.json").write_bytes(header_bytes(header))


def ours(stores: dict[str, str], sharding: NamedSharding, **args: Any) -> Iterator[Any]:
    sets = make_store_datasets(stores, seq_len=SEQ_LEN, seed=0, **args)
    return BatchStream(sets.train, global_batch=ROWS, sharding=sharding, identity=sets.identity)


class Rows:
    """What a user of plain Grain writes over a flat file of tokens."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SEQ_LEN

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"tokens": self.tokens[i * SEQ_LEN : i * SEQ_LEN + SEQ_LEN + 1].astype(np.int32)}


class Documents:
    def __init__(self, tokens: np.ndarray, offsets: np.ndarray) -> None:
        self.tokens, self.offsets = tokens, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        start, end = self.offsets[i : i + 2]
        return {"tokens": self.tokens[start : min(end, start + SEQ_LEN + 1)].astype(np.int32)}


def plain_grain(tokens: np.ndarray, sharding: NamedSharding, threads: int) -> Iterator[Any]:
    data = grain.MapDataset.source(Rows(tokens)).shuffle(seed=0).repeat().batch(ROWS)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=8)
    return iter(data.map(lambda b: jax.device_put(b, sharding)).to_iter_dataset(options))


def grain_packed(tokens: np.ndarray, offsets: np.ndarray, sharding: NamedSharding, bins: int) -> Iterator[Any]:
    data = grain.MapDataset.source(Documents(tokens, offsets)).shuffle(seed=0).repeat()
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=64)
    packed = grain.experimental.BestFitPackIterDataset(
        data.to_iter_dataset(options), length_struct={"tokens": SEQ_LEN + 1}, num_packing_bins=bins
    )
    return iter(packed.batch(ROWS).map(lambda b: jax.device_put(b, sharding)))


def torch_loader(dataset: Any, workers: int, sharding: NamedSharding) -> Iterator[Any]:
    import torch

    sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=10**9)
    loader = torch.utils.data.DataLoader(dataset, batch_size=ROWS, sampler=sampler, num_workers=workers)
    return (jax.device_put({name: x.numpy() for name, x in batch.items()}, sharding) for batch in loader)


def loaders(directory: Path, tokens: int, sharding: NamedSharding) -> dict[str, Callable[[], Iterator[Any]]]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 1, tokens // 500).astype(np.int64), 2, None)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), tokens)]
    values = rng.integers(1, 50000, lengths.sum(), dtype=np.uint16)
    for name in ("a", "b"):
        write_store(directory / name, values, lengths)
    one, two = {"a": str(directory / "a")}, {name: str(directory / name) for name in "ab"}
    flat = np.memmap(directory / "a/tokens.bin", np.uint16, "r")
    offsets = np.fromfile(directory / "a/offsets.bin", "<i8")
    found: dict[str, Callable[[], Iterator[Any]]] = {
        "jaxckpt, cut": lambda: ours(one, sharding),
        "jaxckpt, packed": lambda: ours(one, sharding, rows="packed"),
        "jaxckpt, one document a row": lambda: ours(one, sharding, rows="documents"),
        "jaxckpt, mixture of two": lambda: ours(two, sharding, weights={"a": 0.7, "b": 0.3}),
        "grain over the same file": lambda: plain_grain(flat, sharding, 0),
        "grain over the same file, 2 threads": lambda: plain_grain(flat, sharding, 2),
        "grain, best-fit packing, 256 bins": lambda: grain_packed(flat, offsets, sharding, 256),
    }
    try:
        import datasets
        import torch  # noqa: F401 (is it there?)
    except ImportError as e:
        print(f"torch's DataLoader is left out: {e}")
        return found
    count = (min(flat.size, 20_000_000) - 1) // SEQ_LEN  # rows enough not to fit into a processor's cache
    columns = {"tokens": [flat[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].astype(np.int32) for i in range(count)]}
    datasets.Dataset.from_dict(columns).save_to_disk(directory / "hf")
    saved = datasets.load_from_disk(directory / "hf").with_format("torch")
    found["torch DataLoader on datasets"] = lambda: torch_loader(saved, 0, sharding)
    found["torch DataLoader on datasets, 2 workers"] = lambda: torch_loader(saved, 2, sharding)
    return found


def speed(batches: Iterator[Any], seconds: float) -> float:
    """Tokens a second, in millions."""
    for _ in range(5):
        jax.block_until_ready(next(batches))
    began, count = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        jax.block_until_ready(next(batches))
        count += 1
    return count * ROWS * SEQ_LEN / took / 1e6


def seek_ms(directory: Path, sharding: NamedSharding) -> float:
    """Milliseconds from a position of 10 million steps to its batch."""
    stream = ours(
        {"a": str(directory / "a"), "b": str(directory / "b")}, sharding, rows="packed", weights={"a": 1, "b": 2}
    )
    assert isinstance(stream, BatchStream)
    next(stream)
    stream.close()
    began = time.perf_counter()
    stream.restore({**stream.state(), "batches": 10_000_000})
    jax.block_until_ready(next(stream))
    took = time.perf_counter() - began
    stream.close()
    return 1e3 * took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    with tempfile.TemporaryDirectory() as name:
        makers = loaders(Path(name), args.tokens, sharding)
        figures: dict[str, list[float]] = {label: [] for label in makers}
        for round_ in range(args.rounds):
            for label, make in makers.items():
                batches = make()
                figures[label].append(speed(batches, args.seconds))
                if hasattr(batches, "close"):
                    batches.close()
                del batches
            print(f"round {round_ + 1} of {args.rounds}", flush=True)
        seek = statistics.median(seek_ms(Path(name), sharding) for _ in range(5))
    medians = {label: statistics.median(values) for label, values in figures.items()}
    best = max(value for label, value in medians.items() if not label.startswith("jaxckpt"))
    print(f"\n{'':42} Mtok/s  (least to most)   of the best other")
    for label, value in medians.items():
        print(
            f"{label:42} {value:6.1f}  ({min(figures[label]):.1f} to {max(figures[label]):.1f})   {value / best:5.2f}"
        )
    print(f"to step 10 million of a packed mixture, and its batch: {seek:.1f} ms")
    print(json.dumps({"medians": medians, "seek_ms": seek}))


if __name__ == "__main__":
    main()
