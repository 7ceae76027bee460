"""One, two and four real processes are fed the same global batches, to the bit, on any mesh and over any resume."""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from feeding import open_stream
from groups import free_port, kill
from jaxckpt.data.prepare import Settings, prepare
from runs import ROOT, finish, start

WORKER = str(Path(__file__).parent / "feeds.py")
COUNT = 18


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """`long`: one document a file, of many rows; `short`: forty documents of some dozen tokens, read several times."""
    directory = tmp_path_factory.mktemp("stores")
    text = (ROOT / "configs/data/sotu/1950_harry_s_truman.txt").read_text()
    (directory / "long.txt").write_text(text[:20000])
    lines = [json.dumps({"text": text[90 * i : 90 * i + 5 + 7 * i % 41]}) for i in range(40)]
    (directory / "short.jsonl").write_text("\n".join(lines))
    prepare([directory / "long.txt"], directory / "long", Settings())
    prepare([directory / "short.jsonl"], directory / "short", Settings())
    return directory


@pytest.fixture(scope="module")
def expected(stores):
    """The hashes of the first batches, drawn here on one device."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    stream = open_stream(stores, NamedSharding(mesh, PartitionSpec("data")))
    digests = []
    for _ in range(COUNT):
        digest = hashlib.sha256()
        for name, array in sorted(next(stream).items()):
            digest.update(name.encode() + np.asarray(array).tobytes())
        digests.append(digest.hexdigest())
    # The later ones come from another epoch of the short documents.
    assert (
        stream._mixture.draws(stream.state()["next_example"])["short"]
        > 2 * stream._mixture.components["short"].epoch_length
    )
    stream.close()
    assert len(set(digests)) == COUNT
    return digests


def draw(stores, count, state, *, processes, axes, spec):
    """(hashes, position) on which all processes agree."""
    port, devices = str(free_port()), str(4 // processes)
    arguments = [port, devices, json.dumps(axes), json.dumps(spec), str(count), json.dumps(state), str(stores)]
    command = [sys.executable, WORKER, str(processes)]
    group = [start([*command, str(i), *arguments], PYTHONPATH=str(ROOT)) for i in range(processes)]
    try:
        answers = [json.loads(finish(process).strip().splitlines()[-1]) for process in group]
    finally:
        kill(group)
    assert all(answer == answers[0] for answer in answers)
    return answers[0].get("digests"), answers[0].get("state") or answers[0]["refused"]


def test_any_number_of_processes_on_any_mesh_is_fed_the_same_and_goes_on_where_another_left_off(stores, expected):
    lives = [
        (3, {"processes": 2, "axes": {"data": 2, "seq": 2}, "spec": ["data", "seq"]}),  # rows and columns
        (4, {"processes": 4, "axes": {"data": 4}, "spec": ["data"]}),  # to the middle of the skip and of the mixture
        (4, {"processes": 2, "axes": {"tensor": 2, "data": 2}, "spec": ["data"]}),  # replicas across processes
        (3, {"processes": 1, "axes": {"seq": 4}, "spec": [None, "seq"]}),  # columns only
        (4, {"processes": 2, "axes": {"data": 4}, "spec": ["data", "mixed"]}),  # rows that are not neighbours
    ]
    digests, state = [], None
    for count, layout in lives:
        drawn, state = draw(stores, count, state, **layout)
        digests += drawn
    assert digests == expected
    assert len(json.dumps(state)) < 600


def test_an_iterator_on_each_process_goes_on_exactly_with_as_many_and_is_refused_with_fewer():
    two = {"processes": 2, "axes": {"data": 4}, "spec": ["data"]}
    whole, _ = draw("iterated", 9, None, **two)
    first, state = draw("iterated", 4, None, **two)
    second, _ = draw("iterated", 5, state, **two)
    assert first + second == whole and len(set(whole)) == 9
    _, refusal = draw("iterated", 5, state, processes=1, axes={"data": 4}, spec=["data"])
    assert "it was saved by 2 processes and is to go on with 1" in refusal
