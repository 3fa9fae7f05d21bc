"""What `s3.py` has done to objects by processes of their own: put there, copied with s3fs, removed.

Usage: python benchmarks/s3_objects.py ENDPOINT put FOLDER PREFIX
       python benchmarks/s3_objects.py ENDPOINT copy SOURCE TARGET --workers 2 [--at-store]
       python benchmarks/s3_objects.py ENDPOINT remove PREFIX
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import s3fs
from s3_account import KEY, REGION, SECRET

_BLOCK_BYTES = 8 << 20


def _copy(files: s3fs.S3FileSystem, source: str, target: str) -> None:
    read = files.open(source, "rb", block_size=_BLOCK_BYTES, cache_type="none")
    with read, files.open(target, "wb", block_size=_BLOCK_BYTES) as written:
        while block := read.read(_BLOCK_BYTES):
            written.write(block)


def copy_all(
    files: s3fs.S3FileSystem, source: str, target: str, workers: int, *, at_store: bool
) -> None:
    """Copies all objects below a prefix.

    Args:
        files: The store.
        source: The prefix.
        target: Another one.
        workers: How many objects are copied at a time.
        at_store: Whether the store is asked to copy them by itself.
    """
    pairs = [(name, target + name.removeprefix(source)) for name in files.find(source)]
    with ThreadPoolExecutor(workers) as pool:
        copy = files.cp_file if at_store else lambda *pair: _copy(files, *pair)
        list(pool.map(lambda pair: copy(*pair), pairs))


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("action", choices=("put", "copy", "remove"))
    parser.add_argument("places", nargs="+")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--at-store", action="store_true")
    options = parser.parse_args()
    client = {"endpoint_url": options.endpoint, "region_name": REGION}
    files = s3fs.S3FileSystem(key=KEY, secret=SECRET, client_kwargs=client)
    if options.action == "copy":
        copy_all(files, *options.places, options.workers, at_store=options.at_store)
    elif options.action == "put":
        folder, prefix = options.places
        files.call_s3("create_bucket", Bucket=prefix.partition("/")[0])
        files.put(f"{folder}/", f"{prefix}/", recursive=True)
    else:
        files.rm(options.places[0], recursive=True)


if __name__ == "__main__":
    main()
