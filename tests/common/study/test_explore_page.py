"""The explorer's page in a real browser: quick with 5,000 runs, with true statements on the shown runs."""

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from urllib.parse import unquote

import pytest

from common.evidence.audit import audit_paths
from common.study.explore import COLUMNS, page_data, render
from common.study.points import Points, published_points, read_benches
from common.study.prices import load_prices
from tests.browser import Browser
from tests.common.study.test_explore import HOSTILE, PLACE, RESULTS, data_of, rows, study_run

NUM_RUNS = 5000
SETS = [RESULTS / f"reference-2cpu-mini-{name}" for name in ("baseline", "optimized")]
LIMIT_MS = 600  # from a change of a filter to the picture, median, all 5,000 runs drawn, on a busy machine
pytestmark = [
    pytest.mark.on_demand,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium"),
]


@pytest.fixture(scope="module")
def committed():
    return data_of(*SETS)


def many(data, num_runs=NUM_RUNS):
    """Return the data of so many runs, 3 a cell: real ones, each a little slower and worse than the last."""
    rng = random.Random(0)
    columns = {name: [] for name in COLUMNS}
    cells = []
    real = rows(data)
    for number in range(num_runs):
        if number % 3 == 0:
            row = rng.choice(real)
            named = {"folder": f"study/{number}", "study": f"s{number % 7}", "hardware": f"hw{number % 40}"}
            budget = rng.choice([0.25, 0.5, 1.0])
            cells.append(data["cells"][row["cell"]] | named | {"budget": budget, "name": f"cell-{number}"})
        scale, worse = rng.uniform(0.5, 2), rng.uniform(0.9, 1)
        points = zip(*[iter(row["curve"])] * 4, strict=True)
        curve = [v for a, b, c, d in points for v in (a * scale, b * scale, c, d * worse)] * 3
        made = {"cell": len(cells) - 1, "minutes": row["minutes"] * scale, "quality": row["quality"] * worse}
        for name, value in (row | made | {"seed": str(number), "curve": curve}).items():
            columns[name].append(value)
    return data | {"cells": cells, "runs": columns}


MEASURE = """(async () => {
  const form = document.getElementById("filters"), field = (name) => form.elements.namedItem(name);
  const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const set = (name, value) => {
    field(name).value = value;
    field(name).dispatchEvent(new Event("input", { bubbles: true }));
  };
  set("model", ""); set("show", "runs"); await painted();
  const times = [];
  for (const [name, value] of [["q", "e"], ["q", "ema"], ["q", ""], ["show", "means"], ["show", "runs"],
    ["from", "0.5"], ["from", ""], ["x", "samples"], ["x", "time"], ["colour", "hardware"],
    ["sortBy", "-quality"], ["size", "mini"]]) {
    const before = performance.now();
    set(name, value);
    await painted();
    times.push(performance.now() - before);
  }
  times.sort((a, b) => a - b);
  return { median: times[times.length >> 1], most: times.at(-1), status: $("status").textContent,
    nodes: document.querySelectorAll("#rows tr").length };
})()"""


@pytest.fixture
def view(tmp_path):
    """Return a function that opens the page of some data in a browser: it loads and complains of nothing."""
    with Browser(tmp_path / "profile") as browser:

        def show(data, address=""):
            (tmp_path / "page.html").write_text(render(data))
            browser.open(tmp_path / "page.html", address)
            return browser

        yield show
        assert browser.complaints == []
        assert browser.requests and all(url.startswith(("file://", "about:")) for url in browser.requests)


def test_five_thousand_runs_are_quick(view, committed):
    measured = view(many(committed)).evaluate(MEASURE)
    print(measured)
    assert measured["status"].startswith("5,000 of 5,000 runs in 1,667 recipes")
    assert measured["nodes"] < 60  # of 5,000
    assert measured["median"] < LIMIT_MS, measured


def test_hostile_text_is_shown_as_text(view, tmp_path):
    values = dict.fromkeys(("configuration_name", "method", "submission_platform", "seed"), HOSTILE)
    study_run(tmp_path, cell="c", values=values, settings=[("precision", HOSTILE)])
    browser = view(data_of(tmp_path / "study"))
    browser.evaluate("document.querySelector('#rows button[aria-label^=more]').click()")
    assert browser.evaluate("document.getElementById('details').innerText").count(HOSTILE[:60]) > 0
    counts = browser.evaluate("[document.title, document.images.length, document.scripts.length]")
    assert counts == ["Time to train: explorer", 0, 2]


def test_bench_results_alone_make_a_page(view):
    for points in ([], published_points()):
        browser = view(page_data([], read_benches([RESULTS], print), [], PLACE, points))
        assert browser.evaluate("document.querySelectorAll('#benches tbody tr').length") > 10
    browser.evaluate("(async () => { state.model = 'bert'; drawBenches(); })()")
    shown = browser.evaluate("$('benches').tBodies[0].innerText")
    assert "language_bert" in shown and "image_classification" not in shown


def test_an_address_is_a_view_and_a_view_an_address(view, committed):
    shown = "$('status').textContent"
    of_resnet = [row for row in rows(committed) if "/resnet/" in row["href"]]
    baseline, optimized = (
        [row for row in of_resnet if f"-{name}/" in row["href"]] for name in ("baseline", "optimized")
    )
    minutes, quality = (fmean(row[name] for row in optimized) for name in ("minutes", "quality"))
    ratio = fmean(row["minutes"] for row in baseline) / minutes
    address = "#model=resnet&hardware=all&algorithms=ema&price=reference-2cpu:0.6&sortBy=costSameQuality"
    browser = view(committed, address)
    assert browser.evaluate(shown).startswith("5 of 30 runs")
    answers = browser.evaluate("$('answers').innerText")
    assert f"{ratio:.2f}x as fast" in answers and f"{ratio:.2f}x as cheap" in answers
    assert f"optimized on reference-2cpu: {minutes * 60:.1f} s" in answers
    assert (
        f"for {quality:.4f}, 5 runs (95 % by their own spread: " in answers and "(0.9500 or more)" in answers
    )
    browser.evaluate(
        "(async () => { const box = document.querySelector('[data-facet=recipe] input'); box.click();"
        "await new Promise((done) => setTimeout(done, 700)); })()"
    )
    address = browser.evaluate("location.hash")
    for part in ("recipe=baseline", "price=reference-2cpu", "algorithms=ema"):
        assert part in address
    browser = view(committed, address)
    assert browser.evaluate(shown).startswith("0 of 30 runs")
    assert browser.evaluate("document.querySelector('[data-facet=recipe] input').checked")


def test_a_difference_is_shown_by_bounds_of_both_sides(view, committed):
    browser = view(committed, "#model=bert")
    answer = """((known, name, other) => {
      const means = allMeans.filter((item) => item.cell.benchmark === "bert");
      const of = (name) => means.find((item) => item.cell.configuration === name);
      reference = of(name);
      if (!known) reference.cell.bounds.run = null;
      return atSameQuality("Q", "as fast", [of(other)], (i) => i.minutes, time, time, 0).textContent;
    })"""
    for names in ("'baseline', 'optimized'", "'optimized', 'baseline'"):
        assert "apart: the difference is shown" in browser.evaluate(f"{answer}(true, {names})")
    said = browser.evaluate(f"{answer}(false, 'baseline', 'optimized')")
    assert said.endswith("baseline on reference-2cpu has a single run: no bounds.")


def test_bounds_are_of_recipes_with_all_their_runs(view, committed):
    whole, part = "#model=bert&q=result_", "#model=bert&q=result_0.txt"
    for show in ("means", "runs"):
        browser = view(committed, f"{whole}&show={show}")
        assert browser.evaluate("items.every((item) => timeBound(item, 1) > 0)")
        assert "at most" in browser.evaluate("$('answers').children[0].innerText")
        browser = view(committed, f"{part}&show={show}")
        assert browser.evaluate("items.length > 1 && items.every((item) => timeBound(item, 1) === null)")
        assert "with all its runs" in browser.evaluate("$('answers').children[0].innerText")


def test_what_to_compare_with_changes_with_the_training(view):
    browser = view(data_of(RESULTS, RESULTS / "study"), "#model=bert")
    listed = "[...field('baseline').options].map((option) => option.value)"
    before = browser.evaluate(listed)
    browser.evaluate("state.ends = 'budget'; update()")
    after = browser.evaluate(listed)
    assert after and not {*before} & {*after} and all("sweep" in name or "abl" in name for name in after)
    assert browser.evaluate("field('baseline').value") in after


def test_another_target_is_another_task(view):
    sets = [RESULTS / f"reference-2cpu-mini-{name}" for name in ("baseline", "closed")]
    browser = view(data_of(*sets), "#model=bert")
    answers = browser.evaluate("$('answers').innerText")
    assert "as fast" not in answers and "bert mini (proxy) to 0.2 only" in answers
    assert "closed" not in browser.evaluate("$('front').textContent").partition("to 0.72")[0]


def test_keys_reach_points_runs_and_logs(view, committed):
    browser, canvas = view(committed, "#model=resnet&show=runs"), "charts.scatter.over"
    browser.evaluate(f"{canvas}.focus()")
    browser.key("ArrowRight")
    tip = browser.evaluate("charts.scatter.tip.textContent")
    fastest = min(row["minutes"] for row in rows(committed) if "resnet" in row["href"])
    assert f"after {fastest * 60:.1f} s" in tip
    browser.key("Enter")
    link = browser.evaluate("document.querySelector('#details[open] a').getAttribute('href')")
    assert (PLACE / unquote(link)).is_file() and Path(link).name in tip
    assert browser.evaluate(f"{canvas}.getAttribute('aria-label')").startswith("Scatter of 10 points")
    inputs = "[...document.querySelectorAll('input, select')]"
    unlabelled = f"{inputs}.filter((input) => !input.labels?.length && !input.ariaLabel).length"
    assert browser.evaluate(unlabelled) == 0


def test_means_with_intervals_come_first_and_studies_stay_on_an_axis_of_their_own(view):
    browser = view(data_of(RESULTS, RESULTS / "study"), "#model=bert")
    status = "document.getElementById('status').textContent"
    assert re.search(r"33 runs trained to the end of a budget are left out$", browser.evaluate(status))
    assert browser.evaluate("[...new Set(visible.map((run) => run.cell.trains_on))]") == [False]
    assert browser.evaluate("items.every((item) => !item.isRun)")
    drawn = """(() => {
      const lines = [], pen = { beginPath() {}, moveTo() {}, stroke() {}, setLineDash() {} };
      pen.lineTo = (x, y) => lines.push([x, y]);
      drawIntervals(pen, charts.scatter, items, 60);
      const { x, box } = charts.scatter;
      return [lines, items.map((item) => [x(item.minutesRange[1] * 60), box.right])];
    })()"""
    lines, ends = browser.evaluate(drawn)
    for right, edge in ends:
        assert any(x == pytest.approx(min(right, edge)) for x, _ in lines)


def test_predictions_are_shown_told_apart_and_in_no_answer(view, committed):
    prediction = Points(
        kind="predicted",
        benchmark="bert",
        size="mini",
        hardware="1xH100",
        configuration="optimized",
        name="optimized (bench)",
        target=0.2,
        source="<b>by hand</b>",
        path=str(PLACE / "bench.json"),
        runs=(
            replace(
                published_points()[0].runs[0],
                minutes=0.01,
                quality=0.9,
                samples=1e3,
                samples_per_s=1e5,
                evaluation=0.0,
            ),
        ),
        interval=(0.005, 0.02),
    )
    audited = audit_paths(SETS)
    published = published_points()
    data = page_data(audited, [], load_prices(), PLACE, [*published, prediction])
    browser = view(data, "#model=bert&cloud=aws")
    assert "1 prediction" in browser.evaluate("document.getElementById('status').textContent")
    for part in ("answers", "front"):
        text = browser.evaluate(f"document.getElementById('{part}').innerText")
        assert "optimized" in text and "H100" not in text and "predicted" not in text
    assert "predicted, not measured" in browser.evaluate("$('legend').innerText")
    shapes = browser.evaluate("[KIND_SHAPES.predicted, SHAPES.includes(KIND_SHAPES.predicted)]")
    assert shapes == ["star", False]
    cost = "cost(items.find((item) => item.cell.kind === 'predicted'))"
    assert browser.evaluate(cost) == pytest.approx(0.01 / 60 * browser.evaluate("rates.get('1xH100')"))
    browser.evaluate("showDetails(items.find((item) => item.cell.kind === 'predicted'))")
    details = browser.evaluate("$('details').innerText")
    assert "<b>by hand</b>" in details and "mean of" not in details and "no finding" not in details
    item = "items.find((item) => item.cell.kind === 'predicted')"
    assert "mean of" not in browser.evaluate(f"described({item}, [1, 0.9])")
    assert browser.evaluate(f"TABLE.find((column) => column.id === 'seed').show({item})") == "-"
    browser = view(data, "#model=bert&size=full")
    num_published = sum(point.benchmark == "bert" for point in published)
    status = browser.evaluate("$('status').textContent")
    assert re.match(f"0 of 30 runs.* {num_published} published sets$", status)
    assert "published: " in browser.evaluate("$('answers').innerText")
    browser = view(data, "#model=bert&size=all&ends=budget")
    num_runs = sum("/bert/" in row["href"] for row in rows(committed))
    left_out = f"; {num_runs} runs stopped at the target are left out"
    assert browser.evaluate("$('status').textContent").endswith(left_out)


def test_logarithmic_axes_and_a_whole_cost_column(view, committed):
    address = "#model=bert&price=reference-2cpu:12345678"
    for scale in ("", "x", "xy"):
        browser = view(committed, f"{address}&scale={scale}")
        steps = "[10, 20, 40].map((x) => charts.scatter.x(x))"
        first, second, third = browser.evaluate(steps)
        assert (third - second) / (second - first) == pytest.approx(1 if scale else 2)
        ups = browser.evaluate("[0.2, 0.6, 0.8].map((q) => charts.scatter.y(q))")
        assert (ups[1] - ups[2]) / (ups[0] - ups[1]) == pytest.approx(1 if scale == "xy" else 0.5)
    wide = "items[0].quality = 0.5; items[1].quality = 0.97; items[1].qualityRange = [0.9, 1.3];"
    browser.evaluate(f"{wide} drawScatter(charts.scatter)")
    ups = browser.evaluate("[0.2, 0.6, 0.8].map((q) => charts.scatter.y(q))")
    assert (ups[1] - ups[2]) / (ups[0] - ups[1]) == pytest.approx(1)
    column = browser.evaluate("TABLE.findIndex((column) => column.id === 'cost') + 1")
    cells = f"[...document.querySelectorAll('#rows tbody td:nth-child({column})')]"
    assert browser.evaluate(f"{cells}.every((td) => td.scrollWidth <= td.clientWidth)")
    assert any(len(text) > 8 for text in browser.evaluate(f"{cells}.map((td) => td.textContent)"))


@pytest.mark.parametrize("width", [400, 1280])
def test_the_first_screen_reads_at_each_width(view, width):
    data, size = data_of(RESULTS, RESULTS / "study"), {"width": width, "height": 900}
    view(data)("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)
    browser = view(data)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("$('answers').getBoundingClientRect().top") < 900
    assert browser.evaluate("$('status').getBoundingClientRect().right") <= width
