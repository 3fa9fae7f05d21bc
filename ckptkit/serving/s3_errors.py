"""Errors as S3 reports them, and the XML of answers.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

_STATUS = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "AuthorizationQueryParametersError": 400,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "InvalidURI": 400,
    "MethodNotAllowed": 405,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NotImplemented": 501,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
}
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class S3Error(Exception):
    """A refused request.

    Attributes:
        code: As S3 names it.
        status: The HTTP status.
        message: A sentence.
        facts: Further elements of the answer.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        code: str,
        message: str,
        facts: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.status = _STATUS[code]
        self.message = message
        self.facts = dict(facts or {})
        self.headers = dict(headers or {})


Tree = str | Sequence["tuple[str, Tree]"]
"""The content of an element: a text, or elements with their names."""


def make_xml(name: str, content: Tree, *, named: bool = True) -> bytes:
    """Returns a document; `named` says whether it has the namespace of S3, which errors lack."""
    root = Element(name, {"xmlns": _NAMESPACE} if named else {})
    _put(root, content)
    data: bytes = tostring(root, encoding="utf-8", xml_declaration=True)
    return data


def _put(element: Element, content: Tree) -> None:
    if isinstance(content, str):
        # Other characters cannot be written in XML 1.0; clients ask for encoded keys instead.
        element.text = _NOT_IN_XML.sub("\ufffd", content)
        return
    for name, inner in content:
        _put(SubElement(element, name), inner)
