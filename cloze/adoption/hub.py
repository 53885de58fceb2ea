"""Fetch a model's files from the Hugging Face hub, and explain errors in one line.

Tokens, mirrors, offline mode and the local cache are those of huggingface_hub: HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE,
HF_HOME. A repository's code is never run, and only a bundle of the hub is fetched with the code that it lists.
"""

import errno
import json
import shutil
import sys
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Final

from cloze.encoding.bundle import SPEC_FILE, Bundle, learnt_parts, locate, staging
from cloze.encoding.errors import BundleError, ClozeError, first_line

CONFIGURATION: Final = ("*.json", "*.txt", "*.model", "README.md")
WEIGHTS: Final = ("*.safetensors", "[0-9]_*/pytorch_model.bin")
PICKLED: Final = ("*pytorch_model*.bin",)  # if a repository has no other weights
GRAPH: Final = ("onnx/model.onnx*", "[0-9]_*/*.safetensors")  # with its external data, and modules after the pooling
OTHERS: Final = ("onnx/*", "openvino/*", "checkpoint*")  # copies of the same weights
COPIED: Final = frozenset(("--model", "--revision", "--out"))  # the options for a bundle, which is copied
CANNOT_WRITE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)
HTTP_LIBRARIES: Final = ("httpx", "httpx2")  # used by huggingface_hub, depending on its version


class HubError(ClozeError):
    """The hub could not be reached, or does not provide a repository."""


def looks_local(source: str) -> bool:
    """Whether this is a path, not a hub name such as NAME or OWNER/NAME. If a folder OWNER exists, it is a path."""
    path = Path(source)
    inside = path.parent != Path() and path.parent.is_dir()
    return path.exists() or path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1 or inside


def model_folder(source: str, revision: str | None = None, *, graph: bool = False) -> Path:
    """Return the folder of a model's files. Fetch a hub name, at `revision` if given. Raises HubError, BundleError."""
    folder = locate(source)
    if folder.is_dir():
        if revision is not None:
            raise HubError(f"--revision is {revision!r}, but {source} is a folder: omit --revision")
        return folder
    if looks_local(source):
        raise HubError(f"{source!r} is not a folder; give the folder of a model, or its name on the hub")
    return fetch(source, revision, graph=graph)


def fetch(name: str, revision: str | None = None, *, graph: bool = False) -> Path:
    """Fetch a model from the hub, and return its folder in the local cache.

    Its configuration and tokenizer are fetched, and its weights, or with `graph` its ONNX graph. Raises HubError.
    """
    ignored = OTHERS[1:] if graph else OTHERS
    folder = _snapshot(name, revision, [*CONFIGURATION, *(GRAPH if graph else WEIGHTS)], ignored)
    if not graph and not any(folder.glob("*.safetensors")):
        folder = _snapshot(name, revision, [*CONFIGURATION, *PICKLED], ignored)
    return folder


def bundle_on_hub(source: str, folder: Path) -> bool:
    """Whether the model `source`, whose files were fetched to `folder`, is a bundle on the hub."""
    return (folder / SPEC_FILE).is_file() and not locate(source).is_dir()


def copy_bundle(name: str, revision: str | None, folder: Path, out: Path, given: Set[str]) -> None:
    """Copy a bundle from the hub to `out`; its contract was fetched to `folder`. `given` are the command's options.

    Raises HubError, also for options that would change the bundle, and BundleError.
    """
    if others := given - COPIED:
        raise HubError(
            f"{name!r} is a bundle, which is copied as it is; omit {', '.join(sorted(others))}, and change the copy "
            "with `cloze export`"
        )
    try:
        files = json.loads((folder / SPEC_FILE).read_text(encoding="utf-8"))["files"]
        bundle = Bundle.load(_snapshot(name, revision, [SPEC_FILE, *files], []))
    except (BundleError, ValueError, KeyError, TypeError) as error:
        raise HubError(
            f"the files of {name} are not a complete bundle ({error}); if HF_HUB_OFFLINE is set, unset it and start "
            "again"
        ) from error
    if warning := learnt_parts(out):
        print(warning, file=sys.stderr)
    with staging(out) as copy:
        bundle.copy(copy)
        shutil.copy(bundle.path / SPEC_FILE, copy)
    print(f"{out}: a copy of {name}, {', '.join(bundle.precisions)}, vector space {bundle.spec.space}", file=sys.stderr)


def explain_hub_error(error: BaseException, name: str, revision: str | None = None) -> str | None:
    """Say why the hub did not provide a model, and the next step; None if the error has another cause."""
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    for cause in _chain(error):
        if isinstance(cause, errors.HFValidationError):
            return (
                f"{name!r} is not a valid name on the hub, and there is no such folder; give NAME, OWNER/NAME or a "
                "folder"
            )
        if isinstance(cause, errors.RevisionNotFoundError):
            return f"{name} has no revision {revision!r} at {endpoint}; name a branch, a tag or a commit"
        if isinstance(cause, errors.GatedRepoError):
            return (
                f"{name} is gated at {endpoint}; accept its terms at {endpoint}/{name}, and set HF_TOKEN to your token"
            )
        if isinstance(cause, errors.RepositoryNotFoundError):
            return (
                f"{endpoint} has no repository {name}, or it is private, and there is no folder of that name; check "
                "the name, or set HF_TOKEN to a token that may read it"
            )
        if isinstance(cause, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
            if constants.HF_HUB_OFFLINE:
                return (
                    f"{name} is not complete in the local cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; "
                    "unset it, or give a folder"
                )
        elif isinstance(cause, errors.HfHubHTTPError) or type(cause).__module__.partition(".")[0] in HTTP_LIBRARIES:
            return (
                f"the hub {endpoint} could not be reached for {name} ({first_line(cause)}), and there is no folder of "
                "that name; check the network and HF_ENDPOINT, or give a folder"
            )
        elif isinstance(cause, OSError) and cause.errno in CANNOT_WRITE:
            return (
                f"{cause.filename or constants.HF_HUB_CACHE} cannot be written ({cause.strerror}), and the files of "
                f"{name} would be cached there; set HF_HOME to a writable folder"
            )
    return None


def _snapshot(name: str, revision: str | None, patterns: list[str], ignored: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=list(ignored)))
    except Exception as error:  # from huggingface_hub, from its HTTP library or from the disk
        if reason := explain_hub_error(error, name, revision):
            raise HubError(reason) from error
        raise


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
