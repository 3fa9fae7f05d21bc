"""What `ckptkit consolidate` says when it is done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.core.manifest import BY_STORE, MANIFEST_NAME, Manifest
from ckptkit.core.texts import size_text
from ckptkit.planning.selection import what_loads_as_random
from ckptkit.planning.side_files import CONFIG
from ckptkit.storage.places import is_url
from ckptkit_cli._output import Output
from ckptkit_cli._text import counted, escaped, first_of, wrapped

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_HEAD = "lm_head.weight"  # for configurations that name no architecture
_LISTED_TIES = 5


@dataclass(frozen=True, slots=True)
class Consolidated:
    """A finished consolidation.

    Attributes:
        out: The directory as the user typed it.
        manifest: What was written there.
        seconds: How long it took, planning and syncing included.
        notes: What the user should know.
        kept: Whether it was there already, and was only verified.
    """

    out: str
    manifest: Manifest
    seconds: float
    notes: tuple[str, ...]
    kept: bool = False

    @property
    def size_bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(file.size_bytes for file in self.manifest.files.values())

    @property
    def unverified(self) -> list[str]:
        """Names of tensors whose source stored no checksum."""
        return [n for n, t in self.manifest.tensors.items() if t.proof == "unverified"]

    @property
    def copied_by_store(self) -> int:
        """How many tensors have bytes that the store copied, and proved, by itself."""
        return sum(1 for one in self.manifest.tensors.values() if one.proof == BY_STORE)

    def to_json(self) -> dict[str, Any]:
        """Returns the summary as plain values; all details are in the manifest."""
        unverified = self.unverified
        return {
            "out": self.out,
            "kept": self.kept,
            "manifest": _below(self.out, MANIFEST_NAME),
            "kind": self.manifest.kind,
            "source": dict(self.manifest.source),
            "options": dict(self.manifest.options),
            "tensors": len(self.manifest.tensors),
            "files": [
                {"path": path, "bytes": file.size_bytes}
                for path, file in self.manifest.files.items()
            ],
            "bytes": self.size_bytes,
            "seconds": round(self.seconds, 6),
            "bytes_per_second": round(self.size_bytes / self.seconds),
            "proven": len(self.manifest.tensors) - len(unverified),
            "copied_by_store": self.copied_by_store,
            "unverified": unverified,
            "tied": dict(self.manifest.tied),
            "notes": list(self.notes),
        }


def consolidation_page(output: Output, done: Consolidated) -> Iterator[str]:
    """Yields the lines for people."""
    manifest = done.manifest
    speed = size_text(round(done.size_bytes / done.seconds))
    yield output.styled(escaped(done.out), "bold")
    yield (
        f"  {'kept' if done.kept else 'wrote':<10} {counted(len(manifest.tensors), 'tensor')} in"
        f" {counted(len(manifest.files), 'file')}, {size_text(done.size_bytes)}, in"
        f" {done.seconds:.2f} s ({speed}/s)"
    )
    yield from _proof(output, done)
    ties = [f"{name} = {source}" for name, source in manifest.tied.items()]
    for position, tie in enumerate(first_of(ties, _LISTED_TIES)):
        label = "" if position else "tied"
        yield from wrapped(escaped(tie), width=output.width, first=f"  {label:<10} ", rest=" " * 13)
    yield f"  load it    {output.styled(escaped(loading_line(done)), 'cyan')}"


def _proof(output: Output, done: Consolidated) -> Iterator[str]:
    unverified = len(done.unverified)
    proven = len(done.manifest.tensors) - unverified
    if proven:
        text = f"  checked    {counted(proven, 'tensor')} proven by CRC-32"
        if done.copied_by_store:
            text += f", {done.copied_by_store:,} of them copied by the store itself"
        yield output.styled(text, "green")
    if unverified:
        text = f"  unchecked  {counted(unverified, 'tensor')} whose source stored no checksum"
        yield output.styled(text, "yellow")


def loading_line(done: Consolidated) -> str:
    """Returns the line of Python that opens the output."""
    path = repr(str(done.out))
    if is_url(done.out):
        return f"ckptkit.open({path})"
    if done.manifest.kind == "dcp":
        return _dcp_line(done)
    tensors = ((name, one.shape, one.dtype) for name, one in done.manifest.tensors.items())
    config = _config_of(done)
    if config is not None and not what_loads_as_random(tensors, config=config):
        return f"transformers.{_model_class(done, config)}.from_pretrained({path})"
    return _weights_line(done)


def _weights_line(done: Consolidated) -> str:
    files = done.manifest.files
    weights = [name for name in files if name.endswith(".safetensors")]
    if len(weights) == 1:
        return f"safetensors.torch.load_file({str(Path(done.out) / weights[0])!r})"
    if "pytorch_model.bin" in files:
        return f"torch.load({str(Path(done.out) / 'pytorch_model.bin')!r}, weights_only=True)"
    return f"ckptkit.open({str(done.out)!r})"


def _dcp_line(done: Consolidated) -> str:
    index = next(name for name in done.manifest.files if Path(name).name == ".metadata")
    folder = str((Path(done.out) / index).parent)
    return f"torch.distributed.checkpoint.load({{'model': model.state_dict()}}, {folder!r})"


def _below(out: str, name: str) -> str:
    return f"{out}/{name}" if is_url(out) else str(Path(out) / name)


def _config_of(done: Consolidated) -> dict[str, Any] | None:
    """Returns the configuration that was written; empty where it cannot be read."""
    if CONFIG not in done.manifest.files:
        return None
    try:
        return dict(json.loads((Path(done.out) / CONFIG).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _model_class(done: Consolidated, config: dict[str, Any]) -> str:
    manifest = done.manifest
    try:
        name = str(config["architectures"][0])
    except (LookupError, TypeError):
        name = _CAUSAL[0] if _HEAD in manifest.tensors or _HEAD in manifest.tied else "AutoModel"
    if name.endswith(_CAUSAL):
        return "AutoModelForCausalLM"
    return name if name.isidentifier() and name.isascii() else "AutoModel"
