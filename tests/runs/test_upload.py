"""Uploads of exports. The hub is a folder here, behind the methods of its client that are called."""

import inspect
import shutil
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi, ModelInfo, RepoUrl
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError, RepositoryNotFoundError

from lit_rlkv.config import ConfigError
from lit_rlkv.config.commands import ExportConfig
from lit_rlkv.export import export
from lit_rlkv.runs.upload import check_upload
from tests.whole_runs import run


class FolderHub(HfApi):
    """The client of a hub that keeps repositories in a folder."""

    def __init__(self, folder: Path, role="write", failing=None) -> None:
        super().__init__(token="hf_of_a_test")
        self.folder, self.role, self.failing = folder, role, failing
        self.asked = []

    def _called(self, method, *args, **kwargs):
        inspect.signature(getattr(HfApi, method)).bind(self, *args, **kwargs)  # the real one would take it
        self.asked.append(method)
        if method == self.failing:
            raise HTTPError("no route to the hub")

    def whoami(self, *args, **kwargs):
        self._called("whoami", *args, **kwargs)
        if self.role is None:
            raise LocalTokenNotFoundError("Token is required")
        return {"name": "me", "auth": {"accessToken": {"displayName": "mine", "role": self.role}}}

    def repo_info(self, repo_id, **kwargs):
        self._called("repo_info", repo_id, **kwargs)
        if not (self.folder / repo_id).exists():
            response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
            raise RepositoryNotFoundError("Repository Not Found", response=response)
        return ModelInfo(id=repo_id, private=False, tags=[])

    def create_repo(self, repo_id, **kwargs):
        self._called("create_repo", repo_id, **kwargs)
        self.private = kwargs["private"]
        (self.folder / repo_id).mkdir(parents=True, exist_ok=kwargs["exist_ok"])
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, **kwargs):
        self._called("upload_folder", **kwargs)
        self.message = kwargs["commit_message"]
        repository = self.folder / kwargs["repo_id"]
        for name in files_of(repository):
            if any(fnmatch(name, each) for each in kwargs["delete_patterns"]):
                (repository / name).unlink()
        for path in Path(kwargs["folder_path"]).rglob("*"):
            name = path.relative_to(kwargs["folder_path"])
            if path.is_file() and not any(fnmatch(str(name), each) for each in kwargs["ignore_patterns"]):
                target = self.folder / kwargs["repo_id"] / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run(folder, "a-run", "stages=[sft,rl]", "algorithm.n_iterations=1")
    return folder / "a-run"


def asking(saved, to, **options):
    return ExportConfig(ckpt=str(saved), to=str(to), **options)


def files_of(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("private", [None, True])
def test_the_hub_gets_what_the_folder_holds_but_its_manifest(saved, tmp_path, private):
    api = FolderHub(tmp_path / "hub")
    folder, _ = export(asking(saved, tmp_path / "model", push_to="me/model", private=private), api)
    is_asked = ["repo_info"] if private else []
    assert api.asked == ["whoami", *is_asked, "create_repo", "upload_folder"]
    uploaded = tmp_path / "hub" / "me" / "model"
    assert files_of(uploaded) == files_of(folder) - {"export.json"}
    assert (uploaded / "README.md").read_text() == (folder / "README.md").read_text()
    assert "adapter/adapter_model.safetensors" in files_of(uploaded)
    assert (api.private, api.message) == (private, "Iteration 1 of a-run")


def test_what_an_earlier_export_wrote_is_removed_and_all_else_stays(saved, tmp_path):
    api, uploaded = FolderHub(tmp_path / "hub"), tmp_path / "hub" / "me" / "model"
    theirs = {"notes.md", ".gitattributes", "adapter/mine.txt", "onnx/model.onnx", "model-card.safetensors"}
    earlier = {
        "heads.safetensors", "kv_scorer.safetensors", "value_adapter/adapter_config.json",
        "value_adapter/adapter_model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "chat_template.jinja",
    }  # fmt: skip
    for name in theirs | earlier | {"model.safetensors"}:
        (uploaded / name).parent.mkdir(parents=True, exist_ok=True)
        (uploaded / name).write_text("old")
    folder, _ = export(asking(saved, tmp_path / "model", push_to="me/model"), api)
    assert files_of(uploaded) == files_of(folder) - {"export.json"} | theirs
    assert api.asked == ["whoami", "create_repo", "upload_folder"]  # all in one commit


@pytest.mark.parametrize(
    ("options", "name", "says"),
    [
        ({"role": None}, "me/model", "needs a token that may write to the hub, found none; log in by"),
        ({"role": "read"}, "me/model", "needs a token that may write, and 'mine' only reads"),
        ({"failing": "whoami"}, "me/model", "push_to=me/model: no route to the hub"),
        ({}, "me/my/model", "push_to=me/my/model: Repo id must"),
        ({}, "me/..", "push_to=me/..: "),
    ],
)
def test_what_cannot_be_uploaded_is_said_before_any_work(saved, tmp_path, options, name, says):
    api = FolderHub(tmp_path / "hub", **options)
    with pytest.raises(ConfigError, match=says):
        export(asking(saved, tmp_path / "model", push_to=name), api)
    assert not (tmp_path / "model").exists()
    assert set(api.asked) <= {"whoami"}


def test_a_private_export_is_not_uploaded_to_a_public_repository(saved, tmp_path):
    api = FolderHub(tmp_path / "hub")
    (tmp_path / "hub" / "me" / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match="private=true needs a private repository, and push_to=me/model is"):
        export(asking(saved, tmp_path / "model", push_to="me/model", private=True), api)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(("private", "options"), [(None, "export.json`"), (True, "json --private`")])
def test_a_failed_upload_leaves_the_folder_and_says_how_to_try_again(saved, tmp_path, private, options):
    api, folder = FolderHub(tmp_path / "hub", failing="upload_folder"), tmp_path / "model"
    says = f"no route to the hub; the export is in {folder}, and `hf upload me/model {folder} .*{options}"
    with pytest.raises(ConfigError, match=says):
        export(asking(saved, folder, push_to="me/model", private=private), api)
    assert (folder / "export.json").is_file()


def test_without_push_to_nothing_is_asked(saved, tmp_path):
    api = FolderHub(tmp_path / "hub", role=None)
    export(asking(saved, tmp_path / "model"), api)
    assert api.asked == []
    with pytest.raises(ValueError, match="private=false needs push_to, the repository that it is for"):
        asking(saved, tmp_path / "model", private=False)


def test_the_client_itself_says_that_there_is_no_token(monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    with pytest.raises(ConfigError, match="push_to=me/model needs a token that may write to the hub, found"):
        check_upload("me/model", None, HfApi())
