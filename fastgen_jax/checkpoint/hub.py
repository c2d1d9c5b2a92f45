"""Models on the Hugging Face Hub: into the local cache, or one sentence that says why not."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
# Folders hold the same weights for other programs; Mistral's consolidated files repeat the shards.
_UNWANTED = ["*/*", "consolidated*"]


def download(repo_id: str, revision: str | None) -> Path:
    """The folder of a model's snapshot: downloaded, resumed, or the cached one if the Hub cannot be reached.

    Access follows huggingface_hub's own rules: HF_TOKEN or the saved login, HF_HUB_OFFLINE, HF_HOME.
    Raises ValueError with one sentence.
    """
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError as error:
        raise ValueError(
            f"{repo_id} is gated: ask for access at https://huggingface.co/{repo_id}, "
            "then set HF_TOKEN to a token of that account (https://huggingface.co/settings/tokens)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"the Hugging Face Hub has no model {repo_id}, or it is private and needs another HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{repo_id} has no revision {revision!r}; give a branch, a tag or a commit") from error
    except LocalEntryNotFoundError as error:
        offline = isinstance(error.__cause__, OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE forbids downloading it" if offline else "the Hugging Face Hub cannot be reached"
        raise ValueError(
            f"{repo_id} is not (or not wholly) in the local cache and {why}; go online once, or give a local folder"
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is not a valid Hub id of the form organisation/name") from error
    except HfHubHTTPError as error:
        raise ValueError(f"the Hugging Face Hub refused {repo_id} (HTTP {error.response.status_code})") from error
