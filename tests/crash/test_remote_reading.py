"""A store that fails, lags, lies and changes while a checkpoint is read from it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import ckptkit
from ckptkit.core.errors import (
    AccessError,
    MissingFileError,
    NotACheckpointError,
    SourceChangedError,
    StorageError,
    UsageError,
)
from ckptkit.storage.places import Place
from tests.object_store import KEY, SECRET, Bucket, Fault, ObjectStore

pytestmark = pytest.mark.usefixtures("impatient")
CASE = "accelerate_fsdp2_tied_with_config/checkpoint"
SHARD = "pytorch_model_fsdp_0/__0_0.distcp"


@pytest.fixture
def bucket(object_store: ObjectStore, real_checkpoints: Path) -> Bucket:
    bucket = object_store.bucket("troubles")
    bucket.clear()
    bucket.put_tree(real_checkpoints / CASE, "run/checkpoint-7")
    return bucket


@pytest.fixture
def place(bucket: Bucket) -> Place:
    return bucket.place("run/checkpoint-7")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def expected(real_checkpoints: Path, tmp_path: Path) -> dict[str, bytes]:
    ckptkit.consolidate(real_checkpoints / CASE, tmp_path / "local")
    return _weights(tmp_path / "local")


def _weights(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "ckptkit.json"}


@pytest.mark.parametrize("status", [500, 503, 429])
@pytest.mark.quick("503")
def test_a_store_that_fails_now_and_then_makes_no_difference(
    place: Place, bucket: Bucket, out: Path, expected: dict[str, bytes], status: int
) -> None:
    faults = [
        bucket.store.proxy.fail(pattern, status, "SlowDown", times=3)
        for pattern in ("list-type", r"GET .*\.distcp", r"GET .*metadata")
    ]
    bucket.store.proxy.slow(r"GET .*\.distcp", 0.05, times=4)
    ckptkit.consolidate(place, out)
    assert _weights(out) == expected
    assert [fault.met for fault in faults] == [3, 3, 3]


def test_answers_that_end_early_are_asked_for_again(
    place: Place, bucket: Bucket, out: Path, expected: dict[str, bytes]
) -> None:
    faults = [bucket.store.proxy.cut(r"GET .*\.distcp", after, times=2) for after in (0, 700)]
    faults.append(bucket.store.proxy.add(Fault(r"GET .*\.metadata", lose_answer=True)))
    ckptkit.consolidate(place, out)
    assert _weights(out) == expected
    assert all(fault.met for fault in faults)


def test_a_store_that_keeps_failing_is_given_up_on_and_waits_grow(
    place: Place, bucket: Bucket, out: Path, impatient: list[float]
) -> None:
    bucket.store.proxy.fail(r"GET .*__0_0\.distcp", 500, times=None)
    with pytest.raises(StorageError, match=r"distcp: cannot be read after 7 attempts"):
        ckptkit.consolidate(place, out)
    assert not out.exists()
    assert max(impatient) > 8 * min(impatient)


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(
    place: Place, bucket: Bucket, out: Path
) -> None:
    key = f"run/checkpoint-7/{SHARD}"
    data = bucket.get(key)
    changed = bytes([*data[:-1], data[-1] ^ 1])
    fault = Fault(r"GET .*__0_0\.distcp", before=lambda: bucket.put(key, changed))
    bucket.store.proxy.add(fault)
    with pytest.raises(SourceChangedError, match=r"__0_0\.distcp: is no longer the object") as told:
        ckptkit.consolidate(place, out)
    assert fault.met == 1
    assert "run again" in told.value.hint
    assert not out.exists()


def test_an_object_that_is_replaced_after_it_was_read_is_an_error(
    place: Place, bucket: Bucket, out: Path
) -> None:
    key = "run/checkpoint-7/pytorch_model_fsdp_0/.metadata"
    changed = bucket.get(key) + b"."

    def replace() -> None:
        bucket.put(key, changed)

    bucket.store.proxy.add(Fault(r"GET .*__0_0\.distcp", before=replace))
    with pytest.raises(SourceChangedError):
        ckptkit.consolidate(place, out)
    assert not out.exists()


def test_an_object_that_vanishes_while_it_is_read_is_named(
    place: Place, bucket: Bucket, out: Path
) -> None:
    key = f"run/checkpoint-7/{SHARD}"
    bucket.store.proxy.add(Fault(r"GET .*__0_0\.distcp", before=lambda: bucket.delete(key)))
    with pytest.raises(MissingFileError, match=r"__0_0\.distcp: nothing was found there"):
        ckptkit.consolidate(place, out)


@pytest.mark.parametrize(
    "refusal",
    [
        (403, "InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch"),
        (403, "AccessDenied"),
        (400, "ExpiredToken"),
    ],
)
def test_credentials_that_are_wrong_or_expired_are_told_at_once_and_not_shown(
    place: Place,
    bucket: Bucket,
    caplog: pytest.LogCaptureFixture,
    impatient: list[float],
    refusal: tuple[int, str],
) -> None:
    status, code = refusal
    caplog.set_level(logging.DEBUG, logger="ckptkit")
    text = f"{code} for {KEY} with {SECRET}"
    bucket.store.proxy.add(Fault("GET", None, status=status, code=code, message=text))
    with pytest.raises(AccessError) as told:
        ckptkit.inspect(place)
    assert told.value.exit_status == 3
    assert "expired" in told.value.hint
    assert not impatient
    shown = [str(told.value), repr(told.value), told.value.hint, repr(place), caplog.text]
    assert not [one for one in shown if KEY in one or SECRET in one]


def test_credentials_that_expire_in_the_middle_leave_nothing_behind(
    place: Place, bucket: Bucket, out: Path
) -> None:
    bucket.store.proxy.fail(r"GET .*\.distcp", 400, "ExpiredToken", times=None)
    with pytest.raises(AccessError, match=r"distcp: the storage does not let us in"):
        ckptkit.consolidate(place, out)
    assert not out.exists()


def test_what_a_listing_does_not_show_yet_is_found_by_the_manifest(
    bucket: Bucket, tmp_path: Path, real_checkpoints: Path
) -> None:
    ckptkit.consolidate(real_checkpoints / CASE, tmp_path / "out")
    url = bucket.put_tree(tmp_path / "out", "run/model")
    bucket.store.proxy.hide(r"run/model/.*(safetensors|config\.json)")
    place = Place(url, bucket.store.options)
    assert ckptkit.verify(place).ok
    assert ckptkit.inspect(place).format == "safetensors"
    bucket.store.proxy.hide("run/model/")
    assert ckptkit.verify(place).ok
    assert ckptkit.inspect(place).format == "safetensors"


def test_a_file_that_a_listing_does_not_show_yet_is_read_all_the_same(
    place: Place, bucket: Bucket, out: Path, expected: dict[str, bytes]
) -> None:
    bucket.store.proxy.hide(r"__0_0\.distcp")
    ckptkit.consolidate(place, out)
    assert _weights(out) == expected


def test_who_may_list_but_not_ask_for_what_is_absent_reads_all_the_same(
    place: Place, bucket: Bucket, out: Path, expected: dict[str, bytes]
) -> None:
    denied = bucket.store.proxy.fail("HEAD", 403, "AccessDenied", times=None)
    ckptkit.consolidate(place, out)
    assert _weights(out) == expected
    assert denied.met


def test_places_that_are_not_there_are_told_as_such(
    object_store: ObjectStore, place: Place
) -> None:
    with pytest.raises(NotACheckpointError, match="s3://troubles/no/such"):
        ckptkit.inspect(Place("s3://troubles/no/such", object_store.options))
    with pytest.raises(NotACheckpointError, match="s3://no-such-bucket"):
        ckptkit.inspect(Place("s3://no-such-bucket/run", object_store.options))
    with pytest.raises(NotACheckpointError, match="--also s3://troubles/no"):
        ckptkit.inspect(place, also=[Place("s3://troubles/no", object_store.options)])
    with pytest.raises(UsageError, match="nosuch://here"):
        ckptkit.inspect("nosuch://here/run")
    with pytest.raises(UsageError, match="holds a password") as told:
        ckptkit.inspect("s3://me:geheim@bucket/run")
    assert "geheim" not in str(told.value)
    with pytest.raises(UsageError) as told:
        ckptkit.inspect(place.location, src_options={"no_such_option": SECRET})
    assert SECRET not in str(told.value)


def test_a_store_that_cannot_be_reached_is_told_after_a_few_attempts(
    impatient: list[float],
) -> None:
    options = {
        "key": KEY,
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"},
    }
    with pytest.raises(StorageError, match="after 7 attempts") as told:
        ckptkit.inspect(Place("s3://bucket/run", options))
    assert "127.0.0.1" not in str(told.value)
    assert len(impatient) == 6
