"""Text to numbered examples: what is read, how it is split, cut and shuffled."""

import json
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt.data.shuffle import ShuffledEpochs, shuffle_keys, shuffled
from jaxckpt.data.tokens import (
    load_text,
    load_tokenizer,
    make_token_datasets,
    split_by_name,
)
from jaxckpt.errors import DataError

SOTU = Path(__file__).parent.parent / "configs/data/sotu"
BYTES = load_tokenizer("bytes")


def epoch_order(n, seed, epoch):
    data = ShuffledEpochs(range(n), seed=seed)
    return [data[epoch * n + i] for i in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 17, 65537])  # Grain's shuffle loses an example at 65537
def test_every_epoch_is_a_permutation(n):
    for epoch in range(2 if n > 1000 else 20):
        assert np.array_equal(np.bincount(epoch_order(n, seed=3, epoch=epoch)), np.ones(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 300), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 2**40))
def test_every_epoch_is_a_permutation_for_any_size_seed_and_epoch(n, seed, epoch):
    assert sorted(shuffled(i, n, shuffle_keys(seed, epoch)) for i in range(n)) == list(range(n))


def test_epochs_and_seeds_differ_and_neighbouring_seeds_share_no_epoch():
    orders = [tuple(epoch_order(100, seed, epoch)) for seed in range(6) for epoch in range(6)]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("n", [2, 5, 7, 17])
def test_an_example_is_equally_likely_at_every_position(n):
    epochs, freedom = 3000, (n - 1) ** 2
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), epoch_order(n, 0, epoch)] += 1
    chi_squared = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    # Five standard deviations; a network over 3 bits, with the same six rounds, missed it by twice as many at n = 5.
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_the_shuffle_is_the_same_in_every_version():
    assert epoch_order(10, seed=0, epoch=0) == [9, 6, 1, 2, 0, 3, 8, 5, 7, 4]


def test_a_shuffle_also_takes_a_map_dataset():
    data = ShuffledEpochs(grain.MapDataset.range(10).map(lambda x: 10 * x), seed=0)
    assert [data[i] for i in range(10)] == [10 * x for x in epoch_order(10, 0, 0)]


@given(text=st.text())
def test_bytes_decode_what_they_encode(text):
    tokens = BYTES.encode(text)
    assert tokens.dtype == np.uint16 and BYTES.decode([*tokens, BYTES.eos]) == text
    assert BYTES.vocab_size == 257 and tokens.max(initial=0) < BYTES.eos == 256


def write_bpe(path, special_tokens):
    import tokenizers

    model = tokenizers.ByteLevelBPETokenizer()
    text = ["four score and seven years ago our fathers brought forth"] * 3
    model.train_from_iterator(text, vocab_size=300, special_tokens=special_tokens, show_progress=False)
    model.save(str(path))
    return path


def test_a_tokenizer_json_encodes_decodes_and_names_its_end_of_document(tmp_path):
    path = write_bpe(tmp_path / "tokenizer.json", ["<pad>", "</s>"])
    tokenizer, from_directory = load_tokenizer(path), load_tokenizer(tmp_path)
    text = "seven fathers, ünïcode"
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16 and tokens.max() < tokenizer.vocab_size <= 300
    assert tokenizer.decode(tokens) == text and len(tokens) < len(text.encode())
    assert tokenizer.eos == 1 and from_directory.fingerprint == tokenizer.fingerprint
    other = load_tokenizer(path, eos="<pad>")
    assert other.eos == 0 and other.fingerprint != tokenizer.fingerprint
    assert load_tokenizer(path, eos=7).eos == 7


def test_a_tokenizer_without_a_usual_end_of_document_says_what_to_do(tmp_path):
    path = write_bpe(tmp_path / "tokenizer.json", ["<fin>"])
    with pytest.raises(DataError, match=r"none of the usual end-of-document.*eos.*<fin>"):
        load_tokenizer(path)
    assert load_tokenizer(path, eos="<fin>").eos == 0
    with pytest.raises(DataError, match=r"no token '</s>'"):
        load_tokenizer(path, eos="</s>")
    with pytest.raises(DataError, match=r"no token 10000; it has \d+ tokens"):
        load_tokenizer(path, eos=10000)


def test_a_bad_tokenizer_path_or_file_is_refused(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"No such file.*bytes"):
        load_tokenizer(tmp_path / "none.json")
    with pytest.raises(DataError, match=r"not a Hugging Face tokenizer\.json"):
        load_tokenizer(tmp_path / "bad.json")
    with pytest.raises(DataError, match="cannot use eos=3"):
        load_tokenizer("bytes", eos=3)


def test_text_comes_from_files_directories_patterns_and_jsonl(tmp_path):
    for name in ["b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt", "skipped.md"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(f"text of {name}\r\n".encode())
    lines = [json.dumps({"text": "one\u2028line", "id": 1}, ensure_ascii=False), "", json.dumps({"text": "two"})]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    documents = load_text([tmp_path, tmp_path / "x.jsonl", f"{tmp_path}/sub/**/*.txt"])
    assert documents == [
        ("a.txt", "text of a.txt\r\n"),
        ("b.txt", "text of b.txt\r\n"),
        ("x.jsonl:1", "one\u2028line"),
        ("x.jsonl:3", "two"),
        ("c.txt", "text of sub/c.txt\r\n"),
        ("deep/d.txt", "text of sub/deep/d.txt\r\n"),
    ]
    assert load_text(str(tmp_path / "a.txt")) == [("a.txt", "text of a.txt\r\n")]


def test_names_do_not_depend_on_where_the_data_lies(tmp_path, monkeypatch):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    spellings = ["d", str(tmp_path / "d"), "d/*.txt", f"{tmp_path}/d/*.txt", "d/a.txt", "./d/../d/a.txt"]
    assert {load_text(s)[0][0] for s in spellings} == {"a.txt"}


def test_all_problems_of_the_text_are_told_at_once(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "x.jsonl").write_text(
        '{"text": "fine"}\n{"body": "x"}\nno json\n{"text": ""}\n{"text": "\\ud800"}\n[1]\n'
    )
    entries = ["missing.txt", "*.nope", "nothing", "empty.txt", "latin.txt", "x.jsonl", "good.txt", "good.*"]
    with pytest.raises(DataError) as caught:
        load_text([tmp_path / e for e in entries])
    told = str(caught.value)
    for expected in [
        "missing.txt: no such file",
        "*.nope: the pattern matches no file",
        "nothing: the directory holds no *.txt",
        "empty.txt: holds no text",
        "latin.txt: byte 3 is not UTF-8",
        "x.jsonl:2: expected an object with a string field 'text'",
        "x.jsonl:3: not a line of JSON",
        "x.jsonl:4: field 'text' is empty",
        "x.jsonl:5: not a line of JSON text ('utf-8' codec can't encode",
        "x.jsonl:6: expected an object",
        "good.txt: listed twice",
    ]:
        assert expected in told
    assert len(told.splitlines()) == 12
    with pytest.raises(DataError, match="no files are listed"):
        load_text([])


def test_many_problems_are_counted(tmp_path):
    with pytest.raises(DataError, match=r"\.\.\. and 5 more"):
        load_text([tmp_path / str(i) for i in range(25)])


names = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=40, unique=True)


@settings(deadline=None)
@given(names=names, seed=st.integers(0, 1000), holdout=st.floats(0.01, 0.99))
def test_the_split_has_both_sides_and_another_document_moves_no_other(names, seed, holdout):
    held = split_by_name(names, holdout=holdout, seed=seed)
    assert any(held) and not all(held)
    more = split_by_name([*names[::-1], "one more"], holdout=holdout, seed=seed)
    if 1 < sum(held) < len(held) - 1:  # otherwise a side may have been filled by the exception
        assert dict(zip(names[::-1], more[:-1], strict=True)) == dict(zip(names, held, strict=True))


def test_the_split_follows_the_fraction_and_the_seed():
    many = [f"document {i}" for i in range(4000)]
    held = split_by_name(many, holdout=0.1, seed=0)
    assert 300 < sum(held) < 500  # 400 expected, five standard deviations
    assert held != split_by_name(many, holdout=0.1, seed=1)
    assert not any(split_by_name(["alone"], holdout=0, seed=0))
    with pytest.raises(DataError, match=r"needs two documents.*found 1"):
        split_by_name(["alone"], holdout=0.1, seed=0)


documents = st.lists(st.tuples(st.text(max_size=5), st.text(min_size=8, max_size=60)), min_size=2, max_size=12)


@settings(deadline=None)
@given(documents=documents, seq_len=st.integers(1, 7), seed=st.integers(0, 99))
def test_examples_are_the_concatenated_split_cut_with_one_token_shared(documents, seq_len, seed):
    data = make_token_datasets(documents, BYTES, seq_len=seq_len, holdout=0.3, seed=seed)
    held = split_by_name([name for name, _ in documents], holdout=0.3, seed=seed)
    assert data.held_out_documents == tuple(name for (name, _), out in zip(documents, held, strict=True) if out)
    for side, split, count in [(True, data.held_out, data.held_out_tokens), (False, data.train, data.train_tokens)]:
        stream = [
            t for (_, text), out in zip(documents, held, strict=True) if out == side for t in (*text.encode(), 256)
        ]
        chunks = [stream[i : i + seq_len + 1] for i in range(0, len(stream) - seq_len, seq_len)]
        found = tokens_of(split, range(len(chunks)))
        assert count == len(stream) and all(f.dtype == np.int32 for f in found)
        if side:
            assert len(split) == len(chunks) and [f.tolist() for f in found] == chunks
        else:
            assert data.train_examples == len(chunks) and sorted(f.tolist() for f in found) == sorted(chunks)


def tokens_of(split: Any, numbers):
    return [split[i]["tokens"] for i in numbers]


def test_train_never_ends_and_holdout_zero_keeps_all_for_it():
    data = make_token_datasets([("a", "x" * 40)], BYTES, seq_len=8, holdout=0, seed=0)
    assert len(data.held_out) == 0 and data.held_out_documents == () and data.train_examples == 5
    assert len(data.train) > 10**18 and tokens_of(data.train, [10**15])[0].shape == (9,)


def test_the_identity_changes_with_everything_that_moves_an_example():
    base = [("a", "some text of a"), ("b", "other text of b"), ("c", "and c has text too")]

    def identity(documents=base, tokenizer=BYTES, **changes):
        arguments = {"seq_len": 4, "holdout": 0.4, "seed": 0} | changes
        return json.dumps(make_token_datasets(documents, tokenizer, **arguments).identity)

    others = [
        identity([*base[:2], ("c", "and c has text toO")]),
        identity(base[::-1]),
        identity(seq_len=5),
        identity(seed=1),
        identity(holdout=0.41),
    ]
    assert identity() == identity() and len({identity(), *others}) == len(others) + 1


def test_a_split_too_small_for_one_example_names_the_sizes():
    with pytest.raises(DataError, match=r"train split has 4 tokens.*held-out split has 4 tokens.*seq_len \+ 1 = 9"):
        make_token_datasets([("a", "xxx"), ("b", "yyy")], BYTES, seq_len=8, holdout=0.5, seed=0)
    with pytest.raises(DataError, match=r"found seq_len=0, holdout=1.5, 0 documents"):
        make_token_datasets([], BYTES, seq_len=0, holdout=1.5, seed=0)
    with pytest.raises(DataError, match="at least one example; this one has 0"):
        ShuffledEpochs([], seed=0)


def test_the_shipped_speeches_load_and_split():
    speeches = load_text([SOTU])
    data = make_token_datasets(speeches, BYTES, seq_len=1024, holdout=0.1, seed=0)
    assert len(speeches) == 74 and 2_500_000 < data.train_tokens + data.held_out_tokens < 3_000_000
    assert len(data.held_out) > 10 and data.train_examples > 2000
    assert (SOTU / "LICENSE.md").is_file()
