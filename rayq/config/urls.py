"""URLs that users give. They are kept in metadata and manifests, and shown in errors and logs: so
they hold no credentials, and an error that says so does not show them either."""

from __future__ import annotations

import re
from collections.abc import Collection

from rayq.errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]+\]")
_USER_INFO = re.compile(r"(?<=:/)/?[^/\s@]*@")
_QUERY = re.compile(r"(://[^\s?#]*)[?#][^\s)'\"]*|\?[\w.%-]+=[^\s)'\"]*")


def check_url(
    what: str, url: str, *, schemes: Collection[str] | None = None, allows_user: bool = False
) -> None:
    """Raises ConfigError unless `url` is `scheme://place/path` alone: without user and password,
    options, `..` and control characters. `what` names it, such as a config, since the error never
    has the URL. `schemes`: the only ones; None: any. `allows_user`: a name before an `@` is part of
    the place, as in `abfs://container@account.example/path`; a password never is."""
    if not isinstance(url, str):
        raise ConfigError(f"{what} must be a text, not {type(url).__name__}.")
    scheme, colon, rest = url.partition("://")
    place = _IPV6.sub("", rest.partition("/")[0])
    problem = None
    if not colon or not _SCHEME.fullmatch(scheme) or not rest.strip("/"):
        problem = "is not a URL, scheme://place/path"
    elif schemes is not None and scheme not in schemes:
        problem = f"begins with none of {', '.join(f'{name}://' for name in schemes)}"
    elif ("@" in rest and not allows_user) or "?" in rest or "#" in rest or "%" in place:
        problem = "holds a user, a password or options"
    elif re.search(r"[][]|:(?![0-9]+$)", place):
        problem = "holds a password, or a port that is not a number"
    elif ".." in rest.split("/") or not rest.isprintable():
        problem = "is not a plain path: it has `..`, or characters that cannot be shown"
    if problem is not None:
        raise ConfigError(
            f"{what} {problem}. It is kept and shown, so it says only where the objects are: "
            "credentials and options come from the environment of each process. (It is not shown "
            "here.)"
        )


def without_credentials(text: str) -> str:
    """A text that others have made, such as the message of a library's error or the URI of a
    record, without what URLs in it have before an `@` or behind a `?`."""
    return _QUERY.sub(lambda found: found[1] or "", _USER_INFO.sub("/", text))
