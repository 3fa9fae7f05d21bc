"""An output is kept apart from what is read, however the two places are written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.core.errors import CkptkitError, RefusedError
from ckptkit.storage.places import Place
from tests.object_store import KEY, SECRET, Bucket, ObjectStore

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
STEP = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"


@pytest.fixture
def bucket(object_store: ObjectStore) -> Bucket:
    bucket = object_store.bucket("overlapping")
    bucket.clear()
    bucket.put_tree(STEP, "p/run/checkpoint-4")
    return bucket


def written_otherwise(bucket: Bucket) -> list[dict[str, Any]]:
    """Returns options that mean the endpoint of the test's store, none like another."""
    url, region = bucket.store.endpoint, {"region_name": "us-east-1"}
    by_name = url.replace("127.0.0.1", "localhost")
    secrets = {"key": KEY, "secret": SECRET}
    return [
        {**secrets, "client_kwargs": {"endpoint_url": f"{url}/", **region}},
        {**secrets, "client_kwargs": {"endpoint_url": by_name.upper().replace("HTTP", "http")}},
        {**secrets, "endpoint_url": url, "client_kwargs": region},
        {**secrets, "client_kwargs": {"endpoint_url": by_name, **region}},
        secrets,  # and the endpoint comes from the environment
    ]


@pytest.mark.parametrize(
    ("how", "protocol"),
    [
        pytest.param(0, "s3", marks=pytest.mark.slow),
        (1, "s3"),
        pytest.param(2, "s3a", marks=pytest.mark.slow),
        (3, "s3a"),
        pytest.param(4, "s3", marks=pytest.mark.slow),
    ],
)
def test_an_output_around_its_source_is_refused(
    bucket: Bucket, how: int, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.store.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    before = bucket.keys()
    source = Place(f"{bucket.url}/p/run/checkpoint-4", bucket.store.options)
    for prefix in ("p", "p/run", "p/run/checkpoint-4", "p/run/checkpoint-4/new"):
        out = Place(f"{protocol}://{bucket.name}/{prefix}/", written_otherwise(bucket)[how])
        with pytest.raises(RefusedError, match=r"(is|be) inside the"):
            ckptkit.consolidate(source, out, overwrite=True)
    with pytest.raises(CkptkitError):
        ckptkit.consolidate(source, f"{bucket.url}/p")
    assert bucket.keys() == before


def test_so_is_one_around_a_base_or_a_further_source(bucket: Bucket) -> None:
    otherwise = written_otherwise(bucket)[0]
    source = Place(f"{bucket.url}/p/run/checkpoint-4", bucket.store.options)
    bucket.put_tree(STEP, "q/model")
    before = bucket.keys()
    with pytest.raises(RefusedError, match="the base is inside the output"):
        ckptkit.consolidate(
            source,
            Place(f"{bucket.url}/q", otherwise),
            base=Place(f"{bucket.url}/q/model", bucket.store.options),
            overwrite=True,
        )
    with pytest.raises(RefusedError, match="the source is inside the output"):
        ckptkit.consolidate(
            source,
            Place(f"{bucket.url}/q", otherwise),
            also=[Place(f"{bucket.url}/q/model", bucket.store.options)],
            overwrite=True,
        )
    assert bucket.keys() == before


def test_a_further_source_that_is_the_source_or_another_one_is_opened_once(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.store.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    source = Place(f"{bucket.url}/p/run/checkpoint-4", bucket.store.options)
    ways = written_otherwise(bucket)
    also = [
        Place(f"{kind}://{bucket.name}/p/run/checkpoint-4{end}", options)
        for kind, end, options in zip(("s3a", "s3") * 3, ("/", "", "//") * 2, ways, strict=False)
    ]
    with open_checkpoint(source, also=also) as found:
        assert [one.location for one in found.source.folders] == [source.location]
    node = tmp_path / "node"
    shutil.copytree(STEP, node)
    bucket.put_tree(STEP, "p/other/checkpoint-4")
    other = Place(f"{bucket.url}/p/other/checkpoint-4", bucket.store.options)
    also += [Place(one) for one in (node, f"file://{node}", f"local://{node}/")]
    also += [other.beside(f"s3a{other[2:]}"), other]
    with open_checkpoint(source, also=also) as found:
        assert len(found.source.folders) == 3


@pytest.mark.parametrize("written", ["file://{}", "FILE://localhost{}", "local://{}", "link"])
def test_so_is_a_local_one(tmp_path: Path, written: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(STEP, run / "checkpoint-4")
    link = tmp_path / "link"
    link.symlink_to(run)
    out = str(link) if written == "link" else written.format(run)
    for one in (out, f"{out}/checkpoint-4/new"):
        with pytest.raises(RefusedError, match=r"(is|be) inside the"):
            ckptkit.consolidate(run / "checkpoint-4", one, overwrite=True)
    assert (run / "checkpoint-4").is_dir()
