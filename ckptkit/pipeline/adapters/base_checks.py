"""Whether a given base is the one that each adapter was trained on, by all that can be known."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack

from ckptkit.adapters.dialects import plain_name
from ckptkit.adapters.layers import table_of
from ckptkit.core.errors import RefusedError
from ckptkit.pipeline.adapters.base_records import (
    Quantization,
    WeightDigest,
    read_digests,
    read_record_of_base,
)
from ckptkit.pipeline.adapters.dequantizing import QloraBase, QuantizedBase, Weights
from ckptkit.pipeline.adapters.merge_base import BaseSource, weights_as_they_are
from ckptkit.pipeline.adapters.merge_facts import SourceAdapter
from ckptkit.pipeline.adapters.merge_identity import (
    check_identity,
    differing_weights,
    listed,
    recorded_base,
    recorded_weights,
    refuse_other_base,
)

_SAMPLE = 1 << 16  # elements of each weight: two models differ nearly everywhere


def refuse_rewritten_bases(adapters: Sequence[SourceAdapter], given: BaseSource | None) -> None:
    """Refuses adapters that were trained on a base which PEFT had written into.

    Raises:
        RefusedError: If one is to be merged onto another base than its checkpoint's own.
    """
    own = given is None and len(adapters) == 1
    for adapter in adapters:
        settings = adapter.found.adapter.settings
        if settings.changes_base and not own:
            raise RefusedError(
                f"the adapter was started with {settings.init_lora_weights!r}, which writes"
                " into the base: merged onto another it gives another model",
                where=adapter.source.where,
                hint="merge the checkpoint of the run itself, without --base, if it holds the"
                " base; or let PEFT save the adapter with"
                " path_initial_model_for_weight_conversion",
            )


class BaseChecks:
    """Compares the base that was given with what is known of the one trained on."""

    def __init__(
        self,
        stack: ExitStack,
        adapters: Sequence[SourceAdapter],
        given: BaseSource | None,
        *,
        allowed: bool,
    ) -> None:
        """Takes what was opened.

        Args:
            stack: Closes further bases, which are opened to be compared.
            adapters: The adapters, in the order of merging.
            given: The base that was given, or None.
            allowed: Whether another base is taken all the same.
        """
        self._stack = stack
        self._adapters = adapters
        self._given = given
        self._allowed = allowed
        self._notes: list[str] = []
        self._is_onto_originals = False
        self._unproven: dict[int, list[str]] = {}  # by position of the adapter

    def notes(self, quantized: QuantizedBase) -> list[str]:
        """Returns what the user should know, what packed weights tell included."""
        texts = () if quantized.is_proven else self._unproven.values()
        unproven = [text for some in texts for text in some]
        told = () if self._is_onto_originals else quantized.notes  # which saw no packed weight
        return [*self._notes, *unproven, *told]

    def check_identity(self) -> None:
        """Compares names, commits, and the folders that are recorded.

        Raises:
            RefusedError: If it is another base, and that is not allowed.
        """
        if self._given is None:
            return
        for adapter in self._adapters:
            where = adapter.source.where
            expected = recorded_base(adapter.found.adapter.settings, adapter.found.opened)
            judgement = check_identity(expected, self._given, where=where, allowed=self._allowed)
            recorded = recorded_weights(self._stack, expected, self._given)
            if recorded is None or not self._compare(
                weights_as_they_are(recorded),
                weights_as_they_are(self._given),
                adapter,
                most=_SAMPLE,
            ):
                self._unproven[adapter.source.position] = list(judgement.notes)
            self._notes += [
                f"another base is merged onto: {text}" for text in judgement.contradictions
            ]

    def compare(
        self,
        given: Weights,
        trained: Weights | None,
        quantized: QuantizedBase,
        choice: QloraBase | None,
    ) -> None:
        """Compares the given base with what checkpoints hold, or record, of theirs.

        Args:
            given: The base that was given, by the names of the live model.
            trained: What the first adapter's checkpoint holds of the base, or None.
            quantized: The packed weights on both sides.
            choice: What an adapter of a packed base is to be merged onto, None where nobody said.

        Raises:
            InputError: If a source cannot be read.
            RefusedError: If it is another base, and that is not allowed; or if an adapter of a
                packed base would be merged onto another that is not packed.
        """
        if trained is not None:
            hidden = {*quantized.hidden, *self._trained_biases()}
            if self._compare(trained, given, self._adapters[0], hidden=hidden):
                self._unproven.clear()
        for adapter in self._adapters:
            if adapter.found.base:
                continue
            record = read_record_of_base(adapter.found.opened)
            if record.quantization is not None and not quantized.operands:
                self._check_packing(record.quantization, adapter, choice)
            digests = {n: d for n, d in record.digests.items() if n not in quantized.hidden}
            if digests:
                tells_all = quantized.is_proven or not quantized.operands
                self._check_digests(digests, given, adapter, tells_all=tells_all)

    def _check_packing(
        self, told: Quantization, adapter: SourceAdapter, choice: QloraBase | None
    ) -> None:
        """Refuses to merge onto weights that are not those trained on, unless it is asked for."""
        kinds = ", ".join(told.kinds)
        if choice == "original":
            self._is_onto_originals = True
            self._notes.append(
                f"the adapter was trained on packed weights ({kinds}) and is merged onto their"
                " originals, as was asked for: not quite the function that was trained"
            )
            return
        way = (
            f"merge from the checkpoint itself ({told.checkpoint}), which holds them"
            if told.weights
            else "pass the base as it was saved packed"
        )
        count = f"{told.weights:,} " if told.weights else ""
        raise RefusedError(
            f"the adapter was trained on {count}packed weights ({kinds}), and those of --base are"
            " not what they stand for",
            where=adapter.source.where,
            hint=f"{way}; or pass --qlora-base original to merge onto the weights as they were"
            " before",
        )

    def _check_digests(
        self,
        digests: Mapping[str, WeightDigest],
        given: Weights,
        adapter: SourceAdapter,
        *,
        tells_all: bool,
    ) -> None:
        """Compares the bytes of a few weights with the checksums that were recorded."""
        comparable = {
            name: entry
            for name, one in digests.items()
            if (entry := given.entries.get(name)) is not None
            and (entry.dtype.name, entry.shape) == (one.dtype, one.shape)
        }
        if not comparable:
            self._unproven.setdefault(adapter.source.position, []).append(_incomparable(digests))
            return
        found = read_digests(given.origin, comparable)
        differing = [name for name, one in found.items() if one != digests[name]]
        if not differing:
            self._unproven.pop(adapter.source.position, None)
            what = "the base" if tells_all else "what was not packed of the base"
            self._notes.append(
                f"{what} is the one that the adapter was trained on, proven by {len(found):,} of"
                " its weights"
            )
            return
        self._refuse_or_tell(
            f"{len(differing):,} of {len(found):,} weights have other checksums than those"
            f" recorded in training: {listed(differing)}",
            given,
            adapter,
        )

    def _trained_biases(self) -> Iterator[str]:
        """Yields what lies with the frozen weights and was trained all the same."""
        for adapter in self._adapters:
            for name in table_of(adapter.found.adapter.tensors).whole:
                if name.endswith(".bias"):
                    yield plain_name(name)

    def _compare(
        self,
        trained: Weights,
        given: Weights,
        adapter: SourceAdapter,
        *,
        hidden: Collection[str] = (),
        most: int | None = None,
    ) -> bool:
        """Refuses a given base whose weights are not those trained on; True where they agree."""
        differing, count = differing_weights(trained, given, hidden, most=most)
        if not differing:
            return count > 0
        self._refuse_or_tell(
            f"{len(differing):,} of {count:,} weights differ from those in {trained.location}:"
            f" {listed(differing)}",
            given,
            adapter,
        )
        return False

    def _refuse_or_tell(self, text: str, given: Weights, adapter: SourceAdapter) -> None:
        where = adapter.source.where
        refuse_other_base([text], given.location, where=where, allowed=self._allowed)
        self._notes.append(f"another base is merged onto: {text}")


def _incomparable(digests: Mapping[str, WeightDigest]) -> str:
    dtypes = ", ".join(sorted({one.dtype for one in digests.values()}))
    return (
        f"the checksums that are recorded of the base are those of {dtypes} weights, and prove"
        " nothing of a base of other element types or shapes"
    )
