"""A botocore client for what `ckptkit serve` serves, and what makes such clients start fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from botocore.config import Config
from botocore.loaders import JSONFileLoader, Loader
from botocore.session import Session


def client_of(environment: Mapping[str, str], **config: Any) -> Any:
    """Returns a client that reports every error at once."""
    import boto3  # not there with the lowest versions, which other tests are run with

    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
        config=Config(retries={"max_attempts": 0}, **config),
    )


def keep_parsed(replace: Callable[[type, str, object], None]) -> None:
    """Keeps what botocore reads of its own files; else each new client parses megabytes again."""
    load, list_services = JSONFileLoader.load_file, Loader.list_available_services
    kept: dict[Any, Any] = {}

    def load_once(loader: JSONFileLoader, path: str) -> Any:
        if path not in kept:
            kept[path] = load(loader, path)
        return kept[path]

    def list_once(loader: Loader, kind: str) -> Any:
        key = (*loader.search_paths, kind)
        if key not in kept:
            kept[key] = list_services(loader, kind)
        return kept[key]

    replace(JSONFileLoader, "load_file", load_once)
    replace(Loader, "list_available_services", list_once)


def prepare_clients() -> None:
    """Reads what clients need, for processes that are forked from this one."""
    keep_parsed(setattr)
    keys = {"aws_access_key_id": "-", "aws_secret_access_key": "-"}
    Session().create_client("s3", region_name="us-east-1", **keys)
