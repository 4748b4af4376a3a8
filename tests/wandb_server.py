"""A stand-in for the server of Weights & Biases, as far as the real client asks it about one run."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = {"id": "e", "name": "me"}
PROJECT = {"id": "p", "name": "ink", "entity": ENTITY}


@dataclass
class WandbServer:
    """`history`: the rows that were uploaded; `summary`: as it was uploaded last, None before the run exists."""

    port: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None

    @property
    def environ(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": f"http://127.0.0.1:{self.port}", "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}

    def values(self, tag: str) -> list[tuple[int, float]]:
        """Step and value of each row with this tag, as they came."""
        return [(row["train/kgorch_step"], row[tag]) for row in self.history if tag in row]

    def take(self, files: dict[str, Any]) -> None:
        self.history += [json.loads(line) for line in files.get("wandb-history.jsonl", {}).get("content", ())]
        for line in files.get("wandb-summary.json", {}).get("content", ()):
            self.summary = json.loads(line)

    def answer(self, query: str, name: str | None) -> dict[str, Any]:
        run: dict[str, Any] = {"id": "r", "name": name, "displayName": "", "description": "", "config": "{}"}
        run |= {"project": PROJECT, "historyLineCount": len(self.history)}
        if "mutation UpsertBucket" in query:
            is_new, self.summary = self.summary is None, self.summary or {}
            return {"upsertBucket": {"bucket": run, "inserted": is_new}}
        if "query RunResumeStatus" in query:
            run |= {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "tags": [], "wandbConfig": '{"t": 1}'}
            run |= {"historyTail": json.dumps([json.dumps(row) for row in self.history[-1:]])}
            run |= {"summaryMetrics": json.dumps(self.summary)}
            return {"model": PROJECT | {"bucket": None if self.summary is None else run}}
        if "mutation CreateRunFiles" in query:
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}
        return {"viewer": {"id": "v", "username": "me", "entity": "me", "flags": "{}", "teams": {"edges": []}}}


@contextmanager
def serving() -> Iterator[WandbServer]:
    wandb = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            content = gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content
            answer: dict[str, Any] = {}
            if self.path.endswith("/file_stream"):
                wandb.take(json.loads(content).get("files") or {})
            elif self.path.endswith("/graphql"):
                asked = json.loads(content)
                answer = {"data": wandb.answer(asked["query"], (asked.get("variables") or {}).get("name"))}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_GET = do_PUT = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    wandb.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield wandb
    finally:
        server.shutdown()
        server.server_close()
