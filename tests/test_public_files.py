"""The files that a public host of the repository reads: workflow, forms of issues, citation, security."""

import os
import re
import tomllib

import pytest
import yaml

from common.cli import COMMANDS
from common.evidence.submission.leaks import leaks
from common.repository import ROOT

GITHUB = ROOT / ".github"
WORKFLOW = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())
FORMS = {path.name: yaml.safe_load(path.read_text()) for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml")}
FORMS.pop("config.yml")
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [*GITHUB.rglob("*.yml"), ROOT / "CITATION.cff", ROOT / "SECURITY.md"]
FIELDS = {"markdown": {"value"}, "dropdown": {"label", "options"}, "checkboxes": {"label", "options"}}


def test_public_ci_runs_what_every_change_must_pass():
    (job,) = WORKFLOW["jobs"].values()
    actions = {step["uses"].partition("@")[0]: step["with"] for step in job["steps"] if "uses" in step}
    assert list(actions) == ["actions/checkout", "actions/setup-python"]
    assert actions["actions/checkout"]["fetch-depth"] == 0  # a package takes code of earlier commits
    python = actions["actions/setup-python"]
    assert PROJECT["requires-python"] == f">={python['python-version']}" and python["cache"] == "pip"
    assert all((ROOT / name).is_file() for name in python["cache-dependency-path"].split())
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    assert command == ".ci/run" and os.access(ROOT / command, os.X_OK)
    assert WORKFLOW["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_a_form_of_an_issue_is_whole_and_names_commands_that_exist(name):
    form = FORMS[name]
    assert form["name"] and form["description"]
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0 and all(re.fullmatch(r"[a-z_]+", part) for part in ids)
    for part in form["body"]:
        assert part["type"] in {"markdown", "input", "textarea", "dropdown", "checkboxes"}
        assert FIELDS.get(part["type"], {"label"}) <= set(part["attributes"])
    verbs = re.findall(r"`ttt ([a-z]+)", (GITHUB / "ISSUE_TEMPLATE" / name).read_text())
    assert verbs and set(verbs) <= set(COMMANDS)


def test_there_is_a_form_for_a_bug_and_for_a_result_that_cannot_be_reproduced():
    assert sorted(FORMS) == ["bug.yml", "not_reproduced.yml"]


def test_the_citation_names_this_version():
    assert {"cff-version", "message", "title", "authors"} <= set(CITATION)  # what version 1.2.0 requires
    assert str(CITATION["cff-version"]) == "1.2.0" and CITATION["type"] == "software"
    assert (CITATION["version"], CITATION["license"]) == (PROJECT["version"], PROJECT["license"])
    for work in (CITATION, *CITATION["references"]):
        assert work["title"] and all("name" in one or "family-names" in one for one in work["authors"])


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_machine_host_or_login_is_named(path):
    assert list(leaks(path.read_text(), is_log=True)) == []
