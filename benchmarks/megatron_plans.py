"""Time and memory to index a `.metadata` of many ranks with the save plans of Megatron-Core.

    python -m benchmarks.megatron_plans FOLDER [RANKS] [TENSORS]

The file is made with torch's own classes, as rank 0 writes it: each rank's plan arrives as a copy.
Making the file of 1,024 ranks and 2,000 tensors takes minutes and 7 GB, and is done only if it is
not there. Measured are `ckptkit.inspect` in a process of its own, and its largest resident memory.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import resource, sys, time
start = time.perf_counter()
import ckptkit
found = ckptkit.inspect(sys.argv[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"{len(found.tensors):,} tensors in {time.perf_counter() - start:.1f} s, {peak:,.0f} MiB")
"""


def make(path: Path, ranks: int, tensors: int) -> None:
    """Writes the file."""
    import torch
    from torch.distributed.checkpoint import metadata as stored
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    plans = []
    for rank in range(ranks):
        items = []
        for number in range(tensors):
            name = f"decoder.layers.{number}.self_attention.linear_qkv.weight"
            offset = torch.Size([64 * rank, 0])
            written = TensorWriteData(
                stored.ChunkStorageMetadata(offset, torch.Size([64, 4096])),
                stored.TensorProperties(dtype=torch.bfloat16),
                torch.Size([64 * ranks, 4096]),
            )
            index = stored.MetadataIndex(name, copy.copy(offset))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))
        plans.append(SavePlan(items, planner_data={}))
    _, metadata = create_default_global_save_plan(plans)
    metadata.storage_data = {
        stored.MetadataIndex((item.index.fqn + " ")[:-1], item.index.offset): _StorageInfo(
            f"__{rank}_0.distcp", 526_336 * number, 526_336
        )
        for rank, plan in enumerate(plans)
        for number, item in enumerate(plan.items)
    }
    metadata.all_local_plans = plans  # type: ignore[attr-defined]
    with path.open("wb") as file:
        pickle.dump(metadata, file)


def main() -> None:
    folder = Path(sys.argv[1])
    ranks, tensors = map(int, sys.argv[2:4] or ("1024", "2000"))
    path = folder / "iter_0000001" / ".metadata"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path, ranks, tensors)
    print(f"{path.stat().st_size / 1e6:,.0f} MB of .metadata")
    subprocess.run([sys.executable, "-c", _PROGRAM, str(folder)], check=True)


if __name__ == "__main__":
    main()
