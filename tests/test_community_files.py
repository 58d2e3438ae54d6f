"""CHANGELOG.md, CITATION.cff and the CI workflow agree with the project."""

import re
import tomllib
from pathlib import Path

import jsonschema
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "anyOf": [{"required": ["name"]}, {"required": ["family-names", "given-names"]}],
    },
}
URL = {"type": "string", "pattern": "^https://"}
TEXT = {"type": "string", "minLength": 1}
CFF = {
    "type": "object",
    "required": ["cff-version", "message", "title", "authors"],
    "additionalProperties": False,
    "properties": {
        "cff-version": {"const": "1.2.0"},
        "type": {"const": "software"},
        "version": TEXT,
        "date-released": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\d$"},
        "keywords": {"type": "array", "items": TEXT, "uniqueItems": True},
        "references": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["authors", "title", "type"],
                "additionalProperties": False,
                "properties": {
                    "authors": NAMES,
                    "type": {"const": "article"},
                    "identifiers": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "value"],
                            "properties": {"type": {"enum": ["doi", "url", "swh", "other"]}, "value": TEXT},
                        },
                    },
                    "url": URL,
                    "year": {"type": "string", "pattern": r"^\d{4}$"},
                    **dict.fromkeys(("title", "notes"), TEXT),
                },
            },
        },
        "authors": NAMES,
        **dict.fromkeys(("url", "repository-code"), URL),
        **dict.fromkeys(("message", "title", "abstract", "license"), TEXT),
    },
}
"""The part of the Citation File Format's schema (1.2.0) that the file uses."""


def citation():
    # The format's dates are texts; YAML would make dates of them.
    return yaml.load((ROOT / "CITATION.cff").read_text(), Loader=yaml.BaseLoader)


def release():
    """Return version and date of the newest release in the changelog."""
    headings = re.findall(r"^## \[(.+)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    return headings[1]


def test_the_citation_follows_its_format_and_names_both_papers():
    jsonschema.validate(citation(), CFF)
    cited = [reference["url"].rpartition("/")[2] for reference in citation()["references"]]
    assert cited == ["2605.06850", "2309.00754"]


def test_changelog_citation_and_package_are_of_one_version():
    found = citation()
    assert release() == (PROJECT["version"], found["date-released"])
    assert (found["version"], found["license"]) == (PROJECT["version"], PROJECT["license"])
    assert found["repository-code"] == PROJECT["urls"]["Repository"]
    assert found["url"] == PROJECT["urls"]["Documentation"]


def test_every_version_of_the_changelog_has_its_link_in_the_repository():
    text = (ROOT / "CHANGELOG.md").read_text()
    links = dict(re.findall(r"^\[(.+)\]: (\S+)$", text, re.MULTILINE))
    assert [*links] == re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert all(link.startswith(PROJECT["urls"]["Repository"]) for link in links.values())


def test_ci_runs_what_contributors_run_and_may_only_read():
    workflow = yaml.load((ROOT / ".github" / "workflows" / "ci.yml").read_text(), Loader=yaml.BaseLoader)
    (job,) = workflow["jobs"].values()
    assert workflow["permissions"] == {"contents": "read"}
    assert (job["runs-on"], job["timeout-minutes"]) == ("ubuntu-latest", "90")
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
