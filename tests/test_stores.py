"""Token stores as a run's data: what they become, and what is refused before anything is trained."""

import json
import shutil

import numpy as np
import pytest

from gcs import BUCKET
from jaxckpt.data.chat import make_renderer
from jaxckpt.data.mixture import Mixture
from jaxckpt.data.prepare import Settings, prepare
from jaxckpt.data.sources import Wanted
from jaxckpt.data.store import TokenStore, block_hashes, content_hash
from jaxckpt.data.stores import make_store_datasets
from jaxckpt.errors import DataError
from jaxckpt.snapshot import gcs as objects
from jaxckpt.snapshot import paths

TEXTS = {"a": ["one document", "another one", "and a third that is longer than a row"], "b": ["x" * 50, "y" * 9]}


@pytest.fixture
def stores(tmp_path):
    """{name: directory} of two stores of bytes."""
    for name, texts in TEXTS.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
        prepare([tmp_path / f"{name}.jsonl"], tmp_path / name, Settings())
    return {name: str(tmp_path / name) for name in TEXTS}


def make(stores, **args):
    return make_store_datasets(stores, **{"seq_len": 8, "seed": 0, **args})


def text_of(example):
    tokens = example["tokens"]
    return bytes(tokens[(tokens > 0) & (tokens < 256)].astype(np.uint8)).decode()


def test_documents_one_a_row_are_the_documents(stores):
    sets = make(stores, rows="documents", seq_len=60, weights={"a": 1})
    assert isinstance(sets.train, Mixture)
    assert sorted(text_of(sets.train[i]) for i in range(3)) == sorted(TEXTS["a"])
    sets = make(stores, rows="documents", seq_len=60, held_out=stores["b"])
    assert sets.held_out is not None
    assert [text_of(sets.held_out[i]) for i in range(2)] == TEXTS["b"]


def test_by_default_every_row_of_every_store_comes_equally_often(stores):
    sets = make(stores)
    rows = {name: component.epoch_length for name, component in sets.train.components.items()}
    assert sets.train.draws(10 * sum(rows.values())) == {name: 10 * n for name, n in rows.items()}


def test_the_seed_and_the_name_decide_the_order(stores):
    def order(sets):
        return [sets.train[i]["tokens"].tobytes() for i in range(20)]

    assert order(make(stores)) == order(make(stores)) != order(make(stores, seed=1))


def test_one_store_under_two_names_has_two_orders(stores):
    sets = make({"x": stores["a"], "y": stores["a"]}, seq_len=2)
    x, y = ([c[i]["tokens"].tobytes() for i in range(c.epoch_length)] for c in sets.train.components.values())
    assert sorted(x) == sorted(y) and x != y


def test_a_store_without_a_mask_counts_every_token_beside_one_that_has_one(stores, tmp_path):
    shutil.copytree(stores["a"], tmp_path / "masked")
    header = json.loads((tmp_path / "masked/store.json").read_text())
    (tmp_path / "masked/loss_mask.bin").write_bytes(bytes(header["tokens"]))
    blocks = {**header["blocks"], "loss_mask.bin": list(block_hashes(tmp_path / "masked/loss_mask.bin"))}
    header |= {"has_loss_mask": True, "blocks": blocks, "content_hash": content_hash(blocks)}
    (tmp_path / "masked/store.json").write_text(json.dumps(header))
    sets = make({"masked": str(tmp_path / "masked"), "b": stores["b"]}, weights={"masked": 1, "b": 1})
    masks = {sets.train[i]["loss_mask"].tobytes() for i in range(10)}
    assert masks == {bytes(9), bytes([1] * 9)}


def test_a_mask_of_the_data_to_evaluate_on_does_not_reach_the_training_rows(stores, tmp_path):
    (tmp_path / "qa.jsonl").write_text(json.dumps({"prompt": "what?", "response": "that"}))
    wanted = Wanted(render=make_renderer("prompt_response"))
    prepare([tmp_path / "qa.jsonl"], tmp_path / "qa", Settings(wanted=wanted, render="qa"))
    sets = make(stores, held_out=str(tmp_path / "qa"))
    assert set(sets.train[0]) == {"tokens"}
    assert sets.held_out is not None and "loss_mask" in sets.held_out[0]


def test_the_identity_changes_with_everything_that_moves_a_row_and_not_with_the_place(stores, tmp_path):
    shutil.copytree(stores["a"], tmp_path / "moved")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "other"}))
    prepare([tmp_path / "a.jsonl"], tmp_path / "other", Settings())
    base = make(stores).identity
    assert make({**stores, "a": str(tmp_path / "moved")}).identity == base
    others = [
        make({**stores, "a": str(tmp_path / "other")}, seq_len=4, rows="packed").identity,
        make(stores, seq_len=7).identity,
        make(stores, seed=1).identity,
        make(stores, rows="packed").identity,
        make(stores, rows="packed", long_documents="truncate").identity,
        make({"a": stores["a"]}).identity,
        make({"c": stores["a"], "b": stores["b"]}).identity,
    ]
    assert len({json.dumps(i) for i in [base, *others]}) == len(others) + 1
    changed = make({**stores, "a": str(tmp_path / "other")}, seq_len=4).identity
    assert {k for k in base if changed[k] != base[k]} == {"a.content", "seq_len"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: shutil.rmtree(p), "a: .*is no token store: no such directory"),
        (
            lambda p: (p / "store.json").unlink(),
            "a: .*it has no store.json: it was never finished.*same command finishes",
        ),
        (lambda p: (p / "tokens.bin").write_bytes(b"12"), "a: .*tokens.bin has 2 bytes and .* says 126"),
        (lambda p: (p / "offsets.bin").unlink(), "a: .*offsets.bin cannot be read"),
        (lambda p: (p / "store.json").write_text("{"), "a: .*store.json cannot be read"),
        (
            lambda p: (p / "store.json").write_text('{"format": 9}'),
            "a: .*has the format 9; this jaxckpt reads format 1",
        ),
        (lambda p: (p / "store.json").write_text('{"format": 1}'), "a: .*does not hold what a header holds"),
    ],
)
def test_what_is_no_whole_store_is_refused(stores, tmp_path, damage, message):
    damage(tmp_path / "a")
    with pytest.raises(DataError, match=message) as caught:
        make({**stores, "missing": str(tmp_path / "missing")})
    assert "missing: " in str(caught.value), "all problems at once"


def test_stores_of_different_tokenizers_do_not_mix(stores, tmp_path):
    prepare([tmp_path / "b.jsonl"], tmp_path / "bpe", Settings(tokenizer="train:300"))
    with pytest.raises(DataError, match=r"different tokenizers:\n  a: bytes .*\n  bpe: train:300"):
        make({"a": stores["a"], "bpe": str(tmp_path / "bpe")})


def test_too_little_text_for_a_row_is_named_with_its_store(stores):
    with pytest.raises(DataError, match=r"b: 61 tokens in 2 documents make no row of seq_len \+ 1 = 65 tokens"):
        make(stores, seq_len=64, weights={"a": 1})
    with pytest.raises(
        DataError, match=r"b: .* no row of at most seq_len \+ 1 = 4 .* give long_documents split or truncate"
    ):
        make(stores, seq_len=3, rows="packed", long_documents="leave_out")
    with pytest.raises(DataError, match="none of them held_out"):
        make({"held_out": stores["a"]})
    with pytest.raises(DataError, match="the weights sum to zero"):
        make(stores, weights={"a": 0, "b": 0})


def test_a_store_is_mapped_and_not_read(stores):
    store = TokenStore(stores["a"])
    assert isinstance(store.tokens.base, np.memmap) and isinstance(store.offsets.base, np.memmap)
    assert not store.tokens.flags.writeable


def upload(store, name):
    paths.resolve(f"gs://{BUCKET}/{name}")  # prepares the libraries
    for file in store.iterdir():
        objects.upload(str(file), f"gs://{BUCKET}/{name}/{file.name}")
    return f"gs://{BUCKET}/{name}"


def test_a_store_on_gs_is_copied_once_and_checked(gcs, stores, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCKPT_CACHE", str(tmp_path / "cache"))
    path = upload(tmp_path / "a", "copied")
    first = make({**stores, "a": path})
    assert first.identity == make(stores).identity
    assert [first.train[i]["tokens"].tobytes() for i in range(20)] == [
        make(stores).train[i]["tokens"].tobytes() for i in range(20)
    ]
    before = len(gcs.requests)
    make({**stores, "a": path})
    assert ["store.json" in request for request in gcs.requests[before:]] == [True], "only the header is asked for"


def test_a_store_on_gs_that_is_not_whole_is_refused_and_leaves_no_copy(gcs, stores, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCKPT_CACHE", str(tmp_path / "cache"))
    path = upload(tmp_path / "a", "damaged")
    objects.write(f"{path}/tokens.bin", b"x" * (tmp_path / "a/tokens.bin").stat().st_size)
    objects.delete(f"gs://{BUCKET}/damaged/offsets.bin")
    with pytest.raises(DataError, match=r"damaged has no offsets.bin, which its store.json tells of"):
        make({"a": path})
    objects.upload(str(tmp_path / "a/offsets.bin"), f"{path}/offsets.bin")
    with pytest.raises(DataError, match=r"damaged/tokens.bin is not what was written: its block 0"):
        make({"a": path})
    with pytest.raises(DataError, match=r"nothing is no token store: there is no object .*nothing/store.json"):
        make({"a": f"gs://{BUCKET}/nothing"})
    assert not [p for p in (tmp_path / "cache").rglob("store.json")]
