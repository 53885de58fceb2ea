"""cloze push BUNDLE NAMESPACE/NAME: upload a bundle to the Hugging Face hub.

HF_TOKEN, or `hf auth login`, says who uploads; HF_ENDPOINT names another hub.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, errors
from pydantic import Field
from pydantic_settings import CliPositionalArg

from cloze.command import run
from cloze.encoding.bundle import Bundle
from cloze.options import Command
from cloze.training.errors import HubError

__all__ = ["PushOptions", "main", "push"]


class PushOptions(Command):
    """Upload a bundle to the Hugging Face hub: https://huggingface.co, or the hub that HF_ENDPOINT names."""

    bundle: CliPositionalArg[Path] = Field(description="bundle to upload")
    name: CliPositionalArg[str] = Field(description="NAMESPACE/NAME of the repository; it is made if it does not exist")
    private: bool | None = Field(
        None, description="make a private repository, or a public one (default: the hub's own)"
    )
    message: str = Field("Upload a bundle of Cloze", description="message of the commit")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = PushOptions.read(sys.argv[1:] if arguments is None else arguments, "cloze push")
    print(push(options.bundle, options.name, options.private, options.message))


def push(path: Path, name: str, private: bool | None, message: str) -> str:
    """Check the bundle, make the repository, upload every file and return the repository's address.

    Raises BundleError, HubError.
    """
    path = Bundle.load(path).path
    if name.count("/") != 1:
        raise HubError(f"{name!r} is not a repository; write NAMESPACE/NAME, such as your user name and the model's")
    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=path, commit_message=message)
    except errors.HFValidationError as error:
        raise HubError(f"{name!r} cannot be a repository's name ({_first_line(error)})") from error
    except errors.HfHubHTTPError as error:
        raise HubError(_refusal(api.endpoint, name, error)) from error
    except (errors.HTTPError, OSError, ValueError) as error:  # type: ignore[attr-defined] # of httpx or httpx2
        raise HubError(f"{path} cannot be uploaded to {api.endpoint} ({_first_line(error)})") from error
    return str(address)


def _refusal(endpoint: str, name: str, error: errors.HfHubHTTPError) -> str:
    status = error.response.status_code
    advice = {
        401: "log in with `hf auth login`, or set HF_TOKEN to a token that may write",
        403: f"use a token that may write to {name.partition('/')[0]}",
        404: "check the name",
    }.get(status, "try again later")
    return f"{endpoint} refuses {name} with status {status} ({error.server_message or _first_line(error)}); {advice}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    sys.exit(run(main))
