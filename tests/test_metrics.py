"""metrics.jsonl: each step once, whatever was killed or rolled back."""

import json
import resource

import numpy as np
import pytest

from jaxckpt.errors import DataError, SaveError
from jaxckpt.observe.metrics import MetricsFile, float_bits, read_metrics


def write(path, steps, resume_step=0):
    file = MetricsFile(path, resume_step=resume_step)
    for step in steps:
        file.write({"step": step, "loss": step / 3})
    file.close()


def steps_in(path):
    return [line["step"] for line in read_metrics(path)]


def test_each_step_stands_once_after_a_rollback(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    write(path, [1, 2, 3, 4, 5])
    write(path, [4, 5, 6], resume_step=3)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    write(path, [1], resume_step=0)
    assert steps_in(path) == [1]


def test_a_resume_at_the_end_keeps_every_line_byte_for_byte(tmp_path):
    path = tmp_path / "m"
    write(path, [1, 2, 3])
    before = path.read_bytes()
    write(path, [], resume_step=3)
    assert path.read_bytes() == before


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"\x00\x00\x00", b'{"step": 3}'], ids=str)
def test_a_last_line_that_a_kill_has_cut_is_neither_read_nor_kept(tmp_path, torn):
    path = tmp_path / "m"
    write(path, [1, 2])
    path.write_bytes(path.read_bytes() + torn)
    assert steps_in(path) == [1, 2]
    write(path, [3], resume_step=9)
    assert steps_in(path) == [1, 2, 3]


def test_a_line_is_with_the_operating_system_before_write_returns(tmp_path):
    file = MetricsFile(tmp_path / "m", resume_step=0)
    file.write({"step": 1, "loss": 0.1})
    assert read_metrics(tmp_path / "m") == [{"step": 1, "loss": 0.1}]
    file.close()


def test_lines_that_find_no_room_wait_and_no_snapshot_counts_without_them(tmp_path, caplog):
    path = tmp_path / "m"
    file = MetricsFile(path, resume_step=0)
    file.write({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))  # as a full disk: a short write, then an error
    try:
        for step in (2, 3):
            file.write({"step": step})
        with pytest.raises(SaveError, match="could not be written"):
            file.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert steps_in(path) == [1] and len(caplog.records) == 1, "told once"
    file.sync()
    assert steps_in(path) == [1, 2, 3]
    file.close()


def test_every_line_is_json_of_its_own(tmp_path):
    write(tmp_path / "m", [1, 2])
    assert [json.loads(line)["step"] for line in (tmp_path / "m").read_text().splitlines()] == [1, 2]


def test_float_bits_tell_apart_what_a_decimal_does_not():
    assert float_bits(1.0) == "3f800000" == float_bits(np.float32(1))
    assert (float_bits(0.0), float_bits(-0.0)) == ("00000000", "80000000")
    assert (float_bits(float("inf")), float_bits(float("-inf"))) == ("7f800000", "ff800000")
    assert float_bits(np.nextafter(np.float32(1), np.float32(2))) == "3f800001"
    assert float_bits(np.array(0x7FC00001, np.uint32).view(np.float32)) == "7fc00001", "the payload of a NaN too"


def test_a_line_that_is_no_json_is_refused_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2.*move the file away"):
        MetricsFile(path, resume_step=3)
    assert path.read_text().count("\n") == 3
