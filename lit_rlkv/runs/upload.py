"""Upload of an export to the Hugging Face hub, by the hub's own client."""

from pathlib import Path

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HTTPError,  # of httpx or httpx2, by the version of the client
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)

from lit_rlkv.config import ConfigError, require
from lit_rlkv.config.errors import one_line
from lit_rlkv.models.kv_scorer import KV_SCORER_FILE
from lit_rlkv.runs.model_card import ADAPTER, ADAPTER_FILES, HEADS, VALUE_ADAPTER

WRITTEN = (
    *("model.safetensors", "model.safetensors.index.json", "model-0*-of-0*.safetensors"),
    *(f"{folder}/{name}" for folder in (ADAPTER, VALUE_ADAPTER) for name in ADAPTER_FILES),
    *(HEADS, KV_SCORER_FILE, "generation_config.json", "chat_template.jinja"),
    "additional_chat_templates/*.jinja",
)
"""Files that one export writes and another may not."""


def check_upload(repo_id: str, private: bool | None, api: HfApi) -> None:
    """Check that the name may be one on the hub, and that the hub takes the token of this machine.

    Raises:
        ConfigError: it may not, there is no token, it only reads, a private upload would go to a public
            repository, or the hub cannot be asked.
    """
    try:
        hf_hub_url(repo_id, "README.md")  # checks the name
        user = api.whoami()
        is_public = bool(private) and _is_public(repo_id, api)
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            f"push_to={repo_id} needs a token that may write to the hub, found none; log in by `hf auth "
            "login`, set HF_TOKEN, or leave push_to out"
        ) from error
    except (ValueError, OSError, HTTPError) as error:
        raise ConfigError(f"push_to={repo_id}: {one_line(error)}") from error
    token = user.get("auth", {}).get("accessToken", {})
    require(
        token.get("role") != "read",
        f"push_to={repo_id} needs a token that may write, and {token.get('displayName')!r} only reads; make "
        "another on huggingface.co/settings/tokens",
    )
    require(
        not is_public,
        f"private=true needs a private repository, and push_to={repo_id} is public; make it private on the "
        "hub, or give another name",
    )


def _is_public(repo_id: str, api: HfApi) -> bool:
    """True if there is such a repository, and it is public."""
    try:
        return not api.repo_info(repo_id).private
    except RepositoryNotFoundError:
        return False


def upload(folder: Path, repo_id: str, private: bool | None, message: str, left_out: str, api: HfApi) -> str:
    """Upload a folder in one commit, and return its address; the repository is made unless it exists.

    The commit removes what an earlier export wrote and this one does not; all other files stay.

    Args:
        private: of a new repository; None: as its owner's account makes them.
        left_out: file that is not uploaded.

    Raises:
        ConfigError: the hub does not take it; the folder stays as it is.
    """
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id,
            folder_path=folder,
            commit_message=message,
            ignore_patterns=[left_out],
            delete_patterns=[*WRITTEN],
        )
    except (OSError, HTTPError) as error:
        deleted = " ".join(f"--delete '{name}'" for name in WRITTEN)
        options = f"{deleted} --exclude {left_out}{' --private' if private else ''}"
        raise ConfigError(
            f"push_to={repo_id}: {one_line(error)}; the export is in {folder}, and "
            f"`hf upload {repo_id} {folder} {options}` tries again"
        ) from error
    return str(address)
