"""All targets, by name: each parser of bytes that other people, stores or runs wrote.

Not among them is what the processes of one run or command say to each other over pipes and sockets
of their own (`ckptkit/writer/messages.py`, the program that asks transformers, the key-value store
of the ranks): who can write there is the user himself.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from tests.campaigns.fuzz.judge import Target

_MODULES = {
    "archive_targets": (
        *("zip-directory", "archive-of-a-tensor", "pickle-machine", "dcp-metadata"),
        *("zstd-chunk", "safetensors-header"),
    ),
    "document_targets": (
        *("manifest", "adapter-config", "model-config", "model-card", "name-map", "index-file"),
        *("delta", "change-stream"),
    ),
    "resume_targets": ("run-files", "structures", "objects-of-a-step"),
    "network_targets": (*("s3-answers", "hub-answers", "serve-requests", "secret-search"),),
    "folder_targets": (
        *("zero", "universal", "rank-files", "torch-files", "dcp", "safetensors", "torchsnapshot"),
        *("meta", "nanotron", "megatron", "torch-checkpointing"),
    ),
}
NAMES = tuple(name for names in _MODULES.values() for name in names)


@cache
def target_named(name: str) -> Target:
    """Returns a target; the modules of others are not imported."""
    module = next(module for module, names in _MODULES.items() if name in names)
    targets = import_module(f"tests.campaigns.fuzz.{module}").TARGETS
    found: Target = next(target for target in targets if target.name == name)
    return found
