"""What `--dtype base`, `--vocab-size` and `--like` make of the tensors that will be written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.kernels.respecified import first_rows, recast
from ckptkit.layouts.hf_weights import layout_hf_files
from ckptkit.pipeline.model_folders import dtypes_in, file_map_of
from ckptkit.planning.like import distribute
from ckptkit.planning.plan import OutputFile, Product
from ckptkit.planning.requests import ConsolidateRequest, matches
from ckptkit.planning.selection import DTypePolicy, refuse_casting_quantized
from ckptkit.planning.vocabulary import (
    Trim,
    plan_trim,
    refuse_cut_tokenizer,
    tokens_in,
    trimmed_config,
)

_LISTED = 3


class Shaping:
    """Shapes an output after model folders that were named beside its source.

    All of it looks at the names that are written, which may be others than those at the source.

    Attributes:
        notes: What the user should know, as far as it came up.
    """

    def __init__(self, request: ConsolidateRequest, base: str | None, location: str) -> None:
        """Reads the headers of the folders.

        Args:
            request: What was asked for.
            base: The base model's folder, or None.
            location: The source, for messages.

        Raises:
            InputError: If a folder holds no model, or a damaged one.
        """
        self.notes: list[str] = []
        self._request = request
        self._base = base
        self._location = location
        self._trim: Trim | None = None
        self._tokens = 0
        wanted = request.dtype == "base" and base is not None
        self._dtypes = dtypes_in(str(base), option="--base") if wanted else None
        like = request.like
        self._files = None if like is None else file_map_of(like, option="--like")

    @property
    def before_names(self) -> ConsolidateRequest:
        """The request as far as it is met before tensors get the names that are written."""
        request = self._request
        return replace(request, dtype="keep") if request.dtype == "base" else request

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the manifest says of the folders that shaped the output."""
        return {} if self._dtypes is None else {"base": self._base}

    def check_casts(self, entries: Sequence[TensorEntry], config: Mapping[str, Any] | None) -> None:
        """Refuses to cast packed numbers as if they were weights.

        Raises:
            RefusedError: If the request would do that.
        """
        refuse_casting_quantized(
            entries, self._request, config, location=self._location, base=self._dtypes
        )

    def regard(self, tokenizer: Mapping[str, Any] | None) -> None:
        """Takes note of the tokenizer that is written beside, whose tokens have to keep rows."""
        self._tokens = 0 if tokenizer is None else tokens_in(tokenizer)

    def products(
        self, products: Sequence[Product], config: Mapping[str, Any] | None
    ) -> Sequence[Product]:
        """Returns the tensors with the rows and in the element types that were asked for.

        Raises:
            RefusedError: If the request cannot be met.
        """
        if self._request.vocab_size is not None:
            products = self._trimmed(products, self._request.vocab_size, config)
        return self._recast(products) if self._request.dtype == "base" else products

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns the model's configuration with the number of tokens that is written."""
        return config if self._trim is None else trimmed_config(config, self._trim)

    def files(self, products: Sequence[Product], tied: Collection[Fqn]) -> list[OutputFile] | None:
        """Returns the weight files as another model has them, or None where none was named.

        Args:
            products: What is to be written.
            tied: Names that are not written because another tensor holds their bytes.

        Raises:
            RefusedError: If the output would lack a tensor that the other model has.
        """
        if self._files is None:
            return None
        found = distribute(products, self._files, is_wanted=self._request.wants, tied=tied)
        self.notes += found.notes
        return layout_hf_files(found.groups)

    def _trimmed(
        self, products: Sequence[Product], size: int, config: Mapping[str, Any] | None
    ) -> list[Product]:
        specs = [product.spec for product in products]
        self._trim = trim = plan_trim(specs, size, config, location=self._location)
        refuse_cut_tokenizer(trim, self._tokens, location=self._location)
        if trim.rows == size:
            self.notes.append(f"embeddings and heads have {size:,} rows already: none was cut")
        else:
            listed = ", ".join(sorted(map(repr, trim.names)))
            self.notes.append(f"the rows {size:,} to {trim.rows - 1:,} were cut from {listed}")
        return [first_rows(product, trim.shape(product.spec)) for product in products]

    def _recast(self, products: Sequence[Product]) -> list[Product]:
        policy = DTypePolicy("base", self._request.keep_dtype, self._dtypes)
        made = [recast(product, policy.target(product.spec)) for product in products]
        lacking = [
            product.spec.name
            for product in products
            if product.spec.dtype.kind == "float"
            and product.spec.name not in (self._dtypes or {})
            and not matches(product.spec.name, self._request.keep_dtype)
        ]
        if lacking and len(lacking) == len(products):
            raise RefusedError(
                f"has none of the {len(products):,} tensors that are to be written, such as"
                f" {lacking[0]!r}",
                where=f"--base {self._base}",
                hint="name the folder of the model that the run was started from",
            )
        if lacking:
            listed = ", ".join(map(repr, lacking[:_LISTED]))
            more = f" and {len(lacking) - _LISTED:,} more" if len(lacking) > _LISTED else ""
            self.notes.append(
                f"{self._base} has no tensor {listed}{more}: written in the element type that the"
                " source has"
            )
        return made
