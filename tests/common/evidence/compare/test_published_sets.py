"""The published sets of reported.yaml: entries made of logs, their names, and their picture."""

import csv
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from common.errors import UserError
from common.evidence.compare.devices import of_description
from common.evidence.compare.masked_accuracy import MOSAIC, OFFICIAL, convert
from common.evidence.compare.picture import KINDS, measured_places
from common.evidence.compare.reported import SOURCE, load_reported, read_facts
from common.evidence.log import NUM_RUNS, load
from common.evidence.rules.rule import add, chain, edit
from common.evidence.score import score
from common.repository import ROOT
from tests.command import one_line
from tests.command import ttt_here as ttt

FILES = {path.parent.name: path for path in sorted(ROOT.glob("*/reported.yaml"))}
EPOCH = 1281167
H100 = {"division": "closed", "accelerator_model_name": "NVIDIA H100-SXM5-80GB"}
A100 = {"accelerator_model_name": "NVIDIA A100-SXM4-80GB"}


def write_published(golden, root, benchmark="resnet", *, version="v9.8", system="box", shift=0, **fields):
    """Write a set as MLCommons' repositories hold it, with its system's description; return its folder."""
    logs = []
    for index in range(NUM_RUNS[benchmark]):
        unit = EPOCH if benchmark == "resnet" else 100_000
        stop = 1000 + 10 * index + shift
        low, high = (0.7, 0.7592) if benchmark == "resnet" else (0.7, 0.7203)
        total = 50_000 if benchmark == "resnet" else OFFICIAL
        evaluations = [
            (stop * part / 3 - 9, stop * part / 3, unit * part * 12, round(accuracy * total) / total)
            for part, accuracy in ((1, low), (2, low + 0.0162), (3, high))
        ]
        state = chain(
            edit("submission_platform", value=system),
            add("submission_org", key="global_batch_size", value=3200),
        )
        logs.append(state(golden.timeline(benchmark, evaluations, launch_s=4000 * index)))
    folder = golden.write(root / f"training_results_{version}" / "Example" / "results", logs)
    systems = folder.parents[2] / "systems"
    systems.mkdir(exist_ok=True)
    (systems / f"{system}.json").write_text(json.dumps(golden.description() | H100 | fields))
    return folder


def entries_of(*paths):
    """Return the entries that `ttt reproduce --entries` prints, and its comments."""
    done = ttt("reproduce", "--entries", *paths)
    assert (done.returncode, done.stderr) == (0, "")
    comments = [line for line in done.stdout.splitlines() if line.startswith("#")]
    return yaml.safe_load(done.stdout) or [], comments


@pytest.mark.parametrize("benchmark", NUM_RUNS)
def test_an_entry_has_the_figures_of_its_logs(golden, tmp_path, benchmark):
    folder = write_published(golden, tmp_path, benchmark, **A100)
    (entry,), _ = entries_of(tmp_path)
    (run_set,) = load([folder])
    ours = score(run_set)
    assert entry["score"] == pytest.approx(ours.minutes, abs=5e-4)
    assert entry["minutes"] == pytest.approx(ours.run_minutes, abs=5e-5)
    assert entry["samples_to_target"] == [run.samples for run in ours.runs]
    assert entry["training_samples_per_s"] == pytest.approx(
        [run.samples_per_s for run in ours.runs], abs=0.05
    )
    assert entry["quality"] == pytest.approx([run.quality for run in ours.runs], abs=5e-7)
    assert (entry["accelerators"], entry["division"]) == ("8x A100 80 GB", "closed")
    assert (entry["round"], entry["submitter"], entry["system"]) == ("v9.8", "Example", "box")
    assert entry["source"] == f"training_results_v9.8/Example/results/box/{benchmark}"
    assert entry["global_batch_size"] == 3200 and "curve" not in entry
    assert entry["evaluated_every"] == 12 * (EPOCH if benchmark == "resnet" else 100_000)
    if benchmark == "bert":  # 0.7162 of the official tokens is more than 0.72 of MosaicML's
        assert convert(0.7162, OFFICIAL, MOSAIC) > 0.72 > convert(0.7, OFFICIAL, MOSAIC)
        assert entry["mosaic_samples"] == [2_400_000] * 10
        assert entry["mosaic_minutes"] == pytest.approx([(1000 + 10 * n) / 90 for n in range(10)], abs=1e-4)
    else:
        assert "mosaic_samples" not in entry


def test_a_run_that_missed_its_target_has_minutes_and_no_samples(golden, tmp_path):
    file = write_published(golden, tmp_path) / "result_2.txt"
    file.write_text(file.read_text().replace("0.7592", "0.7572").replace('"success"', '"aborted"'))
    (entry,), _ = entries_of(tmp_path)
    assert entry["samples_to_target"] == [36 * EPOCH] * 2 + [None] + [36 * EPOCH] * 2
    assert entry["minutes"] == pytest.approx([(1000 + 10 * n) / 60 for n in range(5)], abs=1e-4)
    assert entry["score"] == pytest.approx(np.mean([1010, 1030, 1040]) / 60, abs=5e-4)


def test_samples_that_only_the_end_of_a_log_states_are_taken_from_there(golden, tmp_path):
    for file in write_published(golden, tmp_path, "bert", **A100).iterdir():
        lines = re.sub(r'"samples": [0-9.]+', '"epoch_num": 1', file.read_text()).splitlines()
        places = (("submission_org", 7), ("eval_stop", 2_500_000))
        state = chain(*(add(key, at=-1, key="train_samples", value=value) for key, value in places))
        file.write_text("\n".join(state(lines)) + "\n")
    (entry,), _ = entries_of(tmp_path)
    assert entry["samples_to_target"] == [2_500_000] * 10
    assert not {"training_samples_per_s", "mosaic_samples", "evaluated_every"} & set(entry)


def test_repeated_logs_are_named_and_other_systems_are_left_out(golden, tmp_path):
    write_published(golden, tmp_path)
    again = write_published(golden, tmp_path, version="v9.9", system="box_again")
    write_published(golden, tmp_path, version="v9.9", system="other_runs", shift=1)
    for number, fields in enumerate(
        (
            {"accelerator_model_name": "NVIDIA A30"},
            {"accelerator_model_name": "NVIDIA GH200"},
            {"number_of_nodes": "2"},
            {"division": "open"},
        )
    ):
        other = write_published(golden, tmp_path, system=f"other_{number}", shift=10 + number, **fields)
    broken = write_published(golden, tmp_path, system="broken", shift=5) / "result_1.txt"
    broken.write_text(broken.read_text().replace("run_stop", "run_stopped"))
    unknown = write_published(golden, tmp_path, system="unknown", shift=6)
    for path in unknown.iterdir():
        path.write_text(path.read_text().replace('"value": "resnet"', '"value": "new"'))
    unknown = unknown.rename(unknown.with_name("new"))
    entries, comments = entries_of(tmp_path)
    assert [entry["system"] for entry in entries] == ["box", "other_runs"]
    assert entries[0]["repeated_in"] == [str(again.relative_to(tmp_path))]
    assert "repeated_in" not in entries[1] and entries[0]["digest"] != entries[1]["digest"]
    assert comments[0] == "# resnet: 2 sets" and "results/broken/resnet: a log breaks off" in comments[-1]
    assert "results/unknown/new: neither resnet nor bert" in entries_of(unknown)[1][-1]
    (named,), _ = entries_of(other)  # a set's own folder
    assert (named["system"], named["division"]) == ("other_3", "open")
    assert named["curve"] == [[12 * EPOCH, 0.7], [24 * EPOCH, 0.7162], [36 * EPOCH, 0.7592]]


def test_a_set_of_no_round_is_refused_in_one_line(golden, tmp_path):
    folder = golden.write(tmp_path, golden.set())
    assert "training_results_vN.N" in one_line(ttt("reproduce", "--entries", folder))


XEON = {
    "accelerators_per_node": "0",
    "number_of_nodes": "16",
    "host_processor_model_name": "Intel(R) Xeon(R) x",
}


@pytest.mark.parametrize(
    ("model", "fields", "text"),
    [
        ("NVIDIA A100-SXM4-40GB", {}, "8x A100 40 GB"),
        ("NVIDIA A100-PCIE-80GB", {"accelerators_per_node": "4"}, "4x A100 PCIe 80 GB"),
        ("NVIDIA H200-SXM5-141GB", {"number_of_nodes": 1.0}, "8x H200 141 GB"),
        ("H200", {"accelerator_memory_capacity": "141.0GB"}, "8x H200 141 GB"),
        ("A100", {"accelerator_memory_capacity": "1.80.5 GB"}, "8x A100"),
        ("", XEON, "32x Xeon"),
    ],
)
def test_devices_are_named_by_number_kind_and_memory(golden, model, fields, text):
    assert str(of_description(golden.description() | {"accelerator_model_name": model} | fields)) == text


@pytest.fixture(scope="module", params=FILES)
def facts(request):
    """One reported.yaml as it is in the repository."""
    return read_facts(FILES[request.param])


def test_the_sets_of_the_files_follow_their_rule(facts):
    """One node of A100, H100 or H200 in the closed division; each entry once, where its source says."""
    digests, others = [], set()
    for entry in facts["peers"]:
        place = SOURCE.search(entry["source"])
        assert (entry["round"], entry["submitter"], entry["system"]) == place.groups()
        assert len(entry["minutes"]) == NUM_RUNS[facts["benchmark"]]
        digests.append(entry["digest"])
        if entry["division"] != "closed" or not re.match("[0-9]+x (A100|H100|H200) ", entry["accelerators"]):
            others.add(f"{entry['submitter']} {entry['round']}")
    assert len(set(digests)) == len(digests)
    assert others == {"resnet": {"Ailiverse v3.1"}, "bert": {"Intel v2.1", "NVIDIA v4.1"}}[facts["benchmark"]]
    closed = [entry for entry in facts["peers"] if entry["division"] == "closed"]
    assert {"NVIDIA", "Dell", "Supermicro"} <= {entry["submitter"] for entry in closed}
    assert {"A100", "H100", "H200"} <= {entry["accelerators"].split()[1] for entry in closed}
    repeated = [source for entry in closed for source in entry.get("repeated_in", ())]
    assert repeated and not {entry["source"] for entry in closed} & set(repeated)


def pairs(facts):
    """Pair the published sets as they are read with their entries in the file."""
    sets = load_reported()[facts["benchmark"]]
    return zip(sets.sets + sets.peers, facts["sets"] + facts["peers"], strict=True)


def test_a_published_set_agrees_with_itself(facts):
    for published, entry in pairs(facts):
        assert published.score.source == entry["source"]
        assert published.score.minutes == pytest.approx(entry["score"], abs=1e-3)
        for run, rate in zip(published.score.runs, entry.get("samples_per_s", ()), strict=False):
            # of resnet the rate counts the images of the epochs up to the stop, as do the samples
            assert not run.samples or run.samples_per_s_overall == pytest.approx(rate, rel=1e-4)
        if "evaluation_s" in entry and "training_samples_per_s" in entry:
            evaluation = 60 * np.mean([run.evaluation for run in published.score.runs])
            assert evaluation == pytest.approx(entry["evaluation_s"], abs=0.2)


def test_a_published_set_agrees_with_the_collected_runs(facts):
    path = ROOT.parent / "shared/reference/published_runs.csv"
    if not path.is_file():
        pytest.skip("no collection of published runs beside this checkout")
    names = ("submission", "round", "division", "system", "benchmark")
    with path.open() as stream:
        collected = list(csv.DictReader(stream))
    num_compared = 0
    for published, entry in pairs(facts):
        key = (entry["submitter"], entry["round"], entry["division"], entry["system"], facts["benchmark"])
        rows = [row for row in collected if tuple(row[name] for name in names) == key]
        if not rows:
            continue
        num_compared += 1
        assert [float(row["minutes"]) for row in rows] == [round(minutes, 4) for minutes in entry["minutes"]]
        samples = [int(row["samples_to_target"]) if row["samples_to_target"] else None for row in rows]
        assert samples == entry["samples_to_target"]
        rates = [float(row["samples_per_s"]) for row in rows]
        assert rates in (entry.get("samples_per_s"), entry.get("training_samples_per_s")) or rates == [
            pytest.approx(run.samples_per_s_overall, rel=1e-4) if run.samples else rate
            for run, rate in zip(published.score.runs, rates, strict=True)
        ]
        assert [float(row["final_accuracy"]) for row in rows] == entry["quality"]
        assert {int(row["global_batch_size"]) for row in rows} == {entry["global_batch_size"]}
    assert num_compared >= 10


def test_every_set_is_found_by_submitter_round_and_name():
    for reported in load_reported().values():
        for entry in reported.sets + reported.peers:
            assert reported.find(entry.label) is entry
            for source in entry.repeated_in:
                assert entry.has_words(source.lower())


def test_an_ambiguous_name_is_one_line_with_the_near_names():
    resnet = load_reported()["resnet"]
    with pytest.raises(UserError, match="more than one .* 'dell'; name one of: Dell v2.* more") as error:
        resnet.find("dell")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    with pytest.raises(UserError, match="reported.yaml lists them"):
        resnet.find("zzzzzzzz")
    assert resnet.find("v4.0 NVIDIA h200").name == "h200_ngc24.04_mxnet"
    assert {entry.find("dell v3.1 8xH100").label for entry in load_reported().values()} == {
        "Dell v3.1 XE9680x8H100-SXM-80GB"
    }
    assert load_reported()["bert"].find("dgxa100_ngc22.09_pytorch").submitter == "NVIDIA"


def test_a_claim_names_its_sets_whole(tmp_path):
    (tmp_path / "resnet").mkdir()
    text = FILES["image_classification"].read_text()
    file = tmp_path / "resnet/reported.yaml"
    file.write_text(text.replace("of: 8xA100_80GB-methods", "of: 8xA100_80GB-method"))
    with pytest.raises(UserError, match="a claim: 0 sets are called '8xA100_80GB-method'"):
        load_reported(tmp_path)


def drawn(path):
    """Return the numbers of all points and bars in the panels of an SVG file, and its words."""
    root = ElementTree.parse(path).getroot()
    shapes = [part for shape in root.iter() if "clip-path" in shape.attrib for part in shape.iter()]
    places = [
        re.findall(r"-?[0-9.]+", " ".join(shape.get(name, "") for name in ("x", "y", "d")))
        for shape in shapes
    ]
    words = [part.text for part in root.iter() if part.tag.endswith("}text")]
    return [float(number) for place in places if len(place) in (2, 4) for number in place], words


def test_the_picture_is_drawn_from_the_files(tmp_path):
    picture = tmp_path / "samples.svg"
    done = ttt("reproduce", "--plot", picture, ROOT / "results/reference-2cpu-mini-baseline")
    assert (done.returncode, done.stderr) == (0, "")
    assert {child.tag.rpartition("}")[2] for child in ElementTree.parse(picture).getroot()} >= {"style", "g"}
    (points, words), (kept, kept_words) = map(drawn, (picture, ROOT / "results/samples.svg"))
    message = "draw it again: ttt reproduce --plot results/samples.svg"
    assert len(points) > 500 and words == kept_words, message
    assert points == pytest.approx(kept, abs=0.5), message  # of 288 points of height


def test_a_full_set_has_a_place_in_the_picture(golden, tmp_path):
    run_sets = load([golden.write(tmp_path, golden.set())])
    (place,) = measured_places(load_reported()["resnet"], run_sets)
    assert (place.kind, place.batch_size, place.name) == ("measured here", 2048, "optimized")
    assert place.kind in KINDS and list(place.samples) == [run.samples for run in score(run_sets[0]).runs]
    assert not list(measured_places(load_reported()["bert"], run_sets))


def test_the_page_of_bert_states_the_curves_of_the_file():
    page = (ROOT / "language_bert/README.md").read_text()
    header = re.search(r"^\| samples ((?:\| [\d,]+ )+)\|$", page, re.MULTILINE)[1]
    places = [int(cell.replace(",", "")) for cell in header.strip("| ").split("|")]
    first, second = (
        entry for entry in read_facts(FILES["language_bert"])["peers"] if entry["submitter"] == "Intel"
    )
    for entry in (first, second):
        curve = dict(entry["curve"])
        near, end = (np.mean(entry[name]) for name in ("mosaic_samples", "samples_to_target"))
        ratio = end / near
        accuracies = " | ".join(f"{curve[place]:.3f}" for place in places)
        for cells in (accuracies, f"{near:,.0f} | {end:,.0f} | {ratio:.2f} | {ratio * 0.64064:.2f} M"):
            assert re.search(
                rf"^\| `{entry['system']}`[^|]* \| {re.escape(cells)} \|$", page, re.MULTILINE
            ), cells
        left = next(place for place, accuracy in curve.items() if accuracy > 0.6)
        assert f" after {left // entry['global_batch_size']}" in page
        assert entry["evaluated_every"] == places[0] == 57 * entry["global_batch_size"]
    samples, accuracies = zip(*first["curve"], strict=True)
    near, end = np.interp((convert(0.72, MOSAIC, OFFICIAL), 0.72), accuracies, samples) / 1e6
    ratio = f"{end / near:.2f} ({end:.3f} / {near:.3f} million), so {end / near * 0.64064:.2f} M"
    assert ratio in page and second["curve"][-1][1] < 0.72 <= accuracies[-1]
