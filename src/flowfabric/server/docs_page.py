"""The page at `/docs`, made from the OpenAPI document. It loads nothing from elsewhere."""

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
from litestar.openapi.plugins import JsonRenderPlugin, OpenAPIRenderPlugin

from flowfabric.server.problems import AnyRequest

Described = Mapping[str, object]
METHODS: Final = ("get", "post", "put", "patch", "delete")
STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .3rem 0 }
details { border-bottom: 1px solid #8884 }
details > :not(summary) { margin: .2rem 0 .8rem 1.5rem }
code, pre { font: 13px/1.5 ui-monospace, monospace }
pre { overflow-x: auto; background: #8881; padding: .6rem }
b { display: inline-block; width: 4rem }
"""
PLACE: Final = "/docs"
DOCUMENT: Final = f"{PLACE}/openapi.json"


class PageOfRoutes(OpenAPIRenderPlugin):
    """Every request by tag: parameters, bodies and answers."""

    def __init__(self) -> None:
        super().__init__(path="/", favicon="", style="")

    def render(self, request: AnyRequest, openapi_schema: Described) -> bytes:
        info = _part(openapi_schema, "info")
        title = html.escape(f"{info['title']} {info['version']}")
        document = prefix_of(request, PLACE) + DOCUMENT
        return "".join(
            (
                f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
                f"<style>{STYLE}</style><h1>{title}</h1>",
                f'<p>For programs: <a href="{html.escape(document)}">openapi.json</a>.',
                " Requests carry <code>Authorization: Bearer &lt;token&gt;</code>.</p>",
                *_sections(_part(openapi_schema, "paths")),
                "<h2>schemas</h2>",
                *_schemas(_part(_part(openapi_schema, "components"), "schemas")),
            )
        ).encode()


class DocumentOfRoutes(JsonRenderPlugin):
    """The same for programs, with the URL of the server, mounted under a prefix or not."""

    def render(self, request: AnyRequest, openapi_schema: Described) -> bytes:
        root = prefix_of(request, DOCUMENT) or "/"
        return self.render_json(request, {**openapi_schema, "servers": [{"url": root}]})


def prefix_of(request: AnyRequest, place: str) -> str:
    """The prefix that the server is mounted under, or nothing.

    Some frameworks set `root_path`, others cut the prefix off the path; all keep the raw path.
    """
    raw_path = request.scope["raw_path"].decode("latin-1").rstrip("/")
    if raw_path.endswith(place):
        return raw_path.removesuffix(place)
    return request.scope["root_path"].rstrip("/")


def _sections(paths: Described) -> Iterator[str]:
    by_tag: dict[str, list[str]] = {}
    for path in paths:
        for method in METHODS:
            about = _part(_part(paths, path), method)
            if about:
                tags = about.get("tags")
                tag = str(tags[0]) if isinstance(tags, Sequence) and tags else "other"
                by_tag.setdefault(tag, []).append(_request(path, method, about))
    for tag, requests in by_tag.items():
        yield f"<h2>{html.escape(tag)}</h2>{''.join(requests)}"


def _request(path: str, method: str, about: Described) -> str:
    summary = html.escape(str(about.get("summary", "")))
    more = html.escape(str(about.get("description", "")))
    parts = [f"<p>{more}</p>"] if more else []
    sections = [each for each in ("parameters", "requestBody", "responses") if about.get(each)]
    parts += [f"<p>{each}</p>{_shown(about[each])}" for each in sections]
    head = f"<b>{method.upper()}</b> <code>{html.escape(path)}</code> {summary}"
    return f"<details><summary>{head}</summary>{''.join(parts)}</details>"


def _schemas(schemas: Described) -> Iterator[str]:
    for name, schema in schemas.items():
        shown = _shown(schema)
        yield f"<details><summary><code>{html.escape(name)}</code></summary>{shown}</details>"


def _shown(described: object) -> str:
    text = msgspec.json.format(msgspec.json.encode(described), indent=1).decode()
    return f"<pre>{html.escape(text)}</pre>"


def _part(described: Described, name: str) -> Described:
    found = described.get(name)
    return found if isinstance(found, Mapping) else {}
