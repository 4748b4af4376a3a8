"""The routes. Pages are HTML that a browser shows at once; what changes later comes as server-sent events, curves as JSON."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from kgorch.db import sessions
from kgorch.errors import KgorchError, NotFound, StateUnusable
from kgorch.report import curves, log_pages, system_charts
from kgorch.web import actions, texts
from kgorch.web.access import AccessMiddleware, Gate
from kgorch.web.fragments import Parts
from kgorch.web.state import WebState

STATIC = Path(__file__).with_name("static")
PAGES = ("overview", "metrics", "system", "checkpoints", "logs", "plan")
INTERVAL_S = 1.0
"""Between two looks of a stream: as often as ranks report."""

HURRY_S = 0.05
"""The same while a first list of runs is not complete."""

MAX_STREAMS = 64
"""Open streams of all browsers; each costs a look at the database a second."""

MAX_NAMES = 60

MAX_LOGINS = 5
"""Passwords that are tried or wait for it. Each wrong one takes a second; more are refused at once."""


class Site:
    """The handlers of one `kgorch web`."""

    def __init__(self, state: WebState, gate: Gate) -> None:
        self.state, self.gate = state, gate
        self.templates = texts.templates()
        self.parts = Parts(state, self.templates)
        self.actions = actions.Runner(state)
        self.streams = self.logins = 0
        self._login_turn = asyncio.Semaphore(1)
        self.is_stopping = False

    def page(self, request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        cookie = request.cookies.get(self.gate.cookie, "")
        csrf = self.gate.csrf_token(cookie) if self.gate.is_session(cookie) else ""
        return HTMLResponse(self.parts.render(template, csrf=csrf, **values), status_code=status)

    # access

    async def login(self, request: Request) -> Response:
        if request.method == "POST":
            body = parse_qs((await request.body()).decode(errors="replace"), max_num_fields=5)
            password = body.get("password", [""])[0]
            if self.logins >= MAX_LOGINS:
                return self.page(request, "login.html", 429, asks=True, is_wrong=False, is_busy=True)
            if not await self._is_password(password):
                return self.page(request, "login.html", 403, asks=True, is_wrong=True)
            return self._welcome(request)
        if token := request.query_params.get("token"):
            if self.gate.is_token(token):
                return self._welcome(request)
            return self.page(request, "login.html", 403, asks=False, is_wrong=True)
        return self.page(request, "login.html", asks=self.gate.password is not None, is_wrong=False)

    async def _is_password(self, text: str) -> bool:
        """Guesses wait here and not in the pool, whose threads serve all pages."""
        if self.gate.password is None:
            return False
        self.logins += 1
        try:
            async with self._login_turn:
                return await run_in_threadpool(self.gate.password.matches, text)
        finally:
            self.logins -= 1

    def _welcome(self, request: Request) -> Response:
        """A page that goes on by itself, instead of a redirect: the cookie is not sent along a chain that began on another site."""
        response = self.page(request, "welcome.html")
        self.gate.set_cookie(response)
        return response

    # pages

    def home(self, request: Request) -> Response:
        return self.page(request, "runs.html", **self.parts.runs())

    def run_page(self, request: Request) -> Response:
        name, number = request.path_params["name"], request.path_params["number"]
        page = request.path_params.get("page", "overview")
        if page not in PAGES:
            raise NotFound("there is no such page", error_code="KG806")
        run = self.state.find(name, number)
        extra: dict[str, Any] = {}
        if page == "logs":
            extra["sources"] = log_pages.sources(self.state.engine, run)
        if page == "system":
            extra["sessions"] = self.parts.session_starts(run)
        parts = self.parts.of_run(name, number, page)
        return self.page(request, f"run_{page}.html", run=run, parts=parts, page=page, pages=PAGES, **extra)

    # data

    def curves(self, request: Request) -> Response:
        run, query = self._run(request), request.query_params
        axis = query.get("axis", "step")
        if axis not in curves.AXES:
            raise KgorchError(f"axis: expected one of {', '.join(curves.AXES)}")
        names = tuple(query.getlist("name"))[:MAX_NAMES]
        smooth = min(0.999, max(0.0, _number(query.get("smooth"), 0.0)))
        curve = self.state.curves.of_run(self.state.engine, run)
        if query.get("headline") and (headline := curves.headline(curve)):
            names = (headline,)
        version = tuple(
            (stage, len(records), records[-1].at_s if records else 0) for stage, records in curve.stages.items()
        )
        # The version is in the value: with it in the key each record would leave another answer behind.
        _, answer = self.state.shared(
            ("curves", run.id, axis, smooth, names),
            60.0,
            lambda: (version, curves.charts(curve, axis=axis, smooth=smooth, names=names)),
            lambda kept: kept[0] == version,
        )
        return _json(answer)

    def timeline(self, request: Request) -> Response:
        return _json(self.parts.timeline(self._run(request)))

    def forecasts(self, request: Request) -> Response:
        return _json(self.parts.forecasts(self._run(request)))

    def system(self, request: Request) -> Response:
        run, query = self._run(request), request.query_params
        number = _number(query.get("session"), -1)
        rows = sessions.of_run(self.state.engine, run.id)
        row = next((item for item in rows if item.number == number), rows[-1] if rows and number < 0 else None)
        if row is None:
            return _json({"session": None, "t": [], "charts": [], "from": None, "to": None, "span_s": None})
        recent = query.get("window") == "recent"
        key = ("system", row.id, recent)
        return _json(
            self.state.shared(key, 0.9, lambda: system_charts.of_session(self.state.engine, row, recent=recent))
        )

    def logs(self, request: Request) -> Response:
        run, query = self._run(request), request.query_params
        path = log_pages.find(self.state.engine, run, query.get("attempt", ""), query.get("file", ""))
        at = int(_number(query.get("at"), -1))
        match query.get("what"):
            case "search":
                return _json(log_pages.search(path, query.get("text", ""), before=at if at >= 0 else None))
            case "after":
                return _json(log_pages.following(path, at))
            case _:
                return _json(log_pages.page(path, before=at if at >= 0 else None))

    def _run(self, request: Request) -> Any:
        return self.state.find(request.path_params["name"], request.path_params["number"])

    # updates

    async def run_updates(self, request: Request) -> Response:
        name, number = request.path_params["name"], request.path_params["number"]
        page = request.query_params.get("page", "overview")
        await run_in_threadpool(self.state.find, name, number)
        return self._stream(request, lambda: (dict(self.parts.of_run(name, number, page)), True))

    async def runs_updates(self, request: Request) -> Response:
        def look() -> tuple[dict[str, str], bool]:
            found = self.parts.runs()
            return {"summary": found["summary"], **found["rows"]}, found["complete"]

        return self._stream(request, look)

    def _stream(self, request: Request, look: Callable[[], tuple[dict[str, str], bool]]) -> Response:
        if self.streams >= MAX_STREAMS:
            return JSONResponse({"error": "too many pages are open"}, status_code=503)
        return StreamingResponse(
            self._events(request, look), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    async def _events(self, request: Request, look: Callable[[], tuple[dict[str, str], bool]]) -> AsyncIterator[str]:
        """`parts`: {id: HTML} that differ from what was sent, and `order`: all ids; `trouble`: why nothing can be read."""
        sent: dict[str, str] = {}
        self.streams += 1
        try:
            yield "retry: 2000\n\n"
            while not self.is_stopping and not await request.is_disconnected():
                complete = True
                try:
                    parts, complete = await run_in_threadpool(look)
                    changed = {key: html for key, html in parts.items() if sent.get(key) != html}
                    if changed or list(parts) != list(sent):
                        yield _event("parts", {"parts": changed, "order": list(parts)})
                    else:
                        yield ": \n\n"  # tells a closed connection from a quiet one
                    sent = parts
                except NotFound:
                    yield _event("gone", {})
                    return
                except Exception as error:
                    yield _event("trouble", {"text": _trouble(error)})
                    sent = {}  # the page says so until parts come, also where none of them has changed
                await asyncio.sleep(INTERVAL_S if complete else HURRY_S)
        finally:
            self.streams -= 1

    # actions

    async def act(self, request: Request) -> Response:
        """Streams lines of JSON: `says` while it goes on, at the end `done` or `error` with `next`."""
        values = await _body(request)
        run = await run_in_threadpool(self._run, request)
        name, loop = request.path_params["action"], asyncio.get_running_loop()
        lines: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()

        def put(line: Mapping[str, Any] | None) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, line)

        def work() -> None:
            try:
                put({"done": self.actions.run(name, run, values, lambda text: put({"says": text}))})
            except KgorchError as error:
                put({"error": _trouble(error), "next": error.next_step, "code": error.error_code})
            except Exception as error:
                put({"error": _trouble(error), "next": None, "code": ""})
            finally:
                put(None)

        # A thread of its own, not one of the pool: a stop takes minutes, and it goes on when the browser is closed.
        threading.Thread(target=work, name=f"action-{name}", daemon=True).start()

        async def stream() -> AsyncIterator[str]:
            while (line := await lines.get()) is not None:
                yield json.dumps(line) + "\n"

        return StreamingResponse(stream(), media_type="application/x-ndjson")

    async def export(self, request: Request) -> Response:
        values, run = await _body(request), await run_in_threadpool(self._run, request)
        path, name = await run_in_threadpool(actions.export, self.state, run, values)
        done = BackgroundTask(shutil.rmtree, path.parent, ignore_errors=True)
        return FileResponse(path, filename=name, media_type="application/octet-stream", background=done)

    # errors

    def failed(self, request: Request, error: Exception) -> Response:
        status = 404 if isinstance(error, NotFound) else 503
        if isinstance(error, KgorchError) and not isinstance(error, NotFound | StateUnusable):
            status = 400
        text, next_step, code = _trouble(error), None, ""
        if isinstance(error, KgorchError):
            next_step, code = error.next_step, error.error_code
        if request.url.path.startswith("/api/"):
            return JSONResponse({"error": text, "next": next_step, "code": code}, status_code=status)
        return self.page(request, "error.html", status, text=text, next_step=next_step)

    def not_found(self, request: Request, error: Exception) -> Response:
        return self.failed(request, NotFound("there is no such page", error_code="KG806"))


def create_app(state: WebState, gate: Gate) -> Starlette:
    site = Site(state, gate)
    run, api = "/runs/{name}/{number:int}", "/api/runs/{name}/{number:int}"
    routes = [
        Route("/login", site.login, methods=["GET", "POST"]),
        Route("/", site.home),
        Route(run, site.run_page),
        Route(run + "/{page}", site.run_page),
        Route("/api/runs", site.runs_updates),
        Route(api + "/updates", site.run_updates),
        Route(api + "/curves", site.curves),
        Route(api + "/timeline", site.timeline),
        Route(api + "/forecasts", site.forecasts),
        Route(api + "/system", site.system),
        Route(api + "/logs", site.logs),
        Route(api + "/export", site.export, methods=["POST"]),
        Route(api + "/actions/{action}", site.act, methods=["POST"]),
        Route("/favicon.ico", lambda _: RedirectResponse("/static/icon.svg")),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    handlers: Any = {KgorchError: site.failed, 404: site.not_found, Exception: site.failed}
    access = Middleware(AccessMiddleware, gate=gate, open_paths=("/login", "/static/", "/favicon.ico"))
    app = Starlette(routes=routes, middleware=[access], exception_handlers=handlers)
    app.state.site = site
    return app


async def _body(request: Request) -> Mapping[str, Any]:
    """Raises: KgorchError for what is no JSON object."""
    try:
        values = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise KgorchError("the request is not a JSON object")
    return values


def _json(value: Any) -> Response:
    return Response(json.dumps(value, separators=(",", ":"), allow_nan=False), media_type="application/json")


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n"


def _trouble(error: Exception) -> str:
    """In words. The traceback of a bug goes to the terminal of `kgorch web`, where uvicorn logs it."""
    if isinstance(error, KgorchError):
        return "\n".join([error.headline, *error.facts])
    return texts.lines(getattr(error, "orig", None) or error, 500) or type(error).__name__


def _number(text: str | None, default: float) -> float:
    try:
        value = float(text) if text else default
    except ValueError:
        return default
    return value if abs(value) < 2**53 else default
