"""Errors of the Hugging Face hub, each as one cause and one remedy, and the hub's progress bars. Downloads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from specrs.errors import CheckpointError, SpecrsError, invalid, near_names

ErrorT = TypeVar("ErrorT", bound=SpecrsError)
_TRANSPORT = {"ConnectionError", "TimeoutError", "TransportError", "RequestException"}
"""Names of exception classes for failed connections to the hub: Python's, httpx's and requests'."""


def hub_error(
    fault: BaseException,
    source: str,
    repository: str | None = None,
    revision: str | None = None,
    *,
    field: str = "model",
    error: type[ErrorT] = CheckpointError,  # type: ignore[assignment]
    repo_type: str = "model",
) -> ErrorT:
    """Return the exception to raise for `fault`, which a request to the hub raised.

    It distinguishes a missing repository or revision, a gated one, a rejected token, HF_HUB_OFFLINE, and a hub that
    cannot be reached. `source` is the value of `field` as the user gave it, and `repository` the hub id in it, by
    default `source`. `repo_type` is `model` or `dataset`.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub import errors as hub

    repository = source if repository is None else repository
    page = f"{constants.ENDPOINT}/{'datasets/' * (repo_type == 'dataset')}{repository}"
    token = get_token() is not None
    chain = list(_chain(fault))
    gated = _first(chain, hub.GatedRepoError)
    answered = _first(chain, hub.HfHubHTTPError)
    status = getattr(getattr(answered, "response", None), "status_code", None)
    if gated is not None and token:
        reason = f"the repository is gated; accept its licence at {page} with the account of your token"
    elif gated is not None:
        reason = f"the repository is gated; accept its licence at {page}, then set HF_TOKEN to a token of that account"
    elif _first(chain, hub.RevisionNotFoundError) is not None:
        reason = f"{repository} has no such branch, tag or commit; its branches and tags are listed at {page}/tree/main"
        return invalid(error, "revision", revision, reason)
    elif _first(chain, hub.RepositoryNotFoundError) is not None:
        reason = f"no such {'file' if repo_type == 'dataset' else 'folder'}, and no such repository on the hub that "
        reason += "your token may read" if token else "is public"
        reason += f"; {did_you_mean(source, repository, repo_type)}check the spelling"
        reason += "" if token else ", or set HF_TOKEN for a private repository"
    elif isinstance(answered, hub.DisabledRepoError):
        reason = f"the hub has disabled this repository; see {page}"
    elif status == 401:
        reason = "the hub rejected the token; set HF_TOKEN to a valid one, or unset it"
        reason = reason if token else "the hub asks for a token; set HF_TOKEN"
    elif status == 403:
        reason = "the hub denied access; give the token of HF_TOKEN the right to read this repository"
    elif isinstance(_first(chain, hub.HFValidationError, hub.HfUriError), ValueError):
        reason = f"no such folder, and no id of a repository; {did_you_mean(source, repository, repo_type)}"
        reason += "an id is owner/name"
    elif _first(chain, hub.OfflineModeIsEnabled) is not None or (constants.HF_HUB_OFFLINE and _is_local(chain)):
        reason = (
            "no such folder, not in the local cache, and HF_HUB_OFFLINE forbids to ask the hub; "
            f"{did_you_mean(source, repository, repo_type)}check the spelling, unset HF_HUB_OFFLINE, "
            "or give the path of a folder"
        )
    elif answered is not None or _is_local(chain) or any(map(_is_transport, chain)):
        what = next((each for each in reversed(chain) if _is_transport(each)), chain[-1])
        detail = f"it answered {status}" if status is not None else _line(what)
        reason = (
            f"not in the local cache, and the hub cannot be reached ({detail}); try again, or give the path of a folder"
        )
    else:
        reason = f"could not be read from the hub ({_line(fault)})"
    return invalid(error, field, source, reason)


def download_bar() -> Any:
    """Return the hub's class of progress bars for downloads of several files, changed to show only on a terminal.

    The hub's own bar for the number of files is written into logs too.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class TerminalBar(tqdm):
        def __init__(self, *values: Any, **named: Any) -> None:
            super().__init__(*values, **named | {"disable": named.get("disable") or None})  # type: ignore[no-untyped-call]

    return TerminalBar


def did_you_mean(source: str, repository: str | None = None, repo_type: str = "model") -> str:
    """Return `did you mean X? ` with the name nearest to `source`: a folder or .gguf file in the same folder, or a
    repository in the hub's cache. Empty if none is near."""
    path = Path(source)
    beside = [] if source.endswith("..") else _entries(path.parent)
    local = [str(path.parent / name) for name in near_names(path.name, beside, 1)]
    cached = [name.split("--") for name in _cached() if name.startswith(f"{repo_type}s--")]
    ids = {"/".join(parts[1:]): parts[-1] for parts in cached}
    wanted = source if repository is None else repository
    close = near_names(wanted, ids, 1)
    if not close and "/" not in wanted:  # the owner was left out
        names = near_names(wanted, ids.values(), 1)
        close = [full for full, name in ids.items() if name in names]
    found = [name for name in [*close, *local] if name != source][:1]
    return f"did you mean {found[0]}? " if found else ""


def _entries(folder: Path) -> list[str]:
    try:
        return [each.name for each in folder.iterdir() if each.is_dir() or each.suffix == ".gguf"]
    except OSError:
        return []


def _cached() -> list[str]:
    from huggingface_hub import constants

    try:
        return [each.name for each in Path(constants.HF_HUB_CACHE).iterdir()]
    except OSError:
        return []


def _chain(fault: BaseException) -> Iterator[BaseException]:
    """Yield `fault` and its causes, because the hub's client raises one error from another."""
    seen: set[int] = set()
    each: BaseException | None = fault
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__


def _first(chain: list[BaseException], *kinds: type[BaseException]) -> BaseException | None:
    return next((each for each in chain if isinstance(each, kinds)), None)


def _is_local(chain: list[BaseException]) -> bool:
    from huggingface_hub.errors import LocalEntryNotFoundError

    return _first(chain, LocalEntryNotFoundError) is not None


def _is_transport(fault: BaseException) -> bool:
    return any(kind.__name__ in _TRANSPORT for kind in type(fault).__mro__)


def _line(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}".splitlines()[0].removesuffix(": ")
