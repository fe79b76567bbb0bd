"""Downloads the official CIFAR archives: goes on after a cut, checks the sum, and shows the file only when it is whole.

The libraries that fetch data sets (pooch, torch.hub, torchvision) check sums too, but begin anew after a cut, and 170 MB
from a slow server are often cut. So this is the standard library's client with a Range header.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
TIMEOUT = 30  # seconds without a byte
TRIES = 5  # connections that may break before the user is asked to try again
DownloadProgress = Callable[[int, int | None], None]  # bytes so far, bytes in all where the server says so


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
    archive = ARCHIVES[name]
    folder = cache or cache_folder()
    target = folder / archive.file
    if target.is_file() and checksum(target) == archive.md5:
        return target
    part = folder / f"{archive.file}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    _download(archive.url, part, progress or (lambda done, total: None))
    if checksum(part) != archive.md5:
        part.unlink()  # or the next try would go on from a wrong beginning
        raise ValueError(
            f"{archive.url} gave a file with another checksum than the official archive, and it was deleted: "
            f"run it again, or get {archive.file} elsewhere and name its folder with --data DIR"
        )
    part.replace(target)
    return target


def checksum(path: Path) -> str:
    """The MD5 sum, which is the one that is published."""
    found = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _download(url: str, part: Path, progress: DownloadProgress) -> None:
    """Appends to ``part`` what it lacks of the file, over as many connections as that takes."""
    for _ in range(TRIES):
        response = _open(url, part)
        if response is None:
            return
        try:
            with response:
                done, total = _receive(response, part, progress)
        except OSError as error:
            raise _cannot_write(part, error) from None
        if total is None or done >= total:
            return
    host = urllib.parse.urlsplit(url).netloc
    raise OSError(f"{host} broke off after {done:,} of {total:,} bytes: run it again, it goes on from there")


def _receive(response: Any, part: Path, progress: DownloadProgress) -> tuple[int, int | None]:
    """Writes what comes until the end or a cut. Returns the bytes that there are now and those of the whole file."""
    goes_on = response.status == http.client.PARTIAL_CONTENT  # or the server sends all of it, from the first byte
    with part.open("ab" if goes_on else "wb") as file:
        done = file.tell()
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        progress(done, total)
        for chunk in _chunks(response):
            file.write(chunk)
            done += len(chunk)
            progress(done, total)
    return done, total


def _open(url: str, part: Path) -> Any:
    """The server's answer, from where ``part`` ends; ``None`` where there is nothing after that."""
    size = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={size}-"} if size else {})
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and size:
            return None  # whole, or wrong: the checksum says which
        reason = f"it answers {error.code} {error.reason}"
    except urllib.error.URLError as error:
        reason = str(getattr(error.reason, "strerror", None) or error.reason)
    except (OSError, http.client.HTTPException) as error:
        reason = str(error)
    file, folder = url.rpartition("/")[2], part.parent
    raise OSError(
        f"{url} cannot be reached ({reason}): without a network, get {file} on another machine, put it into {folder}, "
        "or name its folder with --data DIR"
    )


def _chunks(response: Any) -> Iterator[bytes]:
    """What comes until the end or a cut; by the size the caller sees which of the two it was."""
    try:
        while chunk := response.read(CHUNK):
            yield chunk
    except (OSError, http.client.HTTPException):
        return


def _cannot_write(path: Path, error: OSError) -> OSError:
    return OSError(f"{path} cannot be written ({error.strerror}): make room, or name another folder in MIXNORM_CACHE")
