"""Whether the Hugging Face hub can be reached: where it cannot, what was fetched before is read from its cache."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0  # for the hub's first answer; its libraries would try for minutes
_HTTP_CLIENTS = ("httpx", "httpcore", "requests", "urllib3")


class NotFetched(ValueError):
    """What a setting names is neither on this machine nor given by the hub."""


def is_away(error: BaseException) -> bool:
    """Whether an error of the hub's client means that the hub does not answer, or answers that it cannot serve (429, 5xx)."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status == 429 or status >= 500
    of_client = any(kind.__module__.startswith(_HTTP_CLIENTS) for kind in type(error).__mro__)
    return of_client or isinstance(error, ConnectionError | TimeoutError)


def away(ask: Callable[[], object], *, called: str) -> BaseException | None:
    """The error by which the hub does not answer `ask`, with a warning that names what is `called`; None where it answers."""
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    try:
        ask()
    except Exception as error:  # the errors depend on the version of the hub's HTTP client
        if not is_away(error):
            raise
        log.warning("the hub cannot be reached (%s); %s is taken from its cache, if it is there", type(error).__name__, called)
        return error
    return None


def tell_download(name: str, files: Sequence[str]) -> None:
    """Logs that a model is about to be downloaded, unless the hub's cache holds one of these files, or none is named."""
    import huggingface_hub

    if files and not any(isinstance(huggingface_hub.try_to_load_from_cache(name, file), str) for file in files):
        log.info("downloading the weights of %s from the hub, which may take minutes", name)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """The libraries of the hub read their caches only, and try no connection."""
    import datasets
    import huggingface_hub.constants

    before = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
