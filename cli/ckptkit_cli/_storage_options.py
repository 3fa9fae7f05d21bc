"""What URLs need to be told, and the places that the arguments of a command name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ckptkit.storage.locations import Sources, place_of
from ckptkit.storage.place_options import parse_options

_SRC, _DST = "--src-option", "--dst-option"
_SINGLE = ("base", "like", "adapter_config", "model_config")

SrcOption = Annotated[
    list[str] | None,
    typer.Option(
        _SRC,
        metavar="K=V",
        help="What fsspec is told of the storage that is read, such as key=..., or"
        " client_kwargs.endpoint_url=...; may be repeated. It is used for every URL of the kind"
        " that the first argument is, and shown nowhere.",
        show_default=False,
    ),
]
DstOption = Annotated[
    list[str] | None,
    typer.Option(
        _DST,
        metavar="K=V",
        help="The same of the storage that is written to; may be repeated.",
        show_default=False,
    ),
]


def sources_of(first: str, src_option: list[str] | None) -> Sources:
    """Returns the places that a command reads.

    Args:
        first: The one that it is about.
        src_option: The pairs of `--src-option`.

    Raises:
        UsageError: If an option is no pair, or a password stands in the URL.
    """
    return Sources(first, parse_options(src_option or (), option=_SRC))


def located(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments and options of a command with places for its paths.

    Args:
        given: By their names; what a command does not have is left out.

    Raises:
        UsageError: If an option is no pair, or a password stands in a URL.
    """
    sources = sources_of(given["src"], given["src_option"])
    written = parse_options(given["dst_option"] or (), option=_DST)
    places = {name: sources.optional(given[name]) for name in _SINGLE if name in given}
    return {
        **given,
        **places,
        "src": sources.first,
        "out": place_of(given["out"], written),
        "also": sources.further(given["also"] or ()),
    }
