"""A client of another make than ours, for what `ckptkit serve` serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import boto3
from botocore.config import Config


def client_of(environment: Mapping[str, str], **config: Any) -> Any:
    """Returns a client that reports every error at once.

    Args:
        environment: What a server shows: its address and its keys.
        config: Further options of botocore.
    """
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
        config=Config(retries={"max_attempts": 0}, **config),
    )
