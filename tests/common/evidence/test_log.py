import json

import pytest

from common.evidence.log import MAX_BYTES, load, parse_log
from common.evidence.records import finite, printable


def record(**fields):
    base = {"time_ms": 1_700_000_000_000, "key": "seed", "value": 7, "metadata": {}}
    return (":::MLLOG " + json.dumps(base | fields)).encode()


FLAT, DEEP = record(value={"a": 1}, metadata={"b": 1}), record(other={"c": {"d": 1}})


def kinds(data):
    return [problem.kind for problem in parse_log(data, "here").problems]


def test_a_good_log_gives_minutes_curve_target_and_status(golden):
    log = parse_log("\n".join(golden.log()).encode(), "here")
    assert log.minutes == pytest.approx((5 * 42 + 0.03) / 60)
    assert [point.samples for point in log.curve] == [2048 * 2500 * n for n in range(1, 6)]
    assert log.is_converged and log.is_ours and not log.is_proxy
    assert (log.benchmark, log.target, log.configuration) == ("resnet", 0.759, "optimized")
    assert log.header("commit") == "0123abc"
    plan = ("global_batch_size: 2048", "max_duration: 12500ba", "evaluate_every: 2500ba")
    data = "data: {num_train_samples: 1281167}"
    assert log.settings == ("name: optimized", *plan, data, "optimizer:", "  lr: 2.048")


def test_line_numbers_are_those_of_the_file():
    assert parse_log(b"# a\r\n\r\nnoise\r" + record(), "here").records[0].line == 4


@pytest.mark.parametrize("prefix", [b"\xef\xbb\xbf", b"[rank0]: ", b"# "])
def test_a_byte_order_mark_or_a_prefix_hides_no_record(prefix):
    assert len(parse_log(prefix + record(), "here").records) == 1


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "file"),
        (b"only text\n", "file"),
        (b"\xff\xfe" + record(), "file"),
        (record().decode().encode("utf-16"), "file"),
        (b"\x00\x01\x02", "file"),
        (b":::MLLOG " + b"x" * MAX_BYTES, "file"),
        (record()[:-5], "record"),
        (b":::MLLOG 5", "record"),
        (b":::MLLOG {}", "record"),
        (b":::MLLOG " + b"[" * 100_000, "record"),
        (record(metadata=None), "record"),
        (record(key=5), "record"),
        (b":::MLLOG " + b"9" * 5000, "record"),
        *(
            (record(time_ms=time), "time")
            for time in (None, "1", 1.5, float("nan"), -1, True, 10**30, 10**4000)
        ),
        *(
            (good.replace(key, key + space + b": 1, " + key), "duplicate")
            for good, key in ((FLAT, b'"value"'), (FLAT, b'"a"'), (FLAT, b'"b"'), (DEEP, b'"d"'))
            for space in (b"", b" ", b"  ", b"\t")
        ),
        (record() + record(), "token"),
        (record() + b"\n:::mllog {}", "token"),
    ],
)
def test_what_cannot_be_read_is_one_problem(data, kind):
    assert kinds(data) == [kind]


def test_a_flood_of_bad_lines_is_cut_short():
    assert len(kinds(b":::MLLOG 5\n" * 5000)) == 101


def test_shown_text_has_no_control_characters_and_is_short():
    assert printable("a\x1b[31m\r\n\u202eb") == "a?[31m???b"
    assert len(printable("x" * 10_000)) < 250


def test_only_real_numbers_are_finite():
    assert (finite(1), finite(0.5)) == (1.0, 0.5)
    assert not any(map(finite, (True, "1", None, float("nan"), float("-inf"), 10**400, [1])))


def test_a_duplicated_run_start_leaves_no_minutes(golden):
    lines = golden.log()
    start = next(line for line in lines if '"key": "run_start"' in line)
    assert parse_log("\n".join([*lines[:-1], start, lines[-1]]).encode(), "here").minutes is None


def test_a_full_log_cannot_lower_its_target(golden):
    text = "\n".join(golden.log()).replace(
        '"quality_target", "value": 0.759', '"quality_target", "value": 0.3'
    )
    assert parse_log(text.encode(), "here").target == 0.759


def test_links_are_refused_and_a_bad_file_does_not_hide_the_others(golden, tmp_path):
    folder = golden.write(tmp_path, golden.set())
    (folder / "result_5.txt").symlink_to("/etc/passwd")
    (folder / "notes").symlink_to(tmp_path.parent)  # no result by its name
    (folder / "result_10.txt").write_bytes(b"\xff\xfe\x00")
    (found,) = load([tmp_path, folder])
    assert [log.path.rpartition("_")[2] for log in found.logs] == [f"{n}.txt" for n in (0, 1, 2, 3, 4, 5, 10)]
    assert [log.is_readable for log in found.logs] == [True] * 5 + [False] * 2
    assert "links are refused" in found.logs[5].problems[0].text
