"""Flat parameters taken apart by the model that `--model-config` describes."""

from __future__ import annotations

import posixpath
from contextlib import ExitStack

from ckptkit.conversion.source.places import open_folder
from ckptkit.core.errors import FormatError, MissingFileError, NotACheckpointError
from ckptkit.core.index import TensorIndex
from ckptkit.core.model_configs import parse_model_config
from ckptkit.formats.ranks.flat import SLICES, flat_parameters, is_flat, unflattened
from ckptkit.formats.ranks.flat_models import ModelParameter, vectors_of
from ckptkit.plan.side_files import CONFIG, MAX_JSON_BYTES
from ckptkit.storage.places import PathLike

_OPTION = "--model-config"


def with_model_config(index: TensorIndex, folder: PathLike) -> TensorIndex:
    """Puts the parameters of a model in the place of flat ones, if there are any left.

    Args:
        index: Of a checkpoint.
        folder: Holds the `config.json` of the model.
    """
    flat = flat_parameters(index)
    if not flat:
        return index
    from ckptkit.conversion.naming_program import ask_parameters  # needed with --model-config alone

    config = _config(folder)
    alone = {entry.name for entry in index.of_part("model") if not is_flat(entry)}
    slices = {str(path[-1]): value for path, value in index.values.items() if path[:1] == SLICES}
    found = (
        ModelParameter(tuple(one["names"]), tuple(one["shape"]))
        for one in ask_parameters(config, sorted({*alone, *slices}))
    )
    parameters = [one for one in found if alone.isdisjoint(one.names)]
    lengths = {str(entry.name): entry.elements for entry in flat}
    vectors = vectors_of(parameters, lengths, index.run.world_size or 1, slices)
    return unflattened(index, flat, vectors, f"{_OPTION} {folder}")


def _config(folder: PathLike) -> dict[str, object]:
    with ExitStack() as stack:
        source = open_folder(stack, folder, _OPTION)
        where = posixpath.join(source.location, CONFIG)
        try:
            size = source.stat(CONFIG).size_bytes
        except MissingFileError as error:
            raise NotACheckpointError(
                f"no {CONFIG!r} lies there",
                where=f"{_OPTION} {folder}",
                hint="name a folder as save_pretrained writes it; its weights need not be there",
            ) from error
        if size > MAX_JSON_BYTES:
            raise FormatError(f"has {size:,} bytes, more than any configuration", where=where)
        return parse_model_config(source.read(CONFIG, 0, size), where=where)
