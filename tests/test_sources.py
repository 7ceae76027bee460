"""Files of every kind to documents: what is found, from any place in a file, and what is said of bad ones."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from gcs import BUCKET
from jaxckpt.data.readers import check, read
from jaxckpt.data.sources import END, Bad, Document, Wanted, expand
from jaxckpt.errors import DataError
from jaxckpt.snapshot import gcs as objects
from jaxckpt.snapshot import paths

TEXTS = [f"text {i} é😀\u2028\n" * (i % 5 + 1) for i in range(300)]
LINES = "".join(json.dumps({"text": t, "id": i}, ensure_ascii=False) + "\n" for i, t in enumerate(TEXTS))


def write_arrow(path, table, rows=70):
    """As `Dataset.save_to_disk` does."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_records(path, records, options="group_size:16"):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


def write_saved_data_set(directory, tables):
    directory.mkdir()
    names = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        write_arrow(directory / name, table)
    state = {"_data_files": [{"filename": n} for n in names], "_fingerprint": "x", "_indices_files": None}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")


@pytest.fixture
def every_kind(tmp_path):
    """{kind: what to give as an input}, each with TEXTS."""
    (tmp_path / "a.jsonl").write_text(LINES, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    with pa.CompressedOutputStream(str(tmp_path / "c.json.lines.zst"), "zstd") as file:
        file.write(LINES.encode())
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=70)
    coded = pa.table({"text": pa.array(TEXTS).dictionary_encode()})
    pq.write_table(coded, tmp_path / "e.parquet")
    write_saved_data_set(tmp_path / "saved", [table.slice(0, 150), table.slice(150)])
    write_records(tmp_path / "f.array_record", [t.encode() for t in TEXTS])
    names = ["a.jsonl", "b.jsonl.gz", "c.json.lines.zst", "d.parquet", "e.parquet", "saved", "f.array_record"]
    return [tmp_path / name for name in names]


def inputs(*entries, **options):
    problems = []
    return expand(entries, problems, **options), problems


def only(path):
    (file,), problems = inputs(path)
    assert not problems
    return file


def bads(path, **wanted):
    return [item.found.text for item in read(only(path), Wanted(**wanted)) if isinstance(item.found, Bad)]


def test_every_kind_gives_the_texts_with_the_number_of_line_or_row(every_kind):
    for entry in every_kind:
        files, problems = inputs(entry)
        items = [item for file in files for item in read(file, Wanted())]
        assert not problems and [check(file, Wanted()) for file in files] == [[]] * len(files)
        assert [item.found.text for item in items] == TEXTS, entry
        names = [f"{file.name}:{n}" for file in files for n in range(1, 1 + len(TEXTS) // len(files))]
        assert [item.found.name for item in items] == names
        assert items[-1].place.byte <= files[-1].bytes and items[-1].place.row == len(TEXTS) // len(files)


def test_reading_goes_on_at_any_place(every_kind):
    for entry in every_kind:
        file = inputs(entry)[0][0]
        items = list(read(file, Wanted()))
        for place, rest in [(items[n - 1].place, items[n:]) for n in (1, 63, 64, 69, 70, 71, 149, len(items))]:
            assert list(read(file, Wanted(), place)) == rest, (entry, place)


def test_a_text_file_is_one_document_also_compressed(tmp_path):
    (tmp_path / "a.md").write_bytes("one\r\ntwo é".encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    for path, text in ((tmp_path / "a.md", "one\r\ntwo é"), (tmp_path / "b.txt.gz", "three")):
        (item,) = read(only(path), Wanted())
        assert item.found == Document(path.name, text) and list(read(only(path), Wanted(), item.place)) == []


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone \xef\xbb\xbf")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one \xef\xbb\xbf"}\n{"text": "two"}\n\xef\xbb\xbf{}')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    (item,) = read(only(tmp_path / "a.txt"), Wanted())
    assert item.found.text == "one \ufeff"
    for name in ("b.jsonl", "c.jsonl.gz"):
        one, two, bad = read(only(tmp_path / name), Wanted())
        assert (one.found.text, two.found.text) == ("one \ufeff", "two")
        assert f"{name}:3: not a line of JSON text" in bad.found.text
        assert [i.found for i in read(only(tmp_path / name), Wanted(), one.place)] == [two.found, bad.found]


def test_what_a_directory_holds_besides_is_told(tmp_path):
    for name in ("a.jsonl", "b.md", "c.csv", ".hidden", "_SUCCESS", "sub/c.txt", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    told = []
    assert len(inputs(tmp_path, say=told.append)[0]) == 1
    assert told == [
        f"{tmp_path}: leaves out 1 subdirectory and 2 files of other kinds; give a glob pattern to include them"
    ]
    write_saved_data_set(tmp_path / "sub/saved", [pa.table({"text": ["x"]})])
    inputs(tmp_path / "sub/saved", tmp_path / "*.*", tmp_path / ".git", say=told.append)
    assert len(told) == 1


def test_a_directory_gives_what_is_known_and_a_pattern_gives_all(tmp_path):
    for name in ("b.txt", "a.jsonl", ".hidden.txt", "_SUCCESS", "notes.md", "sub/c.txt", "sub/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [f.name for f in inputs(tmp_path)[0]] == ["a.jsonl", "b.txt"]
    assert [f.name for f in inputs(f"{tmp_path}/**/*.*")[0]] == [
        "a.jsonl",
        "b.txt",
        "notes.md",
        "sub/c.txt",
        "sub/d.md",
    ]
    files, problems = inputs(tmp_path / "b.txt", tmp_path)
    assert [f.name for f in files] == ["b.txt", "a.jsonl"] and "listed twice" in problems[0]


def test_inputs_that_cannot_be_meant_are_named(tmp_path):
    write_saved_data_set(tmp_path / "dict_train", [pa.table({"text": ["x"]})])
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "dict_train/data-00000-of-00001.arrow").unlink()
    entries = ["none.txt", "*.none", "empty", "dict", "dict_train"]
    _, problems = inputs(*(tmp_path / e for e in entries))
    for expected, problem in zip(
        [
            "none.txt: no such file",
            "the pattern matches no file",
            "holds no file of a known kind",
            f"{tmp_path}/dict/train, {tmp_path}/dict/test",
            "data-00000-of-00001.arrow: cannot be read (No such file",
        ],
        problems,
        strict=True,
    ):
        assert expected in problem


def test_a_bad_line_is_named_and_the_next_one_is_read(tmp_path):
    lines = [
        b'{"text": "fine"}',
        b'{"body": "x"}',
        b"no json",
        b'{"text": 3}',
        b'{"text": "\\ud800"}',
        b"[1]",
        b'{"text": "caf\xe9"}',
        b"[" * 100_000,
        b"",
        b'{"text": "last"}',
    ]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    items = list(read(only(path), Wanted()))
    expected = [
        "found the fields body",
        "not a line of JSON text (Expecting value",
        "found int in it",
        "surrogates not allowed",
        "found list",
        "byte 13 of the line is not UTF-8",
        "nested too deep",
    ]
    found = [item.found.text for item in items if isinstance(item.found, Bad)]
    for number, (text, part) in enumerate(zip(found, expected, strict=True), 2):
        assert text.startswith(f"{path}:{number}: ") and part in text
    assert [i.found.name for i in items if isinstance(i.found, Document)] == ["x.jsonl:1", "x.jsonl:10"]


def test_bad_rows_of_tables_and_records_are_named(tmp_path):
    raw = pa.array([b"fine", b"caf\xe9", None, b"last"], pa.binary())
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 4, raw.buffers(), null_count=1)})
    pq.write_table(table, tmp_path / "x.parquet")
    write_arrow(tmp_path / "x.arrow", table)
    for name in ("x.parquet", "x.arrow"):
        one, other = bads(tmp_path / name)
        assert one == f"{tmp_path / name}: row 2: byte 3 of 'text' is not UTF-8 (unexpected end of data)"
        assert other == f"{tmp_path / name}: row 3: expected a string in column 'text', found null"
    records = [b'{"text": "fine"}', b"caf\xe9", b"{", b'{"body": 1}', b"[]"]
    write_records(tmp_path / "x.array_record", records)
    assert [b.split(": row ")[1].split(":")[0] for b in bads(tmp_path / "x.array_record", field="text")] == list("2345")
    assert len(bads(tmp_path / "x.array_record")) == 1


def test_a_document_that_is_too_long_is_not_read_whole(tmp_path):
    long = "x" * 5000
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": "a"}) + f'\n{{"text": "{long}"}}\n' + json.dumps({"text": "b"})
    )
    (tmp_path / "b.txt").write_text(long)
    (tmp_path / "c.txt").write_text("é" * 1000)
    pq.write_table(pa.table({"text": ["a", long]}), tmp_path / "d.parquet")
    limit = {"max_document": 1999}
    expected = {"a.jsonl": "a.jsonl:2", "b.txt": "b.txt", "c.txt": "c.txt", "d.parquet": "d.parquet: row 2"}
    for name, where in expected.items():
        assert bads(tmp_path / name, **limit) == [
            f"{tmp_path}/{where}: the document is longer than 1999 bytes; split it, or allow more with --max-document"
        ]
    texts = [i.found.text for i in read(only(tmp_path / "a.jsonl"), Wanted(**limit)) if isinstance(i.found, Document)]
    assert texts == ["a", "b"] and not bads(tmp_path / "c.txt", max_document=2000)


def test_what_is_cut_short_is_told_before_the_work_or_where_it_breaks(every_kind, tmp_path):
    early = {".parquet": "not a whole parquet file", ".arrow": "cut short", ".array_record": "not a whole ArrayRecord"}
    for path in sorted([*tmp_path.glob("*.*"), *tmp_path.glob("saved/*.arrow")]):
        whole = path.read_bytes()
        for kept in (len(whole) // 2, len(whole) - 4):
            path.write_bytes(whole[:kept])
            told = check(only(path), Wanted())
            if path.suffix in early:
                assert early[path.suffix] in told[0] and str(path) in told[0]
            elif path.suffix in (".gz", ".zst"):
                items = list(read(only(path), Wanted()))
                assert not told and "the file is cut short" in items[-1].found.text
                assert items[-1].place.row == END and list(read(only(path), Wanted(), items[-1].place)) == []
        path.write_bytes(b"")
        assert bool(check(only(path), Wanted())) == (path.suffix != ".jsonl")


def test_damage_inside_a_file_ends_it_with_its_place(tmp_path):
    write_records(tmp_path / "a.array_record", [t.encode() for t in TEXTS])
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "b.parquet", row_group_size=70, compression="zstd")
    for name in ("a.array_record", "b.parquet"):
        content = bytearray((tmp_path / name).read_bytes())
        content[700:720] = b"\xff" * 20
        (tmp_path / name).write_bytes(content)
        *good, last = read(only(tmp_path / name), Wanted())
        assert [g.found.text for g in good] == TEXTS[: len(good)]
        assert f"{tmp_path / name}: row {len(good) + 1}: " in last.found.text and last.place.row == END


def test_a_column_that_is_missing_or_no_text_is_told_before_the_work(tmp_path):
    pq.write_table(pa.table({"text": [1, 2], "body": ["a", "b"]}), tmp_path / "x.parquet")
    file = only(tmp_path / "x.parquet")
    assert "expected strings in column 'text', found int64" in check(file, Wanted())[0]
    assert "expected a column 'content', found text, body" in check(file, Wanted(field="content"))[0]
    assert check(file, Wanted(field="body")) == []


def test_a_renderer_makes_documents_of_whole_records(tmp_path):
    def render(record, name):
        if record["id"] == 1:
            raise DataError(f"{name}: no answer")
        return Document("any", f"Q{record['id']} A", targets=((3, 4),))

    rows = [{"id": i} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*rows, []])))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    write_records(tmp_path / "c.array_record", [json.dumps(r).encode() for r in rows])
    for name in ("a.jsonl", "b.parquet", "c.array_record"):
        assert check(only(tmp_path / name), Wanted(render=render)) == []
        found = [item.found for item in read(only(tmp_path / name), Wanted(render=render))]
        assert found[:3] == [
            Document(f"{name}:1", "Q0 A", ((3, 4),)),
            Bad(f"{only(tmp_path / name).at(2)}: no answer"),
            Document(f"{name}:3", "Q2 A", ((3, 4),)),
        ]
    assert bads(tmp_path / "a.jsonl", render=render)[1] == f"{tmp_path}/a.jsonl:4: expected an object, found list"


def test_a_file_of_text_is_no_file_of_records(tmp_path):
    render = lambda record, name: Document(name, "x")
    for name in ("a.txt", "b.json", "c.md.gz"):
        (tmp_path / name).write_text("x")
        (told,) = check(only(tmp_path / name), Wanted(render=render))
        assert told.startswith(f"{tmp_path / name}: is no file of records; --format chat and prompt_response read JSON")
    (tmp_path / "d.jsonl").write_text("{}")
    assert check(only(tmp_path / "d.jsonl"), Wanted(render=render)) == []


def test_a_file_that_cannot_be_opened_is_told(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "directory.txt").mkdir()
    files, problems = inputs(tmp_path)
    assert not files and problems == [f"{tmp_path}/gone.txt: cannot be read (No such file or directory)"]
    (tmp_path / "x.txt").write_text("x")
    file = only(tmp_path / "x.txt")
    (tmp_path / "x.txt").unlink()
    assert check(file, Wanted()) == [f"{tmp_path}/x.txt: cannot be read (No such file or directory)"]
    assert "cannot be read any further" in next(iter(read(file, Wanted()))).found.text


def test_objects_of_gs_are_read_as_files_are(gcs, request, every_kind):
    root = f"gs://{BUCKET}/{request.node.name}"
    paths.resolve(root)
    for path in [p for p in every_kind if p.is_file() and p.suffix != ".array_record"]:
        objects.write(f"{root}/{path.name}", path.read_bytes())
    for path in every_kind[-2].iterdir():
        objects.write(f"{root}/saved/{path.name}", path.read_bytes())
    files, problems = inputs(f"{root}/*.jsonl*", f"{root}/saved", f"{root}/d.parquet")
    assert not problems and [f.name for f in files][:2] == ["a.jsonl", "b.jsonl.gz"] and len(files) == 5
    assert all(f.bytes > 0 and f.modified.isdecimal() for f in files)
    assert [check(f, Wanted()) for f in files] == [[]] * 5
    assert [i.found.text for f in files for i in read(f, Wanted())] == [*TEXTS, *TEXTS, *TEXTS, *TEXTS]
    before = files[0].modified
    objects.write(f"{root}/a.jsonl", LINES.encode())
    assert inputs(f"{root}/a.jsonl")[0][0].modified != before
    objects.write(f"{root}/sub/a.txt", b"x")
    said = []
    inputs(root, say=said.append)
    assert said == [f"{root}: leaves out 2 subdirectories; give a glob pattern to include them"]
    told = inputs(f"{root}/none.txt", f"{root}/*.none")[1]
    assert "no such object" in told[0] and "matches no object" in told[1]
