"""What a release needs besides the code: its version, its documents at the root, and files for GitHub that hold."""

import re
from pathlib import Path

import pytest
import yaml

import iris

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def name(file):
    return file.name


def project():
    return (ROOT / "pyproject.toml").read_text()


def test_the_version_stands_once():
    assert 'dynamic = ["version"]' in project()
    places = [
        file for file in [*(ROOT / "iris").rglob("*.py"), ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]
        if f'"{iris.__version__}"' in file.read_text()
    ]  # fmt: skip
    assert places == [ROOT / "iris" / "version.py"]


def test_the_changelog_begins_with_this_version():
    found = re.findall(r"^## \[(.+?)\] - (?:Unreleased|\d{4}-\d{2}-\d{2})$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert found[0] == iris.__version__


@pytest.mark.parametrize("document", ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_the_documents_hold(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"^make ([\w-]+)", text, re.M):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


@pytest.mark.parametrize("file", WORKFLOWS, ids=name)
def test_workflows_call_targets_that_exist(file):
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    # YAML takes the key "on" for a truth value.
    assert workflow[True]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        if "strategy" in job:
            assert job["strategy"]["matrix"]["python"] == PYTHONS
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands
        for command in commands:
            target = re.fullmatch(r"make ([\w-]+)", command)[1]
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


def test_the_workflows_test_what_the_package_supports():
    first, last = PYTHONS[0], PYTHONS[-1]
    assert f'requires-python = ">={first},<3.{int(last.split(".")[1]) + 1}"' in project()
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project()) == PYTHONS


@pytest.mark.parametrize("file", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=name)
def test_issue_forms_have_what_github_asks_for(file):
    form = yaml.safe_load(file.read_text())
    if file.name == "config.yml":
        assert set(form) == {"blank_issues_enabled"}
        return
    assert form["name"] and form["description"]
    identifiers = [each["id"] for each in form["body"] if each["type"] != "markdown"]
    assert len(set(identifiers)) == len(identifiers)
    for each in form["body"]:
        assert each["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert each["attributes"].get("label") or each["attributes"].get("value")


def test_hooks_call_the_linters():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert all(any(f"-m {tool}" in entry for entry in entries) for tool in ("ruff check", "ruff format", "mypy"))
