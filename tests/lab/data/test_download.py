"""Downloads, from a server in this process that can be cut off, ignores ranges, or sends something else."""

import http.server
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
from data_helpers import few, write_archive

from mixnorm_lab import data
from mixnorm_lab.data import cifar, download

__all__ = ["few"]  # a fixture
CONTENTS = np.random.RandomState(0).bytes(300_000)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ``server.contents``; ``server.cuts`` are the numbers of bytes after which the next connections break."""

    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        server.ranges.append(wanted)
        if server.status:
            self.send_error(server.status)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.knows_ranges else 0
        if start and start >= len(server.contents):
            self.send_error(416)
            return
        body = server.contents[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.contents) - 1}/{len(server.contents)}")
        if server.says_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.contents, server.cuts, server.ranges = CONTENTS, [], []
    server.status, server.knows_ranges, server.says_length = None, True, True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("MIXNORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "CHUNK", 1 << 14)
    (tmp_path / "whole").write_bytes(CONTENTS)
    address(monkeypatch, f"http://127.0.0.1:{server.server_port}", download.checksum(tmp_path / "whole"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def address(monkeypatch, host, md5):
    for name in ("cifar10", "cifar100"):
        archive = replace(download.ARCHIVES[name], url=f"{host}/~kriz/{download.ARCHIVES[name].file}", md5=md5)
        monkeypatch.setitem(download.ARCHIVES, name, archive)


def files(folder):
    return {path.name for path in folder.iterdir()}


def test_download_into_the_cache_once(server, tmp_path):
    seen = []
    path = download.fetch("cifar10", progress=lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "cache" / "cifar-10-python.tar.gz"
    assert path.read_bytes() == CONTENTS
    assert files(path.parent) == {path.name}
    assert seen[0] == (0, len(CONTENTS))
    assert seen[-1] == (len(CONTENTS), len(CONTENTS))
    assert seen == sorted(seen)
    assert download.fetch("cifar10") == path
    assert server.ranges == [None]
    assert download.fetch("cifar100", cache=tmp_path / "other" / "folder").parent == tmp_path / "other" / "folder"


def test_broken_connections_go_on(server):
    server.cuts = [100_000, 50_000]
    seen = []
    path = download.fetch("cifar10", progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENTS
    assert server.ranges == [None, "bytes=100000-", "bytes=150000-"]
    assert {total for _, total in seen} == {len(CONTENTS)}
    assert seen == sorted(seen)


def test_the_next_call_goes_on(server, tmp_path):
    server.cuts = [10_000] * download.TRIES
    with pytest.raises(OSError, match=r"broke off after 50,000 of 300,000 bytes: run it again"):
        download.fetch("cifar10")
    assert files(tmp_path / "cache") == {"cifar-10-python.tar.gz.part"}
    assert download.fetch("cifar10").read_bytes() == CONTENTS
    assert server.ranges[-1] == "bytes=50000-"
    assert files(tmp_path / "cache") == {"cifar-10-python.tar.gz"}


def test_an_interrupted_call_goes_on(server, tmp_path):
    def interrupt(done, total):
        if done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.fetch("cifar10", progress=interrupt)
    assert download.fetch("cifar10").read_bytes() == CONTENTS
    assert server.ranges[-1] != "bytes=0-"
    assert len(server.ranges) == 2


@pytest.mark.parametrize("says_length", [True, False])
def test_a_server_without_ranges_sends_all_again(server, says_length):
    server.knows_ranges, server.says_length = False, says_length
    folder = download.cache_folder()
    folder.mkdir()
    (folder / "cifar-10-python.tar.gz.part").write_bytes(CONTENTS[:1000])
    assert download.fetch("cifar10").read_bytes() == CONTENTS
    assert server.ranges == ["bytes=1000-"]


def test_a_part_that_is_whole(server):
    folder = download.cache_folder()
    folder.mkdir()
    (folder / "cifar-10-python.tar.gz.part").write_bytes(CONTENTS)
    assert download.fetch("cifar10").read_bytes() == CONTENTS
    assert files(folder) == {"cifar-10-python.tar.gz"}


@pytest.mark.parametrize("part", [b"garbage", b"g" * 400_000], ids=["short", "too long"])
def test_a_wrong_file_is_not_kept(server, part):
    folder = download.cache_folder()
    folder.mkdir()
    (folder / "cifar-10-python.tar.gz.part").write_bytes(part)
    with pytest.raises(ValueError, match=r"checksum.*run it again.*--data DIR") as raised:
        download.fetch("cifar10")
    assert "\n" not in str(raised.value)
    assert files(folder) == set()
    assert download.fetch("cifar10").read_bytes() == CONTENTS


def test_a_damaged_archive_in_the_cache_is_replaced(server):
    path = download.fetch("cifar10")
    path.write_bytes(CONTENTS[:-1] + b"?")
    assert download.fetch("cifar10").read_bytes() == CONTENTS


def test_without_a_network(server, tmp_path, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    for host in (f"http://127.0.0.1:{port}", "http://nowhere.invalid"):
        address(monkeypatch, host, "0" * 32)
        with pytest.raises(OSError, match=r"cannot be reached \(.+\): without a network, get .*--data DIR") as raised:
            download.fetch("cifar10")
        assert str(tmp_path / "cache") in str(raised.value)
        assert "\n" not in str(raised.value)
    assert files(tmp_path / "cache") == set()


@pytest.mark.parametrize("status", [404, 503])
def test_a_server_that_refuses(server, status):
    server.status = status
    with pytest.raises(OSError, match=rf"it answers {status}.*--data DIR"):
        download.fetch("cifar10")


def test_a_cache_that_cannot_be_written(server, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="MIXNORM_CACHE"):
        download.fetch("cifar10", cache=tmp_path / "file")

    def full(part, chunk):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download._Part, "write", full)
    with pytest.raises(OSError, match=r"\.part cannot be written \(No space left on device\).*MIXNORM_CACHE"):
        download.fetch("cifar10")


def test_only_the_known_archives(server):
    with pytest.raises(ValueError, match="cifar10, cifar100"):
        download.fetch("digits")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("MIXNORM_CACHE", str(tmp_path))
    assert download.cache_folder() == tmp_path
    monkeypatch.delenv("MIXNORM_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert download.cache_folder() == tmp_path / ".cache" / "mixnorm"


@pytest.mark.usefixtures("few")
def test_prepare_downloads_what_is_missing_or_damaged(server, tmp_path, monkeypatch):
    archive, records = write_archive("cifar10", tmp_path, monkeypatch)
    server.contents = archive.read_bytes()
    expected = records["test_batch"][b"labels"]
    assert data.prepare("cifar10").test.labels.tolist() == expected
    assert data.prepare("cifar10").test.labels.tolist() == expected
    assert len(server.ranges) == 1
    for damage in (b"", b"no pickle"):
        path = download.cache_folder() / cifar.OFFICIAL["cifar10"].folder / "test_batch"
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="damaged"):
            data.load("cifar10")
        assert data.prepare("cifar10").test.labels.tolist() == expected
    (download.cache_folder() / archive.name).write_bytes(b"cut off")
    path.unlink()
    assert data.prepare("cifar10").test.labels.tolist() == expected
    assert len(server.ranges) == 2
    with pytest.raises(FileNotFoundError, match="does not exist"):
        data.prepare("cifar10", tmp_path / "elsewhere")
    assert len(data.prepare("digits").train) > 1000
    assert len(server.ranges) == 2
