#!/bin/sh
# Keeps the three newest complete steps of each run below a folder, and removes what was never
# finished. From cron, each night, with the ckptkit of a virtual environment:
#
#     0 3 * * *  PATH=/path/to/.venv/bin:$PATH /path/to/examples/free_space.sh /data/runs
#
# Steps that are being written, read or pushed stay. A folder without steps is left out.
set -u
: "${1:?usage: free_space.sh FOLDER}"
status=0
for run in "$1"/*/; do
  ckptkit ls "$run" > /dev/null 2>&1 || continue
  ckptkit prune "$run" --keep-last 3 --incomplete || status=1
done
exit "$status"
