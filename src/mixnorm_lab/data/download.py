"""Downloads of the official CIFAR archives into a cache: pooch's, but they go on where a connection broke.

pooch checks the sum and shows a file only when it is whole, but begins anew after a cut, and 170 MB from a slow server are
often cut. So what has come stays in a file beside, and pooch's client is asked for the rest.
"""

from __future__ import annotations

import http
import os
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
TIMEOUT = 30  # seconds without a byte
TRIES = 5  # connections that may break before the user is asked to try again
DownloadProgress = Callable[[int, int | None], None]  # bytes so far, bytes in all where the server says so


class DownloadError(OSError):
    """A server that cannot be reached, or breaks off again and again, in a sentence for the user."""


@dataclass(frozen=True)
class Archive:
    """A file to download, and the sum that it must have."""

    url: str
    md5: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


ARCHIVES = {
    "cifar10": Archive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    "cifar100": Archive("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
}


def cache_folder() -> Path:
    """Where downloads go: the variable MIXNORM_CACHE, or ~/.cache/mixnorm."""
    return Path(os.environ.get("MIXNORM_CACHE") or Path.home() / ".cache" / "mixnorm")


def fetch(name: str, cache: Path | None = None, progress: DownloadProgress | None = None) -> Path:
    """The official archive of a data set, downloaded into the cache unless it is there and whole.

    Args:
        name: "cifar10" or "cifar100".
        cache: the folder for it; :func:`cache_folder` unless given.
        progress: is called with the bytes so far and in all (``None`` where the server does not say).
    """
    if name not in ARCHIVES:
        raise ValueError(f"{name!r} is not for download: choose from {', '.join(ARCHIVES)}")
    import pooch

    archive = ARCHIVES[name]
    folder = cache or cache_folder()
    part = folder / f"{archive.file}.part"

    def download(url: str, whole: str, _: Any) -> None:
        _download(url, part, progress or (lambda done, total: None))
        part.replace(whole)

    pooch.get_logger().setLevel("WARNING")  # or it writes a line to the terminal
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(pooch.retrieve(archive.url, f"md5:{archive.md5}", archive.file, folder, downloader=download))
    except ValueError:
        raise ValueError(
            f"{archive.url} gave a file with another checksum than the official archive, and it was deleted: "
            f"run it again, or get {archive.file} elsewhere and name its folder with --data DIR"
        ) from None
    except DownloadError:
        raise
    except OSError as error:
        raise OSError(
            f"{part} cannot be written ({_reason(error)}): make room, or name another folder in MIXNORM_CACHE"
        ) from None


def checksum(path: Path) -> str:
    """The MD5 sum, which is the one that is published."""
    import pooch

    return str(pooch.file_hash(str(path), alg="md5"))


class _Part:
    """The beginning of a file, to which pooch's client appends what comes over one connection."""

    def __init__(self, path: Path, progress: DownloadProgress) -> None:
        self.path, self.progress = path, progress
        self.done = path.stat().st_size if path.exists() else 0
        self.total: int | None = None
        self.file: Any = None  # until the server sends something that belongs into it

    def begin(self, response: Any, **_: Any) -> None:
        """Takes the server's answer, before its contents come: the rest of the file, or all of it from the first byte."""
        if response.status_code not in (http.HTTPStatus.OK, http.HTTPStatus.PARTIAL_CONTENT):
            return
        goes_on = response.status_code == http.HTTPStatus.PARTIAL_CONTENT
        self.file = self.path.open("ab" if goes_on else "wb")
        self.done = self.file.tell()
        length = response.headers.get("Content-Length")
        self.total = self.done + int(length) if length else None
        response.raw.enforce_content_length = False  # a cut is seen by the size, and what came before it is kept
        self.progress(self.done, self.total)

    def write(self, chunk: bytes) -> None:
        self.file.write(chunk)
        self.done += len(chunk)
        self.progress(self.done, self.total)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _download(url: str, path: Path, progress: DownloadProgress) -> None:
    """Appends to ``path`` what it lacks of the file, over as many connections as that takes."""
    for _ in range(TRIES):
        part = _Part(path, progress)
        try:
            _connect(url, part)
        finally:
            part.close()
        if part.total is None or part.done >= part.total:
            return
    host = urllib.parse.urlsplit(url).netloc
    raise DownloadError(f"{host} broke off after {part.done:,} of {part.total:,} bytes: run it again, it goes on from there")


def _connect(url: str, part: _Part) -> None:
    """Receives what comes over one connection, until the end or a cut."""
    import pooch
    import requests

    headers = {"Accept-Encoding": "identity"}  # the archive as it is
    if part.done:
        headers["Range"] = f"bytes={part.done}-"
    client = pooch.HTTPDownloader(chunk_size=CHUNK, timeout=TIMEOUT, headers=headers, hooks={"response": part.begin})
    try:
        client(url, part, None)
    except requests.RequestException as error:
        answer = error.response
        if part.file is not None:
            return  # a cut: by the size the caller sees it
        if part.done and answer is not None and answer.status_code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # whole, or wrong: the checksum says which
        reason = _reason(error) if answer is None else f"it answers {answer.status_code} {answer.reason}"
        file, folder = part.path.stem, part.path.parent
        raise DownloadError(
            f"{url} cannot be reached ({reason}): without a network, get {file} on another machine, put it into {folder}, "
            "or name its folder with --data DIR"
        ) from None


def _reason(error: BaseException) -> str:
    """What the system says about an error, below what libraries say of it; their words where it says nothing."""
    below: BaseException | None = error
    while below is not None:
        said = getattr(below, "strerror", None)
        if said and isinstance(below, OSError) and not isinstance(below, FileNotFoundError):
            return str(said)
        below = below.__cause__ or below.__context__
    return str(error)
