import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from markupsafe import Markup

from common.evidence.audit import Audited, audit
from common.evidence.compare.reported import load_reported
from common.evidence.log import RunSet, load, parse_log
from common.evidence.plots import PALETTE, colours, stand_alone
from common.evidence.report import answers, render
from common.evidence.rules.rule import edit
from common.evidence.score import score, speedups
from common.evidence.text import compact_lines
from common.repository import ROOT
from tests.browser import Browser
from tests.command import one_line
from tests.command import ttt_here as ttt

HOSTILE = "<script>alert(1)</script>$\\frac{\x1b[2J\u202e"


def page(run_sets, published=None):
    audited = [Audited(run_set=run_set, findings=tuple(audit(run_set))) for run_set in run_sets]
    return render(audited, published or {}, Path("report"))


@pytest.fixture(scope="module")
def whole(two_sets):
    """The page of two sets, with the reported numbers."""
    return page(two_sets, load_reported())


def pictures(text):
    return re.findall(r"<svg .*?</svg>", text, re.DOTALL)


def test_the_page_has_scores_plots_findings_differences_and_reported_numbers(whole):
    assert len(pictures(whole)) == whole.count("<svg ") == 3
    spoken = re.findall('<svg role="img" aria-label="([^"]+)"', whole)
    assert len({*spoken}) == 3 and all("8xA100-mini: " in words for words in spoken)
    first = whole.index("<strong>optimized is 1.9")
    assert first < whole.index("<svg ") < whole.index("<table")  # the answer, the picture beside it
    for part in ("8xA100-mini-optimized", "unverified, proxy", "+  lr: 2.048", "python 3.11", "110.513"):
        assert part in whole
    assert "mini: a proxy" in whole
    assert "17.1 % = 1 - " in whole and "2.71x (95 % 2.60 to 2.85) = " in whole and "1.59x with" in whole


def test_the_page_loads_and_runs_nothing_follows_the_theme_and_is_the_same_again(two_sets, whole):
    assert "default-src 'none'" in whole and whole == page(two_sets, load_reported())
    assert not re.search(r"<script|<link|<img|@import|src=|javascript:", whole)
    for svg in pictures(whole):
        ElementTree.fromstring(svg)
        assert "currentColor" in svg


RUNS = (80.0, 84.0, 77.0)


@pytest.mark.parametrize(
    ("seconds", "part"),
    [
        ([40.0, 42.0, 38.0], "optimized is 1.9"),
        ([160.0, 168.0, 154.0], "optimized is 1.9"),
        ([81.0, 70.0, 90.0], "No difference between optimized and baseline was shown"),
        ([40.0], "no interval: too few runs"),
        ([], "optimized has no score: 0 of 2 runs"),
    ],
    ids=["faster", "slower", "the same", "one run", "missed"],
)
def test_the_answer_says_how_much_faster_and_how_sure(golden, tmp_path, seconds, part):
    def write(configuration, times, mutation=list):
        logs = [golden.log(configuration=configuration, block_s=s, index=n) for n, s in enumerate(times)]
        golden.write(tmp_path, [mutation(lines) for lines in logs])

    write("baseline", RUNS if len(seconds) != 1 else RUNS[:1])
    write("optimized", seconds or RUNS[:2], list if seconds else edit("run_stop", status="aborted"))
    scores = [score(run_set) for run_set in load([tmp_path])]
    (answer,) = answers(scores, speedups(scores))
    assert answer.startswith(part) or part in answer
    if len(seconds) > 1:
        low, high = map(float, re.search(r"interval,? ([0-9.]+) to ([0-9.]+)", answer).groups())
        assert ("includes 1" in answer) == (low <= 1 <= high) and "3 runs" in answer
        assert ("slower" in answer) == (min(seconds) > 100)


def test_a_set_of_another_processor_is_not_compared_and_says_why(golden, tmp_path):
    for configuration, processor in (("baseline", "AMD EPYC"), ("closed", "Intel(R) Xeon(R) Processor")):
        lines = edit("num_accelerators", value=0)(golden.log(configuration=configuration))
        golden.write(tmp_path, [edit("processor", value=processor)(lines)])
    scores = [score(run_set) for run_set in load([tmp_path])]
    (answer,) = answers(scores, speedups(scores))
    why = "baseline ran on AMD EPYC, closed on Intel(R) Xeon(R) Processor."
    assert answer.endswith(f" It is not compared: {why}")


def test_a_set_of_another_target_has_a_line_of_its_own_and_is_not_compared(golden, tmp_path):
    for configuration, target in (("baseline", 0.9), ("closed", 0.5)):
        lines = golden.log(size="mini", configuration=configuration)
        golden.write(tmp_path, [edit("quality_target", value=target)(lines)])
    run_sets = list(load([tmp_path]))
    scores = [score(run_set) for run_set in run_sets]
    (answer,) = answers(scores, speedups(scores))
    assert answer.startswith("closed reaches its own target, 0.5, in ") and "minutes (" in answer
    assert answer.endswith("It is not compared with baseline, whose target is 0.9.")
    (alone,) = answers([entry for entry in scores if entry.configuration == "closed"], {})
    assert alone.startswith("closed reaches the target, 0.5, in ") and "no baseline was scored" in alone
    text = page(run_sets)
    assert "target 0.5 (closed)" in text and "target 0.9 (baseline)" in text
    assert ">closed to 0.5</text>" in text and ", target 0.5</small>" in text
    assert any(line.endswith(", target 0.5)") for line in compact_lines(scores, {}, 200))


def test_a_set_of_two_recipes_has_no_score_and_the_answer_says_why(tmp_path):
    folder = tmp_path / "x-optimized" / "resnet"
    folder.mkdir(parents=True)
    for number, version in enumerate(("torch 2.15.0", "torch 2.99.0")):
        text = (ROOT / f"results/reference-2cpu-mini-optimized/resnet/result_{number}.txt").read_text()
        assert "torch 2.15.0" in text
        (folder / f"result_{number}.txt").write_text(text.replace("torch 2.15.0", version))
    (answer,) = answers([score(run_set) for run_set in load([tmp_path])], {})
    assert answer.startswith("optimized has no score: more than one recipe: version torch is 2.15.0 in ")


def test_the_answer_says_where_every_run_of_a_set_was_disturbed(golden, tmp_path):
    def write(configuration, num_disturbed):
        logs = golden.set(num_logs=2, configuration=configuration)
        busy = edit("machine_load", value=40.0, cores=64, threads=32, steal=0.0)
        golden.write(tmp_path, [busy(log) if n < num_disturbed else log for n, log in enumerate(logs)])

    write("baseline", 1)
    write("optimized", 2)
    scores = [score(run_set) for run_set in load([tmp_path])]
    (answer,) = answers(scores, speedups(scores))
    assert answer.endswith(" (2 of 2 runs of optimized disturbed: no measure.)")


def test_the_page_links_the_explorer_that_lies_beside(two_sets, whole, tmp_path):
    audited = [Audited(run_set=run_set, findings=()) for run_set in two_sets]
    (tmp_path / "explore.html").write_text("")
    assert '<a href="../explore.html">' in render(audited, {}, tmp_path / "report")
    assert "explore.html" not in whole


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_errors_are_readable_in_both_themes_and_a_keyboard_scrolls_what_is_wide(whole):
    on_white, on_black = re.findall(r"[.]error { color: (#[0-9a-f]{6})", whole)
    assert contrast(on_white, "#ffffff") > 4.5 and contrast(on_black, "#121212") > 4.5  # WCAG's of text
    assert whole.count('<div class="wide"') == whole.count('<div class="wide" tabindex="0"') > 3


def test_a_picture_of_its_own_brings_ink_and_paper_for_light_and_dark(whole):
    svg = pictures(whole)[0]
    assert "prefers-color-scheme" not in svg  # on a page its style would be the page's
    alone = stand_alone(Markup(svg))
    ElementTree.fromstring(alone)
    pairs = re.findall(r"svg { color: (#[0-9a-f]{6}); background: (#[0-9a-f]{6}) }", alone)
    assert len(pairs) == 2 and "(prefers-color-scheme: dark)" in alone
    for ink, paper in pairs:
        assert contrast(ink, paper) > 7  # WCAG's enhanced contrast of text
        assert all(contrast(colour, paper) > 3 for colour in PALETTE)  # and its contrast of graphics
    for picture in pictures(whole):
        colours = set(re.findall(r"(?:fill|stroke): ?([^;\"]+)", picture)) | set(
            re.findall(r'(?:fill|stroke)="([^"]+)"', picture)
        )
        assert {"currentColor", "none"} < colours <= {"currentColor", "none", *PALETTE}
        texts = re.findall("<text [^>]*>", picture)
        assert texts and all("fill: currentColor" in text for text in texts)  # else a viewer takes black
    script = (ROOT / "common/study/templates/explore.js").read_text()
    assert "PALETTE = DATA.palette" in script and not re.findall('"#[0-9a-f]{6}"', script)


def test_baseline_optimized_and_closed_have_the_same_colours_in_all_pictures():
    grey, blue, orange, *free = PALETTE
    assert colours(["closed", "optimized", "baseline"]) == [orange, blue, grey]
    assert colours(["baseline", "mosaic", "baseline"]) == [grey, blue, orange]  # all that are free
    assert colours(["optimized", "closed", "closed"]) == [blue, orange, grey]
    assert len(set(colours(["baseline", "optimized", "closed", "a", "b", "c"]))) == len(PALETTE)


def test_hostile_values_are_escaped(golden):
    keys = "submission_platform|configuration_name|submission_org|method"
    logs = []
    for index, lines in enumerate(golden.set()):
        text = "\n".join(lines).replace("0123abc", HOSTILE).replace("name: optimized", f"name: {HOSTILE}")
        text, count = re.subn(
            rf'("key": "({keys})", "value": )"[^"]*"', lambda found: found[1] + json.dumps(HOSTILE), text
        )
        assert count == 4
        logs.append(parse_log(text.encode(), f"result_{index}.txt"))
    text = page([RunSet(folder="<script>", logs=tuple(logs))])
    assert "&lt;script&gt;" in text
    assert not set("\x1b\u202e") & set(text) and "<script" not in text
    for svg in pictures(text):
        ElementTree.fromstring(svg)


def test_unreadable_and_missed_runs_still_make_a_page():
    nothing = parse_log(b"", "result_0.txt")
    assert "no score" in page([RunSet(folder="here", logs=(nothing,))])


def test_a_finding_links_to_its_log_and_to_nothing_else(golden):
    text = "\n".join(edit("eval_samples", value=1)(golden.log())).encode()
    logs = [parse_log(text, name) for name in ("results/a b#?/result_0.txt", "javascript:x")]
    text = page([RunSet(folder="here", logs=(log,)) for log in logs])
    links = set(re.findall(r'<a href="([^"]*)"', text))
    assert links == {"../results/a%20b%23%3F/result_0.txt", "../javascript%3Ax"}


def test_the_page_compares_published_logs_with_what_was_reported(published):
    text = page(load([published]), load_reported())
    assert text.count("IDENTICAL: these are the published runs themselves") == 2
    for part in ("435181", "1281168", "What the published claims come to", "AMD EPYC 7513"):
        assert part in text


FITS = """[...document.querySelectorAll('.scores')].every(table =>
    table.scrollWidth <= table.parentElement.clientWidth) &&
    document.documentElement.scrollWidth <= innerWidth"""
SHOWN = """[...document.querySelectorAll('.scores tr:nth-child(2) td')].slice(1, 10).map(cell => {
    const place = cell.querySelector('span').getBoundingClientRect();
    return [cell.dataset.name, place.left >= 0 && place.right <= innerWidth, place.top]})"""


def test_report_writes_one_file_and_nothing_else(both, tmp_path):
    done = ttt("report", both, "--no-official", "--out", tmp_path / "page")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["index.html"]


@pytest.mark.parametrize("out", ["/proc/x", __file__, f"{__file__}/page"])
def test_report_looks_where_it_will_write_before_it_reads_anything(out):
    assert "cannot write here" in one_line(ttt("report", "nowhere", "--out", out))
    assert "does not end in .svg" in one_line(ttt("report", "nowhere", "--plot", "x.png"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_every_figure_at_1280_and_400_pixels_and_pictures_on_dark(whole, tmp_path):
    (tmp_path / "index.html").write_text(whole)
    (tmp_path / "picture.svg").write_text(stand_alone(Markup(pictures(whole)[0])))
    with Browser(tmp_path / "profile") as browser:
        for width in (1280, 400):
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            browser("Emulation.setDeviceMetricsOverride", **size)
            browser.open(tmp_path / "index.html")
            assert browser.evaluate(FITS), width
            cells = browser.evaluate(SHOWN)
            assert [name for name, _, _ in cells[:2]] == ["minutes", "speed-up"]
            assert all(is_inside for _, is_inside, _ in cells)
            if width == 400:  # one below the other
                assert [top for *_, top in cells] == sorted({top for *_, top in cells})
            top = browser.evaluate("document.querySelector('.answer strong').getBoundingClientRect().top")
            assert 0 <= top < 800
        browser.open(tmp_path / "picture.svg")
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser("Emulation.setEmulatedMedia", features=[feature])
            style = "getComputedStyle(document.documentElement)"
            ink, paper = browser.evaluate(f"[{style}.color, {style}.backgroundColor]")
            lightness = [sum(map(int, re.findall(r"[0-9]+", colour)[:3])) for colour in (ink, paper)]
            assert (lightness[0] > lightness[1] + 300) == (scheme == "dark")
            assert abs(lightness[0] - lightness[1]) > 300
        assert browser.complaints == []


def test_report_writes_the_page_or_the_plot():
    line = one_line(ttt("report", "nowhere", "--plot", "x.svg", "--out", "page"))
    assert "--out: not allowed with argument --plot" in line


def test_report_shows_the_verdicts_of_the_official_checkers(golden, tmp_path):
    golden.write(tmp_path / "results", [golden.log(size="mini")])
    done = ttt("report", tmp_path / "results", "--out", tmp_path / "page")
    assert done.returncode == 0
    assert "compliance 2.1.0: " in (tmp_path / "page" / "index.html").read_text()
