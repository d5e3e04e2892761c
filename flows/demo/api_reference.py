"""Service descriptions of botocore (JSON with HTML inside) as pages of an API reference."""

import gzip
import json
import re
from collections.abc import Iterator
from html import escape
from typing import Any

from puna.flows.demo.warc import Member, Page

SITE = "https://boto3.amazonaws.com/v1/documentation/api/latest/reference/services/"
DEPTH = 2  # maximum levels of nested structures that a page describes

# Every service has an overview page; the services below also have a page for each operation.
DETAILED = (
    *("autoscaling", "batch", "cloudfront", "cloudwatch", "cognito-idp", "comprehend", "dynamodb", "ecs"),
    *("forecast", "gamelift", "glacier", "iam", "kinesis", "kms", "lambda", "organizations", "personalize"),
    *("polly", "rekognition", "route53", "s3", "secretsmanager", "ses", "sns", "sqs", "stepfunctions"),
    *("sts", "swf", "textract", "transcribe", "translate"),
)

_DESCRIPTION = re.compile(r"botocore/data/([^/]+)/([^/]+)/service-2\.json(\.gz)?$")


def is_service(path: str) -> bool:
    """True if `path` in botocore's wheel is the description of a service."""
    return _DESCRIPTION.match(path) is not None


def reference(members: list[Member]) -> Iterator[Page]:
    """Yield an overview page of each service in its newest version, and, for services in DETAILED, a page per operation."""
    newest: dict[str, Member] = {}
    for member in sorted(members, key=lambda member: member.path):  # the path holds the version's date
        if match := _DESCRIPTION.match(member.path):
            newest[match[1]] = member
    for service in sorted(newest):
        yield from _service(service, newest[service])


def _service(service: str, member: Member) -> Iterator[Page]:
    model = json.loads(gzip.decompress(member.body) if member.path.endswith(".gz") else member.body)
    name = model["metadata"].get("serviceId") or model["metadata"]["serviceFullName"]
    yield _page(f"{service}.html", name, _overview(service, model), member)
    for operation in sorted(model["operations"]) if service in DETAILED else ():
        path = f"{service}/client/{_snake(operation)}.html"
        yield _page(path, f"{operation} - {name}", _operation(model, operation), member)


def _page(path: str, title: str, content: str, member: Member) -> Page:
    body = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{escape(title)}</title>
</head>
<body>
<nav><a href="/v1/documentation/api/latest/reference/services/index.html">Available services</a></nav>
<main>
<article>
{content}
</article>
</main>
</body>
</html>
"""
    return Page(SITE + path, member.modified, "text/html; charset=utf-8", body.encode())


def _overview(service: str, model: dict[str, Any]) -> str:
    items = "\n".join(f'<li><a href="{service}/client/{_snake(name)}.html">{_snake(name)}</a></li>' for name in sorted(model["operations"]))
    heading = escape(model["metadata"]["serviceFullName"])
    return f"<h1>{heading}</h1>\n{model.get('documentation', '')}\n<h2>Methods</h2>\n<ul>\n{items}\n</ul>"


def _operation(model: dict[str, Any], name: str) -> str:
    operation = model["operations"][name]
    parts = [f"<h1>{escape(_snake(name))}</h1>", operation.get("documentation", "")]
    for key, heading in (("input", "Parameters"), ("output", "Returns")):
        if key in operation:
            members = _members(model["shapes"], operation[key]["shape"], DEPTH, ())
            parts += [f"<h2>{heading}</h2>", members] if members else []
    names = [error["shape"] for error in operation.get("errors", [])]
    errors = [f"<dt><b>{escape(name)}</b></dt>\n<dd>{model['shapes'][name].get('documentation', '')}</dd>" for name in names]
    if errors:
        parts += ["<h2>Exceptions</h2>", "<dl>", *errors, "</dl>"]
    return "\n".join(part for part in parts if part)


def _members(shapes: dict[str, Any], name: str, depth: int, above: tuple[str, ...]) -> str:
    """Return an HTML list of a structure's members (of a list's items, a map's values); empty at `depth` 0, in a cycle, or without any."""
    shape = shapes[name]
    if shape["type"] in ("list", "map"):
        inner = shape["member"] if shape["type"] == "list" else shape["value"]
        return "" if name in above else _members(shapes, inner["shape"], depth, (*above, name))
    if shape["type"] != "structure" or depth == 0 or name in above or not shape.get("members"):
        return ""
    required = set(shape.get("required", ()))
    rows = []
    for member, target in shape["members"].items():
        kind = shapes[target["shape"]]["type"]
        note = f"({kind}, required)" if member in required else f"({kind})"
        text = target.get("documentation") or shapes[target["shape"]].get("documentation", "")
        nested = _members(shapes, target["shape"], depth - 1, (*above, name))
        rows.append(f"<dt><b>{escape(member)}</b> <i>{note}</i></dt>\n<dd>{text}{nested}</dd>")
    return "<dl>\n" + "\n".join(rows) + "\n</dl>"


def _snake(name: str) -> str:
    """Return an operation's name in snake case: list_objects_v2 for ListObjectsV2."""
    spaced = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z\d])([A-Z])", r"\1_\2", spaced).lower()
