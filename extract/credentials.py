"""What is a URL, and URLs without the credentials in them, as they are stored, printed and hashed.

A URL is fetched as it was given. Every other use has three rules:

1. The user name and the password are removed.
2. Of the query and the fragment, parameters with the name of a credential are removed, by how the name starts or ends
   (`_FORMS`) or as a whole (`_CREDENTIALS`); parameters that only describe a signature, such as the time at which it
   expires, are removed beside a credential (`_BESIDE`).
3. Everything else stays, so that `?id=1` and `?id=2` remain two images.

Names are compared without case, `-` and `_`. Values are not looked at, as an identifier looks like a token, and a user
could not predict what is stored; but a URL in a value is treated in the same way, as image proxies take signed URLs. A
secret in the path, or in a parameter with another name, is therefore not recognised.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

__all__ = ["is_url", "parameters_without_credentials", "text_without_credentials", "user_info", "without_credentials"]

_FORMS = re.compile(
    r"(xamz|xgoog|oauth|bearer).*"  # X-Amz-Signature, X-Goog-Credential, ...
    r"|.*(token|signature|secret|credentials?|password|passwd|passphrase|session|sessionid|sessid|ticket)"
    r"|.*(access|account|api|app|auth|function|private|secret|shared|subscription)key(id)?"
)
_CREDENTIALS = {
    "jwt", "sas", "sig", "sign", "hmac", "key", "pass", "pwd", "auth", "authorization",
    "googleaccessid", "keypairid",  # Google before X-Goog-*; CloudFront
    "qak",  # Tencent
    "hdnea", "hdntl", "hdnts",  # Akamai
}  # fmt: skip
# A credential, or "" for any -> parameters that are removed beside it.
_BESIDE = {
    "": {
        "expires", "expire", "expiry", "expiration", "exp", "policy", "hashalgorithm",
        "xossdate", "xossexpires", "xosssignatureversion",
        "qsignalgorithm", "qsigntime", "qkeytime", "qheaderlist", "qurlparamlist",
    },
    "sig": {  # Azure
        "sv", "ss", "srt", "sp", "st", "se", "spr", "sr", "si", "sip", "ses", "sdd", "scid", "saoid", "suoid", "skoid",
        "sktid", "skt", "ske", "sks", "skv",
    },
}  # fmt: skip
_CONTAINERS = {"abfs", "abfss", "wasb", "wasbs"}  # protocols with a container in the place of the user name

_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?|arn:.*")  # host and port, or an access point of S3
_SEPARATORS = re.compile("&amp;|[&;]")
# A path of the local disk that was made from a URL has one slash.
_IN_TEXT = re.compile(r"(?:[A-Za-z][A-Za-z0-9+]*://|\b(?:https?|ftp|s3a?|gs|gcs|abfss?|wasbs?):/)[^\s\"<>`]+")


def is_url(text: str) -> bool:
    """Whether the text starts with a protocol, as `s3://bucket/photos` does."""
    protocol, separator, _ = text.partition("://")
    return bool(separator) and protocol.replace("+", "").isalnum()


def without_credentials(url: str) -> str:
    """Return a URL without credentials; any other text, such as a path of the local disk, unchanged.

    >>> without_credentials("https://me:secret@host:8080/cat.jpg?id=7&X-Amz-Date=20260101&X-Amz-Signature=0f3a")
    'https://host:8080/cat.jpg?id=7'
    """
    protocol, separator, location = url.partition("://")
    if not separator or not protocol.replace("+", "").isalnum():
        return url
    end, has_password = user_info(location)
    if has_password or protocol.lower() not in _CONTAINERS:
        location = location[end:]
    return protocol + separator + parameters_without_credentials(location)


def user_info(location: str) -> tuple[int, bool]:
    """Return the length of the user info with its `@` in a URL without protocol, and whether it has a password.

    A password may contain `@`, `/`, `?` and `#`, which should have been written as %40 and so on. The user info of a
    URL with a password therefore ends at the last `@` of the URL, even if that `@` belongs to the path.
    """
    authority = re.split("[/?#]", location, maxsplit=1)[0]
    user, at, _ = authority.rpartition("@")
    if "@" not in location or (at and ":" not in user) or (not at and _HOST.fullmatch(authority)):
        return len(user) + len(at), False
    return location.rindex("@") + 1, True


def parameters_without_credentials(reference: str) -> str:
    """Return a relative reference, such as `cat.jpg?token=...`, without the parameters that are credentials.

    >>> parameters_without_credentials("cat.jpg?id=7&token=0f3a")
    'cat.jpg?id=7'
    """
    before, fragment_mark, fragment = reference.partition("#")
    path, query_mark, query = before.partition("?")
    of_azure_functions = ".azurewebsites.net" in path.partition("/")[0].lower()
    return path + _kept(query_mark, query, of_azure_functions) + _kept(fragment_mark, fragment, of_azure_functions)


def _kept(mark: str, parameters: str, of_azure_functions: bool) -> str:
    """Return a query or fragment, with its mark, without credentials; "" if nothing else was in it."""
    given = _SEPARATORS.split(parameters)
    names = [re.sub("[-_]", "", unquote(parameter.partition("=")[0]).lower()) for parameter in given]
    removed = {name for name in names if name in _CREDENTIALS or _FORMS.fullmatch(name)}
    if of_azure_functions:
        removed |= {"code"}  # elsewhere, it is also the code of a product
    for credential, beside in _BESIDE.items():
        if credential in removed or (removed and not credential):
            removed |= beside
    kept = [_clean_value(parameter) for name, parameter in zip(names, given, strict=True) if name not in removed]
    return mark + (parameters if kept == given else "&".join(kept)) if kept else ""


def _clean_value(parameter: str) -> str:
    """Return a parameter; if its value is a URL, as image proxies take it, without the credentials of that URL."""
    name, equals, value = parameter.partition("=")
    url = unquote(value)
    clean = without_credentials(url)
    return parameter if clean == url else name + equals + quote(clean, safe="")


def text_without_credentials(text: str) -> str:
    """Return a text, such as an error message, without the credentials of the URLs in it.

    A URL ends at white space, `"`, `<`, `>` or a backtick; punctuation at its end belongs to the text.
    """
    return _IN_TEXT.sub(_clean_match, text) if ":/" in text else text


def _clean_match(match: re.Match[str]) -> str:
    url = match[0].rstrip(".,:;!)]}\\'")
    behind = match[0][len(url) :]
    if "://" in url:
        return without_credentials(url) + behind
    return without_credentials(url.replace(":/", "://", 1)).replace("://", ":/", 1) + behind
