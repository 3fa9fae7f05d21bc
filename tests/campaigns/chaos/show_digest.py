"""Prints the digests of the files of the last step of a run, and of models that were exported.

Usage: show_digest.py FOLDER. Two files differ between runs that did the same: the manifest has the
time and the number of the attempt, the arguments of the Trainer the name of the folder.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

DIFFER = {"ckptkit.json", "training_args.bin"}


def number_of(step: Path) -> int:
    return int(re.findall(r"\d+", step.name)[-1])


def main() -> None:
    folder = Path(sys.argv[1])
    steps = [path for path in folder.glob("**/checkpoint[-_]*") if path.is_dir()]
    kept = [max(steps, key=number_of), *folder.glob("*-model"), *folder.glob("*-adapter")]
    for place in kept:
        for path in sorted(place.rglob("*")):
            if path.is_file() and path.name not in DIFFER:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                print(path.relative_to(folder), digest)


if __name__ == "__main__":
    main()
