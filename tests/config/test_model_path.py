"""A model path that means a GGUF file, and what is refused before torch is loaded."""

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from lit_rlkv.config import ConfigError, find_gguf
from lit_rlkv.runs.starting_model import pretrained_path
from tests.config.asking import refusal


def write(path, content=b"GGUF\x03"):
    path.write_bytes(content)
    return path


def test_a_file_or_the_only_one_in_a_folder_is_found(tmp_path):
    file = write(tmp_path / "model.gguf")
    assert find_gguf(str(file)) == file
    assert find_gguf(str(tmp_path)) == file


def test_a_checkpoint_folder_and_a_name_on_the_hub_are_none(tmp_path):
    write(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(str(tmp_path)) is None
    assert find_gguf("Qwen/Qwen2.5-0.5B-Instruct") is None


def test_of_several_files_one_must_be_chosen(tmp_path):
    for name in ("a.Q4_1.gguf", "b.Q8_0.gguf"):
        write(tmp_path / name)
    with pytest.raises(
        ConfigError, match=r"has 2 GGUF files; give one of them: a\.Q4_1\.gguf, b\.Q8_0\.gguf"
    ):
        find_gguf(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model-00001-of-00002.gguf", b"GGUF\x03", "is one of several parts; join them first"),
        (None, b"", "is not a checkpoint folder (no config.json there) and no GGUF file"),
    ],
)
def test_other_files_are_refused_by_the_command_line(tmp_path, name, content, says):
    path = tmp_path / "nowhere.gguf" if name is None else write(tmp_path / name, content)
    assert says in refusal("recipe=llm", f"model.path={path}")


@pytest.mark.parametrize("path", ["./nope", "../nope", "models/nope", "a/b/c", "/nope", "nope.gguf"])
def test_a_path_that_is_no_model_is_told_with_its_key(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for key in ("model.path", "distillation.model"):
        with pytest.raises(ConfigError, match=rf"^{key}={path} is not a checkpoint folder"):
            pretrained_path(path, "runs", key)
    assert f"model.path={path} is not a checkpoint folder" in refusal("recipe=llm", f"model.path={path}")


def test_a_name_of_the_hub_is_asked_for_once(monkeypatch):
    asked = []

    def model_info(self, name, timeout):
        asked.append(name)
        raise HTTPError("no route to the hub")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    with pytest.raises(ConfigError, match=r"^distillation\.model=me/nope is no folder here, and the"):
        pretrained_path("me/nope", "runs", "distillation.model")
    assert asked == ["me/nope"]


def test_the_recipe_of_smollm2_says_how_to_get_its_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("recipe=smollm2").endswith("; `make smollm2` fetches this one")
    assert "make smollm2" not in refusal("recipe=smollm2", "model.path=models/mine.gguf")
