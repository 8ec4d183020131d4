"""How fast and with how much memory does a checkpoint go to and from an S3 server, against boto3
alone?

    python benchmarks/buckets.py [--gigabytes 1] [--rounds 3]

Both in turns, against one moto server on this machine: `upload_file` and `download_file` of boto3
for each file, and `Mirror` and `complete`, which also compute the checksums of a manifest. Memory
is the peak of a process of its own that holds nothing else, above what it had before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

BUCKET = "bucket"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The address of an S3 server with the bucket BUCKET, in a process of its own."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://localhost:{port}"
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT"))
                break
            assert server.poll() is None, "the server did not start"
            time.sleep(0.05)
        yield address
    finally:
        server.kill()
        server.wait()


def environment(address: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


class Faults:
    """A port before a server, through which a share of all connections breaks off after a random
    number of bytes, and all are refused while `is_down`."""

    def __init__(self, address: str, share: float, seed: int = 0) -> None:
        self.server = ("localhost", int(address.rpartition(":")[2]))
        self.share, self.random_, self.is_down, self.broken = share, random.Random(seed), False, 0
        self.listening = socket.create_server(("localhost", 0))
        self.address = f"http://localhost:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client = self.listening.accept()[0]
                if self.is_down:
                    client.close()
                    continue
                server = socket.create_connection(self.server)
                # A connection carries many requests: it breaks after up to 4 MB either way.
                if self.random_.random() < self.share:
                    most = self.random_.randrange(1 << 22)
                else:
                    most = sys.maxsize
                for one, other in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._copy, args=(one, other, most), daemon=True
                    ).start()

    def _copy(self, one: socket.socket, other: socket.socket, most: int) -> None:
        with contextlib.suppress(OSError):
            while (data := one.recv(1 << 16)) and not self.is_down:
                most -= len(data)
                if most < 0:
                    self.broken += 1
                    break
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listening.close()


# ---- speed


PART = r"""
import json, re, sys, time
from pathlib import Path
from shoal.buckets import RUNS, complete, connect, cache_path
what, folder = sys.argv[1], Path(sys.argv[2])
files = list((folder / "made").iterdir())

def memory(name):
    return int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024

if what.startswith("boto3"):
    import boto3
    client = boto3.client("s3")
    client.list_buckets()
else:
    from shoal.report.console import Console
    from shoal.runs.mirror import Mirror
    connect("s3://bucket/run")[0].ls("bucket")
    if what == "shoal up":
        mirror = Mirror(folder / "run", 1, Console())
        (folder / "run" / "checkpoints").mkdir()
        (folder / "run" / "config.yaml").write_text("steps: 1")
Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
before, began = memory("VmRSS"), time.perf_counter()
if what == "boto3 up":
    for file in files:
        client.upload_file(str(file), "bucket", f"boto3/{file.name}")
elif what == "boto3 down":
    for file in files:
        client.download_file("bucket", f"boto3/{file.name}", sys.argv[3] + file.name)
elif what == "shoal up":
    (folder / "made").rename(folder / "run" / "checkpoints" / "1")
    mirror.flush()
else:
    complete(cache_path("s3://bucket/run/checkpoints/1", RUNS))
seconds = time.perf_counter() - began
print(json.dumps([seconds, memory("VmHWM") - before]))
if what == "shoal up":
    mirror.close()
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sizes = [int(options.gigabytes * 1e9 * share) for share in (0.4, 0.3, 0.2, 0.1)]
    print(
        f"{sum(sizes) / 1e9:.1f} GB in {len(sizes)} files\n\nround  what        MB/s  MB of memory "
        f"above"
    )
    for number in range(1, options.rounds + 1):
        for system in ("boto3", "shoal")[:: 1 if number % 2 else -1]:
            with s3_server() as address, tempfile.TemporaryDirectory() as temporary:
                variables = os.environ | environment(address)
                folder, other = (
                    Path(temporary, name, "shoal", "buckets", "runs", "s3", BUCKET) for name in "ab"
                )
                (folder / "made").mkdir(parents=True)
                (other / "made").mkdir(parents=True)
                for index, size in enumerate(sizes):
                    (folder / "made" / f"part{index}").write_bytes(os.urandom(size))
                for way in ("up", "down"):
                    # downloads to another
                    if way == "up" or system == "boto3":
                        machine = "a"
                    else:
                        machine = "b"
                    if machine == "b":
                        shutil.copytree(folder / "run" / ".manifests", other / "run" / ".manifests")
                    done = subprocess.run(
                        [
                            sys.executable,
                            "-c",
                            PART,
                            f"{system} {way}",
                            str(other if machine == "b" else folder),
                            f"{temporary}/",
                        ],
                        text=True,
                        env=variables | {"XDG_CACHE_HOME": f"{temporary}/{machine}"},
                        check=True,
                        stdout=subprocess.PIPE,
                    )
                    seconds, memory = json.loads(done.stdout.splitlines()[-1])
                    print(
                        f"{number:>5}  {system} {way:<4}  {sum(sizes) / 1e6 / seconds:>6.0f}  "
                        f"{memory:>8.0f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
