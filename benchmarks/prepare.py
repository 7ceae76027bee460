"""`prepare` beside `datasets.map` with the same tokenizer, in turns in one run; or `prepare` under a memory limit.

python benchmarks/prepare.py [--megabytes 48] [--rounds 3] [--vocabulary 4096] [--document 3000]
python benchmarks/prepare.py --memory 96 [--times 20]

The text is Python's standard library and the speeches of the repository, cut to documents of --document characters on
average (sizes are spread evenly from none to twice that), as JSON lines. Both give token numbers on disk; `prepare`
also reads the JSON, which `datasets` has done before its time is taken, and waits for the disk.

--memory: a process may take that many MiB of memory above what its imports took (RLIMIT_DATA), and makes a store --times
that size, of bytes.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SPEECHES = Path(__file__).parents[1] / "configs/data/sotu"


def texts(average: int, total: int) -> Iterator[str]:
    """Documents of about `total` bytes."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [*sorted(SPEECHES.glob("*.txt")), *sorted(stdlib.rglob("*.py"))]
    draw = random.Random(0)
    while True:
        draw.shuffle(files)
        for file in files:
            text, start = file.read_text(errors="ignore"), 0
            while start < len(text):
                size = draw.randrange(1, 2 * average)
                if (piece := text[start : start + size]).strip():
                    total -= len(piece.encode())
                    yield piece
                if total <= 0:
                    return
                start += size


def write_lines(path: Path, average: int, total: int) -> int:
    """Bytes of text in the file."""
    size = 0
    with open(path, "w") as file:
        for text in texts(average, total):
            size += len(text.encode())
            file.write(json.dumps({"text": text}) + "\n")
    return size


def compare(options: argparse.Namespace, directory: Path) -> None:
    import datasets
    import tokenizers

    from jaxckpt.data import bpe
    from jaxckpt.data.prepare import Settings, prepare

    datasets.disable_caching()
    datasets.disable_progress_bars()
    lines, model = directory / "text.jsonl", directory / "tokenizer.json"
    size = write_lines(lines, options.document, options.megabytes << 20)
    model.write_bytes(bpe.train(texts(options.document, min(options.megabytes, 16) << 20), options.vocabulary))
    loaded = datasets.Dataset.from_json(str(lines), cache_dir=str(directory / "loaded"))
    encoder = tokenizers.Tokenizer.from_file(str(model))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [e.ids for e in encoder.encode_batch(batch["text"], add_special_tokens=False)]}

    def by_datasets(num_proc: int | None) -> int:
        cache = str(directory / f"mapped-{time.monotonic_ns()}.arrow")
        done = loaded.map(encode, batched=True, num_proc=num_proc, remove_columns=["text"], cache_file_name=cache)
        return len(done)

    def by_prepare() -> int:
        out = directory / f"store-{time.monotonic_ns()}"
        return prepare([lines], out, Settings(tokenizer=str(model))).headers[0].tokens

    ways = {
        "datasets.map(batched=True)": lambda: by_datasets(None),
        "datasets.map(batched=True, num_proc=2)": lambda: by_datasets(2),
        "prepare": by_prepare,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    print(f"{size / 2**20:.0f} MiB, {len(loaded):,} documents, {os.cpu_count()} cores, vocabulary {options.vocabulary}")
    for _ in range(options.rounds):
        for name, work in ways.items():
            start, before = time.perf_counter(), sum(os.times()[:4])
            work()
            taken[name].append(time.perf_counter() - start)
            used[name].append(sum(os.times()[:4]) - before)
            print(f"  {name}: {taken[name][-1]:.1f} s, {used[name][-1]:.1f} CPU-seconds", flush=True)
    for what, choose in (("median", statistics.median), ("best round", min)):
        found = {name: (choose(taken[name]), choose(used[name])) for name in ways}
        print(what)
        for name, (seconds, cpu) in found.items():
            print(f"  {name:40} {seconds:6.1f} s  {size / seconds / 2**20:6.2f} MiB/s  {cpu:6.1f} CPU-seconds")
        ours, others = found.pop("prepare"), found.values()
        by_clock, by_cpu = (min(other[i] for other in others) / ours[i] for i in (0, 1))
        print(
            f"  prepare is {by_clock:.2f} times as fast as the faster datasets.map, by CPU-seconds {by_cpu:.2f} times"
        )


def status(key: str) -> int:
    """KiB of a line of this process's /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1])


def limited(source: Path, out: Path, limit_mib: int) -> None:
    """In a process of its own."""
    import tokenizers  # noqa: F401 (an import of prepare's)

    from jaxckpt.data.prepare import Settings, prepare

    before, resident = status("VmData"), status("RssAnon")
    resource.setrlimit(resource.RLIMIT_DATA, ((before + (limit_mib << 10)) << 10,) * 2)
    done = prepare([source], out, Settings())
    size = sum(file.stat().st_size for file in out.iterdir())
    print(
        f"store {size / 2**20:.0f} MiB; limit {limit_mib} MiB above the imports' {before / 1024:.0f} MiB of data; anonymous "
        f"memory {resident / 1024:.0f} MiB before, {status('RssAnon') / 1024:.0f} MiB after; "
        f"{size / (limit_mib << 20):.1f} times the limit; {done.seconds:.0f} s"
    )


def memory(options: argparse.Namespace, directory: Path) -> None:
    lines, out = directory / "text.jsonl", directory / "store"
    write_lines(lines, options.document, (options.memory << 20) * options.times // 2)  # two bytes a token
    command = [sys.executable, __file__, "--limited", str(lines), str(out), str(options.memory)]
    subprocess.run(command, check=True)
    too_little = subprocess.run([*command[:-2], str(directory / "none"), "1"], capture_output=True, text=True)
    is_working = "MemoryError" in too_little.stderr or "Cannot allocate" in too_little.stderr
    print(f"the same with 1 MiB: exit code {too_little.returncode}, so the limit works: {is_working}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--document", type=int, default=3000)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--limited", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.limited:
        source, out, limit = options.limited
        limited(Path(source), Path(out), int(limit))
        return
    directory = Path(tempfile.mkdtemp(prefix="prepare-"))
    try:
        (memory if options.memory else compare)(options, directory)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
