"""URLs: parsing (WHATWG, with ada), normalization, and the host names that domain lists match."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

TRACKING = re.compile(
    r"^(?:utm_.*|mc_[ce]id|_hs(?:enc|mi)|ga_.*|gclid|gclsrc|dclid|gbraid|wbraid|fbclid|msclkid|yclid|twclid|ttclid|igshid|igsh|"
    r"mkt_tok|oly_(?:anon|enc)_id|vero_(?:id|conv)|s_cid|wt_?mc|wickedid|_openstat|phpsessid|jsessionid|aspsessionid.*)$",
    re.IGNORECASE,
)
SESSION = re.compile(r";(?:jsessionid|phpsessid|sid)=[^/?#]*", re.IGNORECASE)
INDEX = re.compile(r"/(?:index|default)\.(?:html?|php|aspx?|jsp)$", re.IGNORECASE)
ROUTE = re.compile(r"#[/!]+[^/!]")
ESCAPE = re.compile(r"%[0-9a-fA-F]{2}")
HOST = re.compile(r"((?:[\w-]+\.)+[\w-]+)\.?(?::\d+)?(?=[/?#]|$)")
FILE = re.compile(r"\.(?:cc|md|mov|pl|ps|py|rs|sh|so|zip)$", re.IGNORECASE)  # a host without a path, or a file's name
LONGEST_HOST = 253  # maximum number of bytes of a name in the DNS (RFC 1035); such a name has at most 127 labels
UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


class Address(NamedTuple):
    """A URL's parts after WHATWG parsing, without the port: scheme and host in ASCII lower case (host may be empty), path and query."""

    scheme: str
    host: str
    path: str
    query: str


def parse(url: str) -> Address | None:
    """Return the parts of `url` after WHATWG parsing; None unless `url` is a valid absolute URL with a host that fits into the DNS."""
    parsed = _whatwg(url)
    return parsed and Address(parsed.protocol.rstrip(":"), parsed.hostname.rstrip(".").lower(), parsed.pathname, parsed.search.lstrip("?"))


def normalize(url: str) -> str:
    """Return the same normalized URL for all URLs of the same page.

    In addition to WHATWG parsing (case of scheme and host, default ports, dot segments): http becomes https; `www.`, credentials,
    fragments, tracking and session parameters, index files and final slashes are removed; parameters are sorted; escapes are unified.
    Fragments that are routes of a page's script (`#/a`, `#!a`) are kept. URLs with another scheme lose only the fragment; text that is not
    an absolute URL is returned unchanged."""
    parsed = _whatwg(url)
    if parsed is None:
        return url
    scheme = parsed.protocol.rstrip(":")
    if scheme not in ("http", "https"):
        return str(parsed.href.partition("#")[0])
    host = parsed.hostname.rstrip(".").removeprefix("www.")
    port = f":{parsed.port}" if parsed.port else ""
    path = INDEX.sub("/", SESSION.sub("", escapes(parsed.pathname))).rstrip("/") or "/"
    pairs = [pair for pair in parsed.search.lstrip("?").split("&") if pair and not TRACKING.match(pair.partition("=")[0])]
    query = "&".join(sorted(escapes(pair) for pair in pairs))
    route = escapes(parsed.hash).rstrip("/") if ROUTE.match(parsed.hash) else ""
    return f"https://{host}{port}{path}" + (f"?{query}" if query else "") + route


def of_host(text: str) -> str | None:
    """Return a URL without a scheme as one with https; None unless `text` begins with a host below a public suffix of the list."""
    page = text.strip().removeprefix("//")
    host = HOST.match(page)
    if host is None or (FILE.search(page) and page == host[0] and not page.startswith("www.")):
        return None
    return f"https://{page}" if _suffixes().privatesuffix(host[1], accept_unknown=False) else None


def _whatwg(url: str) -> Any:
    import ada_url

    try:
        parsed = ada_url.URL(url)
    except ValueError:
        return None
    return parsed if len(parsed.hostname.rstrip(".")) <= LONGEST_HOST else None


def escapes(text: str) -> str:
    """Return text with normalized percent escapes: unreserved characters decoded, other escapes in upper case (RFC 3986, 6.2.2)."""
    return ESCAPE.sub(lambda match: c if (c := chr(int(match[0][1:], 16))) in UNRESERVED else match[0].upper(), text)


def names(host: str) -> list[str]:
    """Return the host and its parent domains up to the registrable domain (a.b.co.uk: a.b.co.uk, b.co.uk); without one, only the host."""
    shortest = _registrable(host)
    if not shortest or shortest == host or host[-1:].isdigit() or host.startswith("["):  # an IP address
        return [host]
    labels = host.split(".")
    keep = shortest.count(".") + 1
    return [".".join(labels[i:]) for i in range(len(labels) - keep + 1)]


def public_suffix(domain: str) -> bool:
    """True if anyone can register names under `domain` at a registry (`com`, `co.uk`; not shared hosts such as `blogspot.com`)."""
    return bool(_suffixes().is_public(domain))


@lru_cache(maxsize=65_536)
def _registrable(host: str) -> str:
    return str(_suffixes().privatesuffix(host) or "")


@lru_cache(maxsize=1)
def _suffixes():  # type: ignore[no-untyped-def]
    from publicsuffixlist import PublicSuffixList

    # Sites on shared hosts (blogspot.com) are treated like any other domain: only suffixes of registries count.
    return PublicSuffixList(only_icann=True)
