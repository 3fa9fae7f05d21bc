#!/bin/sh
# A writer for a store with an endpoint and keys, asked for a second step, turns to another store.
#
# Versions: torch 2.13.0, fsspec 2026.6.0, s3fs 2026.6.0, Python 3.11.
#
# Guess: `FsspecWriter("s3://bucket/step-1", endpoint_url=...)` opens a store. One writer serves many
# steps, as `FileSystemWriter` does: `dcp.save(state, storage_writer=writer, checkpoint_id=NEXT)`
# writes the next step to the same store, with the same options. `FsspecReader` is alike.
#
# Seen: `checkpoint_id` makes the writer open its file system anew, from the URL alone. All options
# are gone: the endpoint is that of AWS again, and the keys are those of the environment. Without
# keys there, the save fails; with some, it goes to a bucket of that name elsewhere. The reader
# forgets them likewise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy fsspec==2026.6.0 s3fs==2026.6.0
cd "$folder"
"$folder/venv/bin/python" - <<'EOF' 2> "$folder/log"
import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

here = f"file://{os.getcwd()}"
writer = FsspecWriter(f"{here}/step-1", auto_mkdir=True)
dcp.save({"w": torch.ones(2)}, storage_writer=writer)
first = writer.fs.fs.storage_options
dcp.save({"w": torch.ones(2)}, storage_writer=writer, checkpoint_id=f"{here}/step-2")
second = writer.fs.fs.storage_options
print(f"options of the first save: {first}, of the second: {second}")
assert first == {"auto_mkdir": True}
assert second == {}

options = {"endpoint_url": "http://127.0.0.1:9000", "key": "k", "secret": "s"}
for kind in (FsspecWriter, FsspecReader):
    storage = kind("s3://bucket/step-1", **options)
    before = storage.fs.fs.endpoint_url
    storage.reset("s3://bucket/step-2")  # what save and load do with a checkpoint_id
    after = storage.fs.fs.endpoint_url
    print(f"{kind.__name__}: endpoint {before}, then {after}")
    assert before == options["endpoint_url"]
    assert after is None
EOF
