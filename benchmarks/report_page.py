"""How large an HTML page of 10,000 tensors is, how long it takes to write, and to open.

It needs Debian's chromium and chromium-driver. Chromium is started once; each opening is a new
load of the file, from the request to the first frame in which all sections are laid out.

Usage: python benchmarks/report_page.py [--layers 61] [--repeats 11]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import ROOT, keep, markdown

sys.path.insert(0, str(ROOT))
import ckptkit
from tests.browser import open_browser
from tests.made_up_inspections import inspection_of, mixture_tensors, statistics_of

_EXPERTS = 54
_OPENED = "return performance.now()"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args(arguments)
    inspection = inspection_of(list(mixture_tensors(options.layers, _EXPERTS)), ranks=options.ranks)
    numbers = statistics_of(inspection)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        began = time.perf_counter()
        ckptkit.write_report(inspection, page, statistics=numbers)
        written = time.perf_counter() - began
        samples = []
        with open_browser(Path(folder) / "profile") as browser:
            for _ in range(options.repeats):
                browser.open(page)
                browser.settle()
                samples.append(float(browser.run(_OPENED)) / 1000)
        size = page.stat().st_size
    header = ("tensors", "ranks", "size", "written in", "open (median)", "min", "max")
    times = [f"{value:.2f} s" for value in (statistics.median(samples), min(samples), max(samples))]
    row = [
        f"{len(inspection.tensors):,}",
        f"{options.ranks:,}",
        f"{size / 1e6:.2f} MB",
        f"{written:.2f} s",
        *times,
    ]
    print(f"{markdown(header, [row])}\n")
    facts = {"tensors": len(inspection.tensors), "size_bytes": size, "written": written}
    keep("report_page", facts | {"samples": samples})


if __name__ == "__main__":
    main()
