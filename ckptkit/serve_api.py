"""The function that users call to serve a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ckptkit.api import SourceOptions
from ckptkit.core.arguments import check_arguments
from ckptkit.options import DTypeLike, GenerationChoice, OutputDType, TokenizerOrigin
from ckptkit.storage.locations import resolve_places

if TYPE_CHECKING:
    from ckptkit.serving.serving import ServeListener, Serving
    from ckptkit.storage.places import PathLike


class ServeOptions(SourceOptions, total=False):
    """The options of `serve` that decide what is served; see `Options` and `MergeOptions`.

    Attributes:
        memory_budget: What the buffers of all clients may take together; 96 MB by default.
    """

    config: PathLike | None
    tokenizer: PathLike | None
    generation_config: GenerationChoice
    tokenizer_from: TokenizerOrigin
    dtype: OutputDType | DTypeLike
    also: Sequence[PathLike]
    like: PathLike | None
    max_shard_size: int | str
    allow_code: bool
    adapters: Sequence[str | tuple[str, float]]
    further: Sequence[PathLike | tuple[PathLike, float]]
    adapter_config: PathLike | None
    overrides: Mapping[str, Any]
    allow_untrained: bool
    allow_other_base: bool
    match_peft: bool
    qlora_base: str | None
    double_quant: bool | None


@check_arguments
def serve(
    src: PathLike,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    name: str | None = None,
    auth: bool | tuple[str, str] = True,
    follow: bool = False,
    listener: ServeListener | None = None,
    **options: Unpack[ServeOptions],
) -> Serving:
    """Serves the model of a checkpoint as objects of S3, without writing it.

    The objects are the files that `consolidate` writes, or `merge_adapter` where `src` is an
    adapter or holds one. They are made when they are read, and only proven bytes are sent.

    Args:
        src: Any path in or above a checkpoint, or an adapter.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        name: The prefix of all keys; by default the name of `src`.
        auth: The access key and the secret key that requests are signed with; True makes random
            ones. False takes requests without a signature, at an address of this machine only.
        follow: Whether `src` is a run whose newest step is served, and each newer one later.
        listener: Receives events, from several threads.
        **options: See `ServeOptions`.

    Returns:
        The server, which runs until it is closed; use it as a context manager. Its `environment`
        has the variables by which clients of S3 find it.

    Raises:
        InputError: If the source is damaged or incomplete.
        RefusedError: If the request cannot be met, or the extra `serve` is not installed.
        OutputError: If the port is taken.
    """
    from ckptkit.serving.plans import ServePlan, refuse_missing_libraries

    refuse_missing_libraries()
    from ckptkit.serving.server import ServeRequest, choose_keys
    from ckptkit.serving.serving import Serving

    given = auth if isinstance(auth, tuple) else (None, None)
    keys = choose_keys(host, port, *given, auth=auth is not False)
    plan = ServePlan.from_options(resolve_places(src, None, options))
    request = ServeRequest(plan, host, port, keys, name=name, follow=follow)
    return Serving(request, listener)
