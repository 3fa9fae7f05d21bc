"""Records of all ranks become one index, and contradictions between them are found."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    UnsafePathError,
)
from ckptkit.core.manifest import TRAINING, Manifest
from ckptkit.runs.step_manifests import Findings, read_findings
from ckptkit.writer.merge import MergedUnit, Merger, with_findings
from ckptkit.writer.record import WrittenFile, parse_record, record_bytes

Document = dict[str, Any]


def record(rank: int, ranks: int = 2) -> Document:
    """Returns what a rank says that has rows of a matrix; rank 0 has a scalar and an object."""
    tensors: list[Any] = [
        {"path": ["m", "w"], "dtype": "float32", "shape": [2 * ranks, 3], "aliases": [["m", "t"]]}
    ]
    chunks: list[Any] = [[0, [2 * rank, 0], [2, 3], 0, 0, 100]]
    objects: list[Any] = []
    if rank == 0:
        tensors.append({"path": ["step"], "dtype": "int64", "shape": [], "aliases": []})
        chunks.append([1, [], [], 0, 100, 50])
        objects.append([["lr", 0], 0, 150, 20])
    unit = {
        "tensors": tensors,
        "chunks": chunks,
        "objects": objects,
        "data_files": [f"__{rank}_0.distcp"],
        "expected": [["step"]] if rank else [],
    }
    head = {"rank": rank, "world_size": ranks, "attempt": "a", "step": 1}
    replicas = {"replicas": [["", ["m", "b"], [0]]], "replica_sums": [7]}
    return {**head, "units": {"": unit}, **replicas}


def merged(*documents: Document) -> MergedUnit:
    merger = Merger(len(documents))
    for number, document in enumerate(documents):
        files = [WrittenFile(f"__{number}_0.distcp", 200, None)]
        data = record_bytes(document, files)
        merger.add(parse_record(data, where=f"{number}.json"), where=f"{number}.json")
    return merger.result().units[""]


def test_chunks_of_all_ranks_are_put_together_and_ties_point_to_the_same() -> None:
    unit = merged(record(0), record(1))
    by_key = {tensor.key: tensor for tensor in unit.tensors}
    assert list(by_key) == ["m.w", "m.t", "step"]
    expected = [
        ((0, 0), (2, 3), "__0_0.distcp", 0, 100),
        ((2, 0), (2, 3), "__1_0.distcp", 0, 100),
    ]
    assert list(by_key["m.w"].places) == list(by_key["m.t"].places) == expected
    assert list(by_key["step"].places) == [((), (), "__0_0.distcp", 100, 50)]
    assert by_key["m.w"].shape == (4, 3)
    (stored,) = unit.objects
    assert (stored.key, stored.path, stored.start) == ("lr.0", ("lr", 0), 150)


def test_empty_chunks_and_tensors_without_elements_do_not_matter() -> None:
    first, second = record(0), record(1)
    for document in (first, second):
        unit = document["units"][""]
        unit["tensors"].append({"path": ["e"], "dtype": "int8", "shape": [0, 2], "aliases": []})
        unit["chunks"].append([len(unit["tensors"]) - 1, [0, 0], [0, 2], 0, 170, 10])
        unit["chunks"].append([0, [4, 0], [0, 3], 0, 180, 10])
    tensors = {tensor.key: tensor for tensor in merged(first, second).tensors}
    assert len(tensors["e"].places) == 2


def edited(rank: int, edit: Callable[[Document], object]) -> list[Document]:
    documents = [record(0), record(1)]
    edit(documents[rank]["units"][""])
    return documents


@pytest.mark.parametrize(
    ("edit", "kind", "said"),
    [
        (lambda u: u["tensors"][0].update(dtype="float16"), FormatError, "another rank wrote"),
        (lambda u: u["tensors"][0].update(shape=[4, 4]), FormatError, "another rank wrote"),
        (lambda u: u["chunks"][0].__setitem__(1, [0, 0]), FormatError, "some chunks overlap"),
        (lambda u: u["chunks"][0].__setitem__(1, [3, 0]), FormatError, "outside of the shape"),
        (lambda u: u["chunks"][0].__setitem__(1, [3]), FormatError, "dimensions"),
        (lambda u: u["chunks"][0].__setitem__(5, 201), FormatError, "outside of"),
        (lambda u: u["chunks"][0].__setitem__(4, -1), FormatError, "outside of"),
        (lambda u: u["chunks"].clear(), IncompleteCheckpointError, "6 of 12"),
        (lambda u: u["objects"].append([["lr", 0], 0, 0, 1]), FormatError, "to both"),
        (lambda u: u["objects"].append([["m", "w"], 0, 0, 1]), FormatError, "two values"),
        (lambda u: u["objects"].append([["x"], 0, 0, 999]), FormatError, "outside of"),
        (lambda u: u["expected"].append(["gone"]), IncompleteCheckpointError, "no rank wrote"),
        (lambda u: u["tensors"][0].update(aliases=[["step"]]), FormatError, "two values"),
        (lambda u: u.update(data_files=["other.distcp"]), FormatError, "not among"),
        (lambda u: u.update(data_files=["../x"]), UnsafePathError, "inside"),
    ],
)
def test_contradictions_are_found(
    edit: Callable[[Document], object], kind: type[CkptkitError], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        merged(*edited(1, edit))
    assert caught.value.where
    assert caught.value.hint
    of_parts = said in {"another rank wrote", "some chunks overlap", "no rank wrote"}
    assert ("different parts of a model" in caught.value.hint) == of_parts


GARBAGE: list[Any] = [None, 1, 1.5, -1, 2**70, "text", [], [[]], {}, {"path": 1}, True, [None] * 6]


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
def test_garbled_records_are_refused_as_such(garbage: Any) -> None:
    """Every value of a record, one after another, is replaced."""
    places = list(walk(record(0)))
    assert len(places) > 40
    for place in places:
        document = copy.deepcopy(record(0))
        holder: Any = document
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = garbage
        try:
            merged(document, record(1))
        except CkptkitError as error:
            assert error.where, place  # noqa: PT017  not every replacement is wrong


def walk(value: Any, path: tuple[Any, ...] = ()) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from walk(item, (*path, key))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"rank": true}', b'{"rank": 0}']
)
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="not a rank's record"):
        parse_record(data, where="0.json")


@pytest.mark.parametrize("field", ["unit", "file"])
def test_paths_that_lead_out_of_the_folder_are_refused(field: str) -> None:
    document = record(0)
    if field == "unit":
        document["units"] = {"../x": document["units"][""]}
    files = [WrittenFile("/x" if field == "file" else "x", 1, None)]
    with pytest.raises(UnsafePathError):
        parse_record(record_bytes(document, files), where="0.json")


def test_a_rank_of_another_world_is_refused() -> None:
    merger = Merger(3)
    data = json.dumps(record(0) | {"files": []}).encode()
    with pytest.raises(FormatError, match="found one of 2"):
        merger.add(parse_record(data, where="0.json"), where="0.json")


@pytest.mark.parametrize(
    ("values", "missed"),
    [
        ([["a"], ["a", "b"]], {"b": 1}),
        ([["a", "b"], []], {}),
        ([[], ["a"], ["a", "b"]], {"a": 1, "b": 2}),
        ([["a"], ["a"]], {}),
    ],
)
def test_values_that_rank_0_lacks_are_missed(
    values: list[list[str]], missed: dict[str, int]
) -> None:
    merger = Merger(len(values))
    for rank, names in reversed(list(enumerate(values))):
        document = record(rank, len(values)) | {"values": names}
        data = record_bytes(document, [WrittenFile(f"__{rank}_0.distcp", 200, None)])
        merger.add(parse_record(data, where="x"), where="x")
    found = {name: reason.split()[1] for name, reason in merger.result().lost.items()}
    assert found == {name: str(rank) for name, rank in missed.items()}


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        ([7, 7, 7], ""),
        ([7, 7, 8], "ranks 0 and 2 held different values of m.b (1 of 4 compared tensors"),
        ([9, 7, 8], "ranks 0 and 1 held different values of m.b"),
    ],
)
def test_replicas_that_differ_are_mentioned(sums: list[int], said: str) -> None:
    merger = Merger(3)
    for rank, crc in reversed(list(enumerate(sums))):
        document = record(rank, 3)
        document["replicas"].append(["", ["m", "c"], [2 * rank]])  # which no other rank has
        document["replica_sums"] = [crc, rank]
        data = record_bytes(document, [WrittenFile(f"__{rank}_0.distcp", 200, None)])
        merger.add(parse_record(data, where="x"), where="x")
    notes = merger.result().notes
    assert len(notes) == bool(said)
    assert said in "".join(notes)
    source = with_findings({"step": 3}, {}, notes)
    assert source.keys() == ({"step", "notes"} if said else {"step"})
    assert read_findings(manifest_of(json.loads(json.dumps(source)))) == Findings({}, notes)


def manifest_of(source: Document) -> Manifest:
    return Manifest(kind=TRAINING, source=source, options={}, versions={}, tensors={})


@pytest.mark.parametrize("notes", ["text", 7, {"a": "b"}, None, [["deep"]] * 10**5])
def test_notes_of_a_hostile_manifest_are_few_texts_or_none(notes: Any) -> None:
    found = read_findings(manifest_of({"notes": notes})).notes
    assert found == (("['deep']",) * 20 if isinstance(notes, list) else ())
