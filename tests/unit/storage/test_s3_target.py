"""Notes as objects: the first of a name stays, however the store knows that it is there."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import pytest

from ckptkit.core.errors import OutputError
from ckptkit.storage.remote.s3_target import S3Notes


class Store:
    """A bucket that takes notice of the condition in some requests only."""

    def __init__(self, knows: str) -> None:
        self.objects: dict[str, bytes] = {}
        self._knows = knows

    def path(self, key: str) -> str:
        return f"bucket/{key}"

    def url(self, key: str) -> str:
        return f"s3://bucket/{key}"

    def get(self, path: str) -> bytes:
        try:
            return self.objects[path.removeprefix("bucket/")]
        except KeyError:
            raise FileNotFoundError(path) from None

    def put(self, key: str, data: bytes, _crc32: int) -> None:
        self.objects[key] = data

    def put_new(self, key: str, data: bytes, _crc32: int, *, in_parts: bool) -> bool:
        if in_parts and self._knows == "refuses":
            raise OSError("not implemented")
        if key in self.objects and self._knows == ("parts" if in_parts else "put"):
            return False
        self.objects[key] = data
        return True

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            del self.objects[key]


def notes_of(store: Store) -> S3Notes:
    return S3Notes(cast("Any", store), "out/.work/", nullcontext)


@pytest.mark.parametrize("knows", ["put", "parts"])
def test_the_first_note_of_a_name_stays(knows: str) -> None:
    store = Store(knows)
    notes = notes_of(store)
    assert notes.get("plan") is None
    assert notes.put("plan", b"first") == b"first"
    assert notes_of(store).put("plan", b"second") == b"first"
    assert store.objects == {"out/.work/plan": b"first"}


@pytest.mark.parametrize("knows", ["put", "parts"])
def test_one_alone_may_go_on_and_may_ask_again(knows: str) -> None:
    notes = notes_of(Store(knows))
    for owner, may in (("3", True), ("5", False), ("3", True)):
        with notes.alone("commit", owner) as alone:
            assert alone == may


@pytest.mark.parametrize("knows", ["nothing", "refuses"])
def test_a_store_that_knows_no_condition_takes_no_notes(knows: str) -> None:
    store = Store(knows)
    notes = notes_of(store)
    assert "only if there is none" in notes.why_no_conditions()
    with pytest.raises(OutputError):
        notes.put("plan", b"first")
    assert store.objects == {}
