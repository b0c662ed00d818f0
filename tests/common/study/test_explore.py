"""The explorer's page: the figures of `ttt score`, nothing of a log as markup, quick in a real browser."""

import json
import random
import re
from urllib.parse import unquote

import pytest

from common.evidence.audit import audit_paths
from common.evidence.log import load
from common.evidence.records import printable
from common.evidence.rules.rule import edit_all
from common.evidence.score import score
from common.study.explore import COLUMNS, page_data, render
from common.study.points import read_benches
from common.study.prices import load_prices
from tests.command import one_line
from tests.command import ttt_here as ttt
from tests.committed import committed_results
from tests.common.evidence.test_fuzz import mutated

RESULTS = committed_results()
PLACE = RESULTS.parent
HOSTILE = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\"><!--"


def data_of(*paths, folder=PLACE):
    prices, complaints = load_prices(), []
    data = page_data(audit_paths(paths), read_benches(paths, complaints.append), prices, folder)
    assert complaints == []
    return data


@pytest.fixture(scope="module")
def committed():
    return data_of(RESULTS)


def block(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


def rows(data):
    return [
        dict(zip(data["runs"], values, strict=True)) for values in zip(*data["runs"].values(), strict=True)
    ]


def study_run(root, *, cell="half", settings=(), values=None, source=None, study="curves", number=0):
    """Write a committed log into a study, with other settings and values of records; return its file."""
    lines = (source or sorted(RESULTS.glob("*-baseline/resnet/result_0.txt"))[0]).read_text().splitlines()
    for name, value in settings:
        lines = [re.sub(rf"^#   {name}: .*", f"#   {name}: {value}", line) for line in lines]
    for key, value in (values or {}).items():
        lines = edit_all(key, lambda _, value=value: {"value": value})(lines)
    path = root / "study" / study / f"reference-2cpu-mini-{cell}" / "resnet" / f"result_{number}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_page_embeds_the_figures_of_the_committed_results(committed):
    data = block(render(committed))
    found = {row["href"]: row for row in rows(data)}
    num_runs = 0
    for run_set in load([RESULTS]):
        scored = {run.name: run for run in score(run_set).runs}
        for log in run_set.logs:
            row, run = found[str(log.file.relative_to(PLACE))], scored[printable(log.path)]
            assert row["minutes"] == pytest.approx(run.minutes, abs=1e-5)
            assert row["quality"] == pytest.approx(run.quality, abs=1e-6)
            assert row["samples_per_s"] == pytest.approx(run.samples_per_s, rel=1e-4)
            assert row["evaluation"] == pytest.approx(run.evaluation, abs=1e-5)
            assert row["curve"][-1] == pytest.approx(run.quality, abs=1e-5)
            cell = data["cells"][row["cell"]]
            assert [cell["configuration"], cell["hardware"]] == log.folders[0].split("-mini-")[::-1]
            assert (cell["budget"], cell["proxy"], cell["study"]) == (1.0, True, "")
            assert {data["methods"][number] for number in cell["methods"]} == {
                event.value for event in log.events("method")
            }
            num_runs += 1
    assert num_runs == len(found) >= 30


def test_a_run_has_the_verdict_of_the_audit_and_a_link_to_its_log(tmp_path):
    odd, folder = tmp_path / "a #b?c [1]", tmp_path / "pages"
    file = study_run(odd, values={"eval_samples": 1})
    (row,) = rows(data_of(odd / "study", folder=folder))
    (audited,) = audit_paths([odd / "study"])
    of_run = [finding for finding in audited.findings if finding.path.endswith("result_0.txt")]
    errors = sum(finding.severity == "error" for finding in of_run)
    assert errors > 0 and (row["errors"], row["warnings"]) == (errors, len(of_run) - errors)
    assert (folder / unquote(row["href"])).resolve() == file and not {"#", "?"} & set(row["href"])


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        ("4ep", 0.5),
        ("88ba", 0.25),
        ("9ep9", None),
        ("8ep\n#   budget: 0.33", 0.33),
        ("8ep\n#   budget: 0.33333333333333331", 0.33),
        ("8ep\n#   budget: 1.2.3", None),
    ],
)
def test_a_cell_knows_its_place_and_its_budget(tmp_path, duration, expected):
    study_run(tmp_path, cell="minus-ema", settings=[("max_duration", duration)])
    (cell,) = data_of(tmp_path / "study")["cells"]
    assert (cell["study"], cell["hardware"], cell["name"]) == ("curves", "reference-2cpu", "minus-ema")
    assert cell["budget"] == expected


def test_the_cells_of_a_sweep_are_known():
    data = data_of(RESULTS / "study" / "sweep")
    assert {cell["budget"] for cell in data["cells"]} == {0.15, 0.3, 0.5, 1.0}
    assert {(cell["study"], cell["trains_on"]) for cell in data["cells"]} == {("sweep", True)}
    assert {len([cell for cell in data["cells"] if cell["name"] == "optimized-0.3"])} == {2}


def test_hostile_text_stays_inside_the_block(tmp_path):
    keys = ("configuration_name", "method", "submission_platform", "benchmark_size", "seed")
    study_run(tmp_path, values=dict.fromkeys(keys, HOSTILE), settings=[("precision", HOSTILE)], study="<b>")
    bench = tmp_path / "throughput" / "<i>" / "x.json"
    bench.parent.mkdir(parents=True)
    rate = {"configuration": HOSTILE, "shape": "\u202e", "samples_per_s": 1.0}
    bench.write_text(json.dumps({"benchmark": HOSTILE, "size": HOSTILE, "rates": [rate]}))
    data = data_of(tmp_path, tmp_path / "study")
    page = render(data)
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page and "<!--" not in page and "<b>" not in page and "<i>" not in page
    assert block(page) == json.loads(json.dumps(data))
    assert any(HOSTILE[:40] in line for line in data["lines"])
    around = re.sub(r'(id="data">).*?</script>', "", page)
    assert not re.search(r"<link|@import|\bsrc=|https?://|\binnerHTML\b", around)


def test_damaged_logs_still_make_a_page(tmp_path):
    rng = random.Random(0)
    good = sorted(RESULTS.glob("*/*/result_0.txt"))
    for number in range(60):
        file = study_run(tmp_path, cell=f"c{number % 20}", number=number)
        file.write_bytes(mutated(rng.choice(good).read_text().splitlines(), rng))
    data = data_of(tmp_path / "study")
    page = render(data)  # which refuses NaN
    assert page.count("<script") == 2 and set(data["runs"]) == set(COLUMNS)
    assert {len(column) for column in data["runs"].values()} == {60}


def test_prices_are_those_of_the_share_of_a_machine(tmp_path):
    study_run(tmp_path)
    folder = tmp_path / "study" / "curves" / "2xH200-mini-half"
    (tmp_path / "study" / "curves" / "reference-2cpu-mini-half").rename(folder)
    (row,) = [row for row in data_of(tmp_path / "study")["prices"] if row["name"] == "aws-p5en-2026"]
    assert row["fits"] == {"2xH200": [pytest.approx(63.296 * 2 / 8), None]}


def test_a_bench_result_that_is_none_is_named_and_left_out(tmp_path):
    texts = {"good": '{"rates": [{"samples_per_s": 2}]}', "list": "[]", "none": '{"rates": [{}]}', "cut": "{"}
    texts |= {"zero": '{"rates": [{"samples_per_s": 0.0}]}', "less": '{"rates": [{"samples_per_s": -1}]}'}
    texts |= {"deep": '{"rates": ' + "[" * 50_000, "nan": '{"rates": [{"samples_per_s": NaN}]}'}
    folder = tmp_path / "throughput" / "here"
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text)
    said = []
    (found,) = read_benches([tmp_path], said.append)
    assert found["rates"][0]["samples_per_s"] == 2 and len(said) == len(texts) - 1
    assert render(page_data([], [found], load_prices(), tmp_path))


def test_a_person_gets_a_page_or_one_line(tmp_path):
    study_run(tmp_path / "results")
    page = tmp_path / "explore.html"
    done = ttt("report", "--explore", tmp_path / "results", RESULTS, "-o", page)
    num_runs = 1 + len(list(RESULTS.rglob("result_*.txt")))
    num_benches = len(list(RESULTS.glob("throughput/*/*.json")))
    assert done.returncode == 0 and f"{num_runs} runs, {num_benches} bench results" in done.stdout
    data = block(page.read_text())
    kinds = [data["cells"][number]["kind"] for number in data["runs"]["cell"]]
    assert kinds.count("measured") == num_runs and {"published", "predicted"} < {*kinds}
    for arguments in (["nowhere"], [RESULTS, "--prices", "x"], [RESULTS, "-o", page / "page.html"]):
        one_line(ttt("report", "--explore", *arguments))
    done = ttt("report", "--explore", RESULTS / "throughput", "-o", tmp_path)
    assert f"wrote {page}: 0 runs, {num_benches} bench results" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["explore.html", "results"]
