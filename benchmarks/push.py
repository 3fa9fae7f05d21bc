"""What `ckptkit push` of a model costs beside `huggingface_hub.upload_folder`, in turns.

Both are processes that speak to the tests' stand-in Hub on this machine over HTTP, one PUT for
each weight file. Every push goes to a repository of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence

from measuring import (
    MB,
    ROOT,
    WORK,
    ckptkit,
    files_below,
    make_checkpoint,
    markdown,
    measure,
    median_ratio,
    size_below,
    warm,
)

sys.path.insert(0, str(ROOT))
from tests.hub_server import TOKEN, HubServer

_UPLOAD = """
import sys
from huggingface_hub import HfApi
api = HfApi(endpoint=sys.argv[3], token=sys.argv[4])
api.create_repo(sys.argv[2], private=True)
api.upload_folder(repo_id=sys.argv[2], folder_path=sys.argv[1])
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    checkpoint = make_checkpoint(options.gigabytes)
    model = WORK / f"model-{options.gigabytes:g}GB"
    if not model.exists():
        measure(ckptkit("consolidate", str(checkpoint), str(model)))
    seconds: dict[str, list[float]] = {"upload_folder": [], "ckptkit push": []}
    processor: dict[str, list[float]] = {name: [] for name in seconds}
    with HubServer(xet=False) as hub:
        os.environ |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        os.environ["HF_HUB_DISABLE_XET"] = "1"  # one PUT for each file
        commands = {
            "upload_folder": [
                sys.executable,
                "-c",
                _UPLOAD,
                str(model),
                "me/model",
                hub.url,
                TOKEN,
            ],
            "ckptkit push": ckptkit("push", str(model), "me/model"),
        }
        for _ in range(options.rounds):
            for name, command in commands.items():
                hub.clear()
                for path in (hub.store / "lfs").iterdir():
                    path.unlink()
                warm(files_below(model))
                sample = measure(command)
                seconds[name].append(sample.seconds)
                processor[name].append(sample.cpu_seconds)
    print(f"a model of {size_below(model) / MB:.0f} MB\n")
    print(
        markdown(
            ["", "s", "processor s", "x upload_folder"],
            [
                [
                    name,
                    f"{statistics.median(times):.2f}",
                    f"{statistics.median(processor[name]):.2f}",
                    f"{median_ratio(times, seconds['upload_folder']):.2f}",
                ]
                for name, times in seconds.items()
            ],
        )
    )


if __name__ == "__main__":
    main()
