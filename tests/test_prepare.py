"""Inputs to token stores: what is in them, what a killed or another command finds, and what is refused."""

import contextlib
import errno
import fcntl
import filecmp
import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from jaxckpt.cli import app
from jaxckpt.data import bpe
from jaxckpt.data.command import not_written
from jaxckpt.data.encode import Encoder
from jaxckpt.data.prepare import Settings, Stopped, Watch, prepare
from jaxckpt.data.sources import Document, Wanted
from jaxckpt.data.store import BLOCK_BYTES, TokenStore
from jaxckpt.data.tokens import load_tokenizer, split_by_name
from jaxckpt.data.writer import BlockFile, StoreWriter
from jaxckpt.errors import DataError
from jaxckpt.observe.preparing import PrepareProgress

SOTU = Path(__file__).parent.parent / "configs/data/sotu"
SMALL = {"save_every": 4000, "batch_characters": 1500}
"""so that a few hundred documents take many batches and saves"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Path of a small tokenizer.json."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(bpe.train([f.read_text() for f in sorted(SOTU.glob("*.txt"))[:6]], 600))
    return path


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def words(seed, documents, most=60):
    draw = random.Random(seed)
    vocabulary = (SOTU / "1961_john_f_kennedy.txt").read_text().split()
    return [" ".join(draw.choices(vocabulary, k=draw.randrange(1, most))) for _ in range(documents)]


@pytest.fixture
def corpus(tmp_path):
    """Inputs of several kinds, 450 documents."""
    directory = tmp_path / "corpus"
    directory.mkdir()
    write_lines(directory / "a.jsonl", words(1, 200))
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(write_lines(directory / "b", words(2, 200)).read_bytes()))
    for i, text in enumerate(words(3, 50)):
        (directory / f"c{i:02d}.txt").write_text(text)
    return [directory / "a.jsonl", directory / "b.jsonl.gz", f"{directory}/c*.txt"]


def documents_of(path, tokenizer):
    store = TokenStore(path)
    pairs = zip(store.offsets[:-1], store.offsets[1:], strict=True)
    found = [store.tokens[a:b] for a, b in pairs]
    assert store.offsets[0] == 0 and store.offsets[-1] == len(store.tokens)
    assert all(d[-1] == tokenizer.eos and tokenizer.eos not in d[:-1] for d in found)
    return [tokenizer.decode(d[:-1]) for d in found]


def assert_same(one, other):
    files = [sorted(str(p.relative_to(d)) for p in Path(d).rglob("*") if p.is_file()) for d in (one, other)]
    assert files[0] == files[1]
    assert [f for f in files[0] if not filecmp.cmp(Path(one) / f, Path(other) / f, shallow=False)] == []


# -------------------------------------------------------------------------------------------------- content

odd = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
long = st.builds(lambda text, times: text * times, st.text("aé😀 \n1.", min_size=1, max_size=9), st.integers(1, 300))


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(odd | long, max_size=12))
def test_any_texts_come_back_from_a_store(texts, trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("store")
    lines = write_lines(directory / "x.jsonl", texts)
    kept = [t for t in texts if t.strip()]
    for tokenizer in ("bytes", str(trained)):
        out = directory / tokenizer.replace("/", "-")
        if not kept:
            with pytest.raises(DataError, match="hold no document"):
                prepare([lines], out, Settings(tokenizer))
            continue
        prepare([lines], out, Settings(tokenizer), watch=Watch(batch_characters=50))
        assert documents_of(out, load_tokenizer(tokenizer)) == kept
        (source,) = TokenStore(out).header.sources
        assert source["documents"] == len(kept) and source.get("left_out", {"empty": 0})["empty"] == len(texts) - len(
            kept
        )


def test_tokens_are_those_of_the_tokenizer_and_batches_do_not_matter(corpus, trained, tmp_path):
    tokenizer = load_tokenizer(trained)
    prepare(corpus, tmp_path / "a", Settings(str(trained)))
    prepare(corpus, tmp_path / "b", Settings(str(trained)), watch=Watch(**SMALL))
    assert_same(tmp_path / "a", tmp_path / "b")
    store = TokenStore(tmp_path / "a")
    expected = [t for text in words(1, 200) for t in (*tokenizer.encode(text), tokenizer.eos)]
    assert store.tokens[: len(expected)].tolist() == expected
    assert store.header.vocab_size == tokenizer.vocab_size and store.header.tokenizer_hash == tokenizer.fingerprint
    assert [s["documents"] for s in store.header.sources] == [200, 200, *[1] * 50]
    assert sum(s["tokens"] for s in store.header.sources) == len(store.tokens)
    assert load_tokenizer(tmp_path / "a").fingerprint == tokenizer.fingerprint


def test_the_holdout_is_the_split_by_name_and_both_stores_together_are_the_whole(corpus, tmp_path):
    tokenizer = load_tokenizer("bytes")
    prepare(corpus, tmp_path / "whole")
    prepare(corpus, tmp_path / "out", Settings(holdout=0.2, seed=3), watch=Watch(**SMALL))
    names = [f"a.jsonl:{i}" for i in range(1, 201)] + [f"b.jsonl.gz:{i}" for i in range(1, 201)]
    names += [f"c{i:02d}.txt" for i in range(50)]
    held = split_by_name(names, holdout=0.2, seed=3)
    whole = documents_of(tmp_path / "whole", tokenizer)
    for split, side in (("train", False), ("held_out", True)):
        expected = [text for text, out in zip(whole, held, strict=True) if out == side]
        assert documents_of(tmp_path / "out" / split, tokenizer) == expected


@pytest.mark.parametrize("holdout", [0.000001, 0.999999])
def test_an_empty_side_gets_the_nearest_document(holdout, tmp_path):
    lines = write_lines(tmp_path / "x.jsonl", [f"text {i}" for i in range(9)])
    prepare([lines], tmp_path / "out", Settings(holdout=holdout), watch=Watch(batch_characters=10))
    held = split_by_name([f"x.jsonl:{i}" for i in range(1, 10)], holdout=holdout, seed=0)
    assert sum(held) in (1, 8)
    for split, side in (("train", False), ("held_out", True)):
        expected = [f"text {i}" for i in range(9) if held[i] == side]
        assert documents_of(tmp_path / "out" / split, load_tokenizer("bytes")) == expected
    alone = write_lines(tmp_path / "y.jsonl", ["alone"])
    with pytest.raises(DataError, match=r"two documents or more.*found 1"):
        prepare([alone], tmp_path / "alone", Settings(holdout=holdout))


def test_a_trained_tokenizer_is_the_same_each_time_and_is_in_every_store(corpus, tmp_path):
    for name in ("a", "b"):
        prepare(corpus, tmp_path / name, Settings("train:400", holdout=0.2))
    assert_same(tmp_path / "a", tmp_path / "b")
    header = TokenStore(tmp_path / "a/train").header
    assert header.vocab_size == 400 and header.eos == 0 and header.dtype == "uint16" and header.tokenizer == "train:400"
    tokenizer = load_tokenizer(tmp_path / "a/held_out")
    assert documents_of(tmp_path / "a/held_out", tokenizer)[0] in words(1, 200)
    # What is held out is held out from the tokenizer too.
    seen = documents_of(tmp_path / "a/train", tokenizer)
    assert (
        (tmp_path / "a/train/tokenizer.json").read_bytes()
        == bpe.train(seen, 400)
        != bpe.train([*seen, "qq" * 999], 400)
    )
    prepare(corpus, tmp_path / "c", Settings("train:400", train_bytes=2000))
    assert load_tokenizer(tmp_path / "c").fingerprint != tokenizer.fingerprint
    with pytest.raises(DataError, match=r"train:12.*from 257"):
        prepare(corpus, tmp_path / "d", Settings("train:12"))


def test_a_large_vocabulary_takes_four_bytes(tmp_path, trained):
    tree = json.loads(trained.read_text())
    tree["model"]["vocab"]["<far>"] = 70_000
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 70_000, "content": "<far>", "special": False})
    (tmp_path / "far.json").write_text(json.dumps(tree))
    vocabulary = load_tokenizer(tmp_path / "far.json").vocab_size
    prepare(
        [write_lines(tmp_path / "x.jsonl", ["one <far> two"])], tmp_path / "out", Settings(str(tmp_path / "far.json"))
    )
    tokens = TokenStore(tmp_path / "out").tokens
    assert vocabulary == 70_001 and tokens.dtype == np.uint32 and 70_000 in tokens
    assert documents_of(tmp_path / "out", load_tokenizer(tmp_path / "far.json")) == ["one <far> two"]


def test_a_tokenizer_that_cuts_and_fills_up_does_so_no_more(tmp_path, trained):
    import tokenizers

    model = tokenizers.Tokenizer.from_file(str(trained))
    model.enable_truncation(4)
    model.enable_padding(length=8)
    model.save(str(tmp_path / "cuts.json"))
    texts = ["one two three four five six seven", "eight"]
    prepare([write_lines(tmp_path / "x.jsonl", texts)], tmp_path / "out", Settings(str(tmp_path / "cuts.json")))
    tokenizer = load_tokenizer(tmp_path / "cuts.json")
    assert documents_of(tmp_path / "out", tokenizer) == texts == [tokenizer.decode(tokenizer.encode(t)) for t in texts]


# -------------------------------------------------------------------------------------------------- targets

spans = st.lists(st.integers(0, 30), max_size=8, unique=True).map(sorted)


@settings(max_examples=60, deadline=None)
@given(text=st.text("aé😀 b\n", min_size=1, max_size=30), borders=spans)
def test_a_token_is_a_target_iff_its_characters_overlap_one(text, borders, trained):
    borders = [b for b in borders if b <= len(text)]
    targets = tuple(zip(borders[::2], borders[1::2], strict=False))
    plain = Document("plain", "no targets")
    for tokenizer in ("bytes", str(trained)):
        encoder = Encoder(tokenizer)
        found = encoder.encode([plain, Document("x", text, targets), plain])
        start = found.lengths[0]
        tokens, mask = found.tokens[start:][: found.lengths[1]], found.mask[start:][: found.lengths[1]]
        assert found.mask[:start].all() and found.mask[start + found.lengths[1] :].all()
        # Where a token's characters are: the shortest beginnings of the text that contain its first and its last byte.
        sizes = [len(encoder.tokenizer.decode([t]).encode()) if tokenizer != "bytes" else 1 for t in tokens[:-1]]
        if sum(sizes) == len(text.encode()):  # half a character decodes to something else
            ends = np.cumsum(sizes)
            of_byte = [i for i, c in enumerate(text) for _ in c.encode()]
            covered = [set(of_byte[e - s : e]) for s, e in zip(sizes, ends, strict=True)]
            expected = [any(a < c + 1 and b > c for c in chars for a, b in targets) for chars in covered]
            assert mask[:-1].tolist() == expected
        assert mask[-1] == bool(targets and targets[-1][1] == len(text))


def test_a_mask_is_written_from_the_first_document_that_needs_one(tmp_path, corpus):
    def render(record, name):
        text, number = record["text"], int(name.split(":")[1])
        return Document(name, text, None if number < 150 else ((0, len(text) // 2),))

    how = Settings(wanted=Wanted(render=render), render="halves")
    prepare(corpus[:1], tmp_path / "out", how, watch=Watch(**SMALL))
    store = TokenStore(tmp_path / "out")
    assert store.header.has_loss_mask and store.loss_mask[: store.offsets[149]].all()
    for i in range(149, 200):
        mask = store.loss_mask[store.offsets[i] : store.offsets[i + 1]]
        assert mask[: (len(mask) - 1) // 2].all() and not mask[(len(mask) - 1) // 2 :].any()
    whole = lambda record, name: Document(name, record["text"], ((0, len(record["text"])),))
    prepare(corpus[:1], tmp_path / "all", Settings(wanted=Wanted(render=whole), render="whole"))
    assert not TokenStore(tmp_path / "all").header.has_loss_mask
    wrong = lambda record, name: Document(name, record["text"], ((5, 2),))
    with pytest.raises(DataError, match=r"a\.jsonl:1: target ranges \[\(5, 2\)\]"):
        prepare(corpus[:1], tmp_path / "wrong", Settings(wanted=Wanted(render=wrong), render="wrong"))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_long_text_has_the_same_tokens_through_windows(data, trained):
    pieces = st.sampled_from(["word ", "Wörter, ", "12345", "\n\n", "  ", "😀", "it's ", "x" * 30, "\tdef f():"])
    text = "".join(data.draw(st.lists(pieces, min_size=40, max_size=400)))
    windows, whole = Encoder(trained, window=160, overlap=100), Encoder(trained)
    for targets in (None, ((3, len(text) // 2),)):
        one, other = (e.encode([Document("x", text, targets)]) for e in (windows, whole))
        assert np.array_equal(one.tokens, other.tokens)
        assert (one.mask is None and other.mask is None) or np.array_equal(one.mask, other.mask)
    endless = Document("x", "l" * 2000)  # one word of pairs; a window that begins at an odd place disagrees
    odd_windows = Encoder(trained, window=161, overlap=102)
    assert np.array_equal(odd_windows.encode([endless]).tokens, whole.encode([endless]).tokens)


# -------------------------------------------------------------------------------------------------- interrupted


def stop_after(batches):
    """A watch that stops when so many batches are written, and saves now and then."""
    written = []
    progress = lambda done_bytes, tokens: written.append(tokens) if tokens else None
    return Watch(progress=progress, stop=lambda: len(written) >= batches, **SMALL)


CHILD = """
import sys
from jaxckpt.data.prepare import Settings, Watch, prepare
out, tokenizer, *inputs = sys.argv[1:]
watch = Watch(save_every=4000, batch_characters=1500, progress=lambda done, tokens: tokens and print(flush=True))
prepare(inputs, out, Settings(tokenizer, holdout=0.2), watch=watch)
"""


def start(out, tokenizer, inputs):
    command = [sys.executable, "-c", CHILD, *map(str, [out, tokenizer, *inputs])]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_a_killed_command_goes_on_to_identical_files(corpus, tmp_path):
    tokenizer = "train:400"
    how = Settings(tokenizer, holdout=0.2)
    prepare(corpus, tmp_path / "whole", how)
    for after in (9, 1):
        with start(tmp_path / "out", tokenizer, corpus) as process:
            for _ in range(after):
                process.stdout.readline()
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert not list((tmp_path / "out").glob("*/store.json"))
    partial = tmp_path / "out/partial"
    progress = json.loads((partial / "progress.json").read_text())
    assert progress["input"] or progress["place"][0], "nothing was saved"
    for file in partial.rglob("*.bin"):  # what the disk had beyond the saved place
        with open(file, "ab") as more:
            more.write(b"torn" * 100)
    told = []
    done = prepare(corpus, tmp_path / "out", how, watch=Watch(say=told.append))
    assert done.is_new and "goes on" in told[0] and done.tokens < sum(h.tokens for h in done.headers)
    assert_same(tmp_path / "whole", tmp_path / "out")
    partial.mkdir()
    (partial / "started.json").write_text("{}")  # a kill while what is no longer needed was deleted
    assert not prepare(corpus, tmp_path / "out", how).is_new and not partial.exists()


def test_a_stop_at_every_batch_goes_on_to_identical_files(corpus, tmp_path):
    """Also the tokenizer is trained once: another one would change its file."""
    how = Settings("train:400", holdout=0.2, skip_bad=True)
    (tmp_path / "corpus/bad.jsonl").write_text('{"text": "good"}\nbad\n\n{"text": " "}\n{"text": "last"}')
    inputs = [*corpus, tmp_path / "corpus/bad.jsonl"]
    prepare(inputs, tmp_path / "whole", how)
    lives = 0
    while True:
        lives += 1
        try:
            prepare(inputs, tmp_path / "out", how, watch=stop_after(1))
            break
        except Stopped:
            assert not list((tmp_path / "out").glob("*/store.json"))
    assert lives > 5
    assert_same(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_a_command_killed_while_it_moved_its_files_is_finished(holdout, corpus, tmp_path):
    how = Settings("train:300", holdout=holdout)
    stores = ("train", "held_out") if holdout else ("",)
    prepare(corpus, tmp_path / "whole", how)
    with pytest.raises(Stopped):
        prepare(corpus, tmp_path / "saved", how, watch=stop_after(6))
    partial = tmp_path / "saved/partial"
    for name in stores:
        (tmp_path / "saved" / name).mkdir(exist_ok=True)
    # The files as they lie when the last life has moved the tokens of the first store.
    for name in stores:
        for file in (tmp_path / "whole" / name).iterdir():
            (partial / (name or "store") / file.name).write_bytes(file.read_bytes())
    (partial / (stores[0] or "store") / "tokens.bin").rename(tmp_path / "saved" / stores[0] / "tokens.bin")
    progress = json.loads((partial / "progress.json").read_text())
    (partial / "progress.json").write_text(json.dumps({**progress, "done": True}))
    with pytest.raises(DataError, match="another command"):
        prepare(corpus[:1], tmp_path / "saved", how)
    prepare(corpus, tmp_path / "saved", how)
    assert_same(tmp_path / "whole", tmp_path / "saved")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_its_exit_code_tells(number, tmp_path):
    lines = write_lines(tmp_path / "x.jsonl", words(5, 30_000))
    command = [sys.executable, "-m", "jaxckpt", "prepare", "--out", str(tmp_path / "out"), str(lines)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as process:
        progress = tmp_path / "out/partial/progress.json"
        while not progress.exists() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(number)
        told = process.stderr.read()
    assert process.returncode == 128 + number and "the same command goes on" in told, told
    assert not (tmp_path / "out/store.json").exists()
    prepare([lines], tmp_path / "whole")
    assert prepare([lines], tmp_path / "out").is_new
    assert_same(tmp_path / "whole", tmp_path / "out")


# -------------------------------------------------------------------------------------------------- what is refused


def test_another_command_on_the_same_directory_is_refused_with_the_differences(corpus, tmp_path, trained):
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        prepare(corpus, out, Settings(holdout=0.2), watch=stop_after(5))
    other = Settings(str(trained), holdout=0.3, seed=1)
    with pytest.raises(DataError) as caught:
        prepare([corpus[1], corpus[2]], out, other)
    for expected in (
        "tokenizer: 'bytes' then, 'sha256",
        "holdout: 0.2 then, 0.3 now",
        "seed: 0 then, 1 now",
        "--restart",
    ):
        assert expected in str(caught.value)
    prepare([corpus[1], corpus[2]], out, other, restart=True)
    for inputs, changed in ((corpus, other), ([corpus[1], corpus[2]], Settings(holdout=0.2))):
        with pytest.raises(DataError, match="holds a whole store of another command") as caught:
            prepare(inputs, out, changed)
    assert "holdout: 0.3 then, 0.2 now" in str(caught.value)
    with pytest.raises(DataError, match=r"holds other stores.*train.*Give another --out"):
        prepare([corpus[1], corpus[2]], out, Settings())


def test_a_corrected_file_is_read_again_and_what_came_before_is_kept(corpus, tmp_path):
    inputs = [*corpus, tmp_path / "last.jsonl"]
    lines = [json.dumps({"text": t}) for t in words(9, 100)]
    inputs[-1].write_text("\n".join([*lines[:70], "{"]))
    with pytest.raises(DataError, match=r"last\.jsonl:71: not a line of JSON"):
        prepare(inputs, tmp_path / "out", Settings(holdout=0.2), watch=Watch(batch_characters=1500))
    assert not list((tmp_path / "out").glob("*/store.json"))
    inputs[-1].write_text("\n".join(lines[:20] + lines[30:]))
    done = prepare([*inputs, SOTU / "1961_john_f_kennedy.txt"], tmp_path / "out", Settings(holdout=0.2))
    prepare([*inputs, SOTU / "1961_john_f_kennedy.txt"], tmp_path / "whole", Settings(holdout=0.2))
    assert_same(tmp_path / "whole", tmp_path / "out")
    kept = sum(s["tokens"] for h in done.headers for s in h.sources[:52])
    assert done.tokens == sum(h.tokens for h in done.headers) - kept
    os.utime(tmp_path / "corpus/a.jsonl", (1, 1))
    with pytest.raises(DataError, match="another command"):
        prepare([*inputs, SOTU / "1961_john_f_kennedy.txt"], tmp_path / "out", Settings(holdout=0.2))


def test_an_earlier_file_that_changed_is_refused(corpus, tmp_path):
    with pytest.raises(Stopped):
        prepare(corpus[::-1], tmp_path / "out", watch=stop_after(20))
    (tmp_path / "corpus/c01.txt").write_text("something else")
    with pytest.raises(DataError, match=r"inputs: 52 files then, 52 now, the first that differs: c01\.txt"):
        prepare(corpus[::-1], tmp_path / "out")


def test_a_tokenizer_that_was_trained_on_all_inputs_is_of_these_inputs_alone(corpus, tmp_path):
    with pytest.raises(Stopped):
        prepare(corpus[:2], tmp_path / "out", Settings("train:300"), watch=stop_after(3))
    with pytest.raises(DataError, match="inputs: 2 files then, 52 now"):
        prepare(corpus, tmp_path / "out", Settings("train:300"))
    few = Settings("train:300", train_bytes=1000)
    with pytest.raises(Stopped):
        prepare(corpus[:2], tmp_path / "few", few, watch=stop_after(3))
    prepare(corpus, tmp_path / "few", few)
    prepare(corpus, tmp_path / "whole", few)
    assert_same(tmp_path / "whole", tmp_path / "few")


def test_a_file_that_changes_while_it_is_read_is_read_again(corpus, tmp_path):
    path = corpus[0]
    change = lambda done_bytes, tokens: os.utime(path, (9, 9))
    with pytest.raises(DataError, match=r"a\.jsonl: was changed while it was read"):
        prepare(corpus, tmp_path / "out", watch=Watch(progress=change, **SMALL))
    prepare(corpus, tmp_path / "out")
    prepare(corpus, tmp_path / "whole")
    assert_same(tmp_path / "whole", tmp_path / "out")


def test_problems_of_the_inputs_come_all_at_once_and_leave_nothing(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(b"")
    (tmp_path / "y.parquet").write_bytes(b"PAR1")
    entries = [tmp_path / n for n in ("x.jsonl.gz", "y.parquet", "none", "*.none")]
    with pytest.raises(DataError) as caught:
        prepare(entries, tmp_path / "out")
    for expected in ("x.jsonl.gz: ", "y.parquet: not a whole", "none: no such file", "*.none: the pattern"):
        assert expected in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="no inputs are given"):
        prepare([], tmp_path / "out")
    with pytest.raises(DataError, match="expected a share"):
        prepare([SOTU], tmp_path / "out", Settings(holdout=1.0))
    with pytest.raises(DataError, match="--seed -1: expected a whole number from 0"):
        prepare([SOTU], tmp_path / "out", Settings(seed=-1))
    for field in ("", " ", "prompt,"):
        code, told = jaxckpt("prepare", "--out", tmp_path / "out", "--field", field, SOTU)
        assert code == 2 and f"--field {field!r}: expected the name of a field" in told
    with pytest.raises(DataError, match="a local directory"):
        prepare([SOTU], "gs://bucket/out")


def test_bad_documents_are_told_up_to_twenty_or_left_out_and_counted(tmp_path):
    lines = ['{"text": "first"}', *["{"] * 30, '{"text": ""}', '{"text": "last"}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    (tmp_path / "y.txt").write_bytes(b"caf\xe9")
    inputs = [tmp_path / "x.jsonl", tmp_path / "y.txt"]
    with pytest.raises(DataError) as caught:
        prepare(inputs, tmp_path / "out")
    assert str(caught.value).count("not a line of JSON") == 20 and "x.jsonl:21: " in str(caught.value)
    done = prepare(inputs, tmp_path / "out", Settings(skip_bad=True))
    assert documents_of(tmp_path / "out", load_tokenizer("bytes")) == ["first", "last"]
    one, other = (s["left_out"] for s in done.headers[0].sources)
    assert (one["empty"], one["bad"], len(one["first_bad"])) == (1, 30, 20) and other["bad"] == 1
    assert "byte 3 is not UTF-8" in other["first_bad"][0]


def test_bad_documents_of_the_files_that_follow_are_told_too(tmp_path):
    for i in range(30):
        (tmp_path / f"{i:02d}.txt").write_bytes(b"caf\xe9" if 3 <= i < 8 or i == 25 else b"good")

    def refusal():
        with pytest.raises(DataError) as caught:
            prepare([tmp_path / "*.txt"], tmp_path / "out")
        return str(caught.value)

    told = refusal()
    assert [n for n in range(30) if f"/{n:02d}.txt: byte 3" in told] == [3, 4, 5, 6, 7, 25]
    assert "not looked at" not in told and "and more" not in told
    os.truncate(tmp_path / "24.txt", 257 << 20)
    told = refusal()
    assert "07.txt" in told and "25.txt" not in told and "The last 6 inputs were not looked at." in told
    for i in range(3, 24):
        (tmp_path / f"{i:02d}.txt").write_bytes(b"caf\xe9")
    told = refusal()
    assert told.count("byte 3") == 20 and "22.txt" in told and "  ... and more\n" in told
    for i in range(3, 30):
        (tmp_path / f"{i:02d}.txt").write_bytes(b"good")
    assert prepare([tmp_path / "*.txt"], tmp_path / "out").headers[0].documents == 30


def test_inputs_without_a_document_are_named(tmp_path):
    for content, says in (("", ": they are empty"), ('{"text": " "}\n' * 3, " but 3 that are empty or cannot be read")):
        (tmp_path / "x.jsonl").write_text(content)
        with pytest.raises(DataError, match=rf"hold no document{says} \({tmp_path}/x\.jsonl\)"):
            prepare([tmp_path / "x.jsonl"], tmp_path / "out", restart=True)


def test_foreign_files_stay_and_are_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("x")
    with pytest.raises(DataError, match=r"holds other files \(thesis\.tex\)"):
        prepare([SOTU], tmp_path / "out", restart=True)
    assert os.listdir(tmp_path / "out") == ["thesis.tex"]
    (tmp_path / "mine/partial").mkdir(parents=True)
    (tmp_path / "mine/partial/precious").write_text("x")
    with pytest.raises(DataError, match="partial/precious"):
        prepare([SOTU], tmp_path / "mine", restart=True)
    assert (tmp_path / "mine/partial/precious").exists()
    with pytest.raises(DataError, match="is a file"):
        prepare([SOTU], tmp_path / "out/thesis.tex")


def test_a_second_writer_is_refused_and_named(tmp_path):
    (tmp_path / "out/partial").mkdir(parents=True)
    with open(tmp_path / "out/partial/lock", "w") as lock:
        lock.write('{"pid": 123}')
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"being prepared by another process \(.*123"):
            prepare([SOTU], tmp_path / "out")
    assert prepare([SOTU], tmp_path / "out").is_new


def test_a_damaged_partial_store_is_refused_until_restart(corpus, tmp_path):
    with pytest.raises(Stopped):
        prepare(corpus, tmp_path / "out", watch=stop_after(3))
    os.truncate(tmp_path / "out/partial/store/tokens.bin", 10)
    with pytest.raises(DataError, match=r"tokens\.bin has 10 bytes.*--restart"):
        prepare(corpus, tmp_path / "out")
    (tmp_path / "out/partial/progress.json").write_text("{")
    with pytest.raises(DataError, match=r"progress\.json is damaged.*--restart"):
        prepare(corpus, tmp_path / "out")
    prepare(corpus, tmp_path / "out", restart=True)
    prepare(corpus, tmp_path / "whole")
    assert_same(tmp_path / "whole", tmp_path / "out")


# -------------------------------------------------------------------------------------------------- the command line


def jaxckpt(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_the_command_prepares_tells_what_to_do_next_and_verify_finds_damage(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "one"}\n{"body": 1}\n{"body": "two"}\n{"body": ""}\n')
    command = ["prepare", "--out", tmp_path / "out", "--field", "body", "--holdout", "0.5", tmp_path / "x.jsonl"]
    code, told = jaxckpt(*command)
    assert code == 2 and "x.jsonl:2: " in told and "Traceback" not in told
    code, told = jaxckpt(*command, "--skip-bad")
    assert code == 0 and "1 empty documents, 1 that could not be read" in told and "x.jsonl:2: expected" in told
    assert f"data.name=stores data.stores.main={tmp_path}/out/train data.held_out={tmp_path}/out/held_out" in told
    code, told = jaxckpt(*command, "--skip-bad")
    assert code == 0 and "nothing to do" in told
    assert jaxckpt("verify", tmp_path / "out")[0] == 0
    os.truncate(tmp_path / "out/train/offsets.bin", 8)
    code, told = jaxckpt("verify", tmp_path / "out")
    assert code == 1 and "held_out: good" in told and "offsets.bin: has 8 bytes, and 16 were written" in told
    code, told = jaxckpt("prepare", "--out", tmp_path / "x", "--max-document", "many", tmp_path / "x.jsonl")
    assert code == 2 and "'many': expected a size" in told


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dtype", "float99", 'dtype is "float99", expected one of uint16, uint32'),
        ("dtype", ["uint16"], 'dtype is ["uint16"], expected one of'),
        ("tokens", 2.0, "tokens is 2.0, expected a whole number from 0"),
        ("documents", -1, "documents is -1, expected a whole number"),
        ("vocab_size", "a", 'vocab_size is "a", expected a whole number'),
        ("vocab_size", 70_000, "vocab_size is 70000, expected what fits in uint16"),
        ("eos", True, "eos is true, expected a whole number"),
        ("eos", 257, "eos is 257, expected less than vocab_size, which is 257"),
        ("has_loss_mask", 0, "has_loss_mask is 0, expected true or false"),
        ("has_loss_mask", True, "blocks has hashes of offsets.bin, tokens.bin, expected of loss_mask.bin, offsets.bin"),
        ("tokenizer_hash", None, "tokenizer_hash is null, expected a string"),
        ("content_hash", 5, "content_hash is 5, expected a string"),
        ("content_hash", "5", 'content_hash is "5", which is not that of blocks'),
        ("blocks", {"tokens.bin": "ab"}, "blocks is {"),
        ("blocks", [], "blocks is [], expected lists of hashes by file"),
        ("sources", [1], "sources is [1], expected a list of objects"),
        ("options", None, "options is null, expected an object"),
    ],
)
def test_a_damaged_header_is_refused_with_the_field(field, value, says, tmp_path):
    prepare([write_lines(tmp_path / "x.jsonl", ["one"])], tmp_path / "out")
    file = tmp_path / "out/store.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(DataError) as caught:
        TokenStore(tmp_path / "out")
    assert str(caught.value).startswith(f"{file} is damaged: ") and says in str(caught.value)
    assert str(caught.value).endswith("Copy the store again, or prepare it again.")


def test_offsets_that_do_not_lead_through_the_tokens_are_refused(tmp_path):
    prepare([write_lines(tmp_path / "x.jsonl", ["one", "two", "three"])], tmp_path / "out")
    for offsets, says in (
        ([1, 4, 8, 14], "goes from 1 to 14, expected from 0 to 14"),
        ([0, 4, 8, 13], "goes from 0 to 13, expected"),
        ([0, 8, 4, 14], "has document 1 end at 4, before its start 8"),
    ):
        np.array(offsets, "<i8").tofile(tmp_path / "out/offsets.bin")
        with pytest.raises(DataError, match=rf"offsets\.bin {says}.*jaxckpt verify"):
            TokenStore(tmp_path / "out")
    np.array([0, 4, 4, 14], "<i8").tofile(tmp_path / "out/offsets.bin")
    assert len(TokenStore(tmp_path / "out").offsets) == 4
    many = (1 << 20) + 2  # they are read in parts, and this is at the border of two
    header = json.loads((tmp_path / "out/store.json").read_text())
    (tmp_path / "out/store.json").write_text(json.dumps({**header, "documents": many}))
    for document in (many - 3, many - 2, many - 1):
        offsets = np.zeros(many + 1, "<i8")
        offsets[document], offsets[-1] = 15, 14
        offsets.tofile(tmp_path / "out/offsets.bin")
        with pytest.raises(
            DataError, match=rf"document {document} end at {offsets[document + 1]}, before its start 15"
        ):
            TokenStore(tmp_path / "out")


def test_a_directory_of_two_stores_names_them(corpus, tmp_path):
    prepare(corpus[:1], tmp_path / "out", Settings(holdout=0.2))
    with pytest.raises(DataError, match=r"out is no token store, but holds the stores train and held_out: .*out/train"):
        TokenStore(tmp_path / "out")


@contextlib.contextmanager
def files_of_at_most(size):
    """A write beyond that fails, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_every_file_of_a_store_is_closed_though_the_disk_takes_no_more(tmp_path):
    writer = StoreWriter(tmp_path, np.dtype("uint16"))
    writer.append(np.zeros(9, np.uint16), np.array([9]), None)
    open_files = lambda: [n for n in os.listdir("/proc/self/fd") if is_ours(f"/proc/self/fd/{n}")]
    is_ours = lambda link: os.path.islink(link) and os.readlink(link).startswith(str(tmp_path))
    assert len(open_files()) == 2
    with files_of_at_most(4), pytest.raises(OSError, match="too large"):
        writer.close()
    assert not open_files()


def test_what_the_disk_refuses_is_told_and_the_same_command_goes_on(tmp_path):
    lines = write_lines(tmp_path / "x.jsonl", words(1, 100))
    command = ["prepare", "--out", tmp_path / "out", lines]
    with files_of_at_most(4000):
        code, told = jaxckpt(*command)
    assert code == 2 and f"--out {tmp_path}/out: cannot be written: File too large" in told, told
    assert (tmp_path / "out/partial/progress.json").exists() and not (tmp_path / "out/store.json").exists()
    code, told = jaxckpt(*command)
    assert code == 0, told
    prepare([lines], tmp_path / "whole")
    assert_same(tmp_path / "whole", tmp_path / "out")
    for out, why in ((lines / "out", "Not a directory"), ("/proc/none/out", "No such file or directory")):
        code, told = jaxckpt("prepare", "--out", out, lines)
        assert code == 2 and f"{why} (" in told and "another --out" in told, told
    full = not_written("out", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert full == "--out out: No space left on device. Free space and give the same command again, which goes on."


def test_verify_names_the_damaged_bytes_and_a_foreign_tokenizer(tmp_path, trained):
    file = BlockFile(tmp_path / "x")
    for size in (1, BLOCK_BYTES - 2, 3, 2 * BLOCK_BYTES):  # across the borders of blocks
        file.write(np.ones(size, np.uint8))
    file.close()
    assert len(file.blocks) == 4 and file.size == 3 * BLOCK_BYTES + 2
    again = BlockFile(tmp_path / "x", size=BLOCK_BYTES + 9, blocks=file.blocks)
    again.write(np.ones(2 * BLOCK_BYTES - 7, np.uint8))
    again.close()
    assert again.blocks == file.blocks
    (tmp_path / "big.txt").write_bytes(b"x" * (BLOCK_BYTES // 2 + 5))
    out = tmp_path / "out"
    prepare([tmp_path / "big.txt"], out)
    with open(out / "tokens.bin", "r+b") as tokens:
        tokens.seek(BLOCK_BYTES + 3)
        tokens.write(b"!")
    code, told = jaxckpt("verify", out)
    assert code == 1 and f"tokens.bin: bytes {BLOCK_BYTES} to {BLOCK_BYTES + 12} are not what was written" in told
    assert told.count("not what was written") == 1
    prepare([write_lines(tmp_path / "x.jsonl", ["one"])], tmp_path / "other", Settings(str(trained)))
    (tmp_path / "other/tokenizer.json").write_text(trained.read_text() + " ")
    code, told = jaxckpt("verify", tmp_path / "other", "--json")
    assert code == 1 and json.loads(told)[0]["problems"][0].startswith("tokenizer.json: is not the tokenizer")


def test_progress_is_plain_lines_off_a_terminal(capsys):
    with PrepareProgress(Console(width=200), plain_interval_s=0) as progress:
        progress.phase("prepare", 4 << 20)
        progress.show(1 << 20, 1000)
        time.sleep(0.01)
        progress.show(2 << 20, 1000)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("prepare: 1 of 4 MiB") and last.startswith("prepare: 2 of 4 MiB")
    assert "tokens/s" in last and last.endswith("s left")


MEMORY = """
import resource, sys
from pathlib import Path
from jaxckpt.data.prepare import Watch, prepare
import tokenizers
status = lambda key: int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key)).split()[1])
limit = (status("VmData:") << 10) + (int(sys.argv[3]) << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
prepare([sys.argv[1]], sys.argv[2], watch=Watch(batch_characters=1 << 18))
"""


def test_memory_stays_far_below_the_size_of_the_store(tmp_path):
    limit_mib = 64
    lines = write_lines(tmp_path / "x.jsonl", ["".join(words(1, 400)) * 4] * 500)
    command = [sys.executable, "-c", MEMORY, str(lines)]
    subprocess.run([*command, str(tmp_path / "out"), str(limit_mib)], check=True, timeout=100)
    assert (tmp_path / "out/tokens.bin").stat().st_size > 4 * (limit_mib << 20)
    too_little = subprocess.run([*command, str(tmp_path / "none"), "1"], capture_output=True, timeout=100)
    assert too_little.returncode, "the limit limits nothing"
