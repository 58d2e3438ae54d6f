"""CHANGELOG.md, CITATION.cff and the CI workflow agree with the project."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def citation():
    # The format's dates are texts; YAML would make dates of them.
    return yaml.load((ROOT / "CITATION.cff").read_text(), Loader=yaml.BaseLoader)


def release():
    """Return version and date of the newest release in the changelog."""
    headings = re.findall(r"^## \[(.+)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    return headings[1]


def test_the_citation_has_what_its_format_asks_for_and_names_both_papers():
    found = citation()
    assert found["cff-version"] == "1.2.0"
    for work in (found, *found["references"]):
        assert work["title"]
        assert all(one.get("name") or one["family-names"] for one in work["authors"])
    cited = [reference["url"].rpartition("/")[2] for reference in found["references"]]
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
