"""Data sets and uploads of the stand-in: DatasetApiService, BlobApiService, and the storage that uploads go to."""

from __future__ import annotations

import re
import secrets
import shutil
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

from places.kaggle_server.rules import Rules
from places.kaggle_server.values import ApiError, Dataset, Upload

Json = dict[str, Any]


class Datasets:
    """Those of the account."""

    def __init__(self, folder: Path, owner: str, rules: Rules) -> None:
        self._folder, self._owner, self._rules = folder, owner, rules
        self.datasets: dict[str, Dataset] = {}
        self.uploads: dict[str, Upload] = {}

    def start_upload(self, body: Json) -> Json:
        token = secrets.token_hex(8)
        folder = self._folder / "uploads"
        folder.mkdir(parents=True, exist_ok=True)
        self.uploads[token] = Upload(token, body["name"], int(body.get("contentLength", 0)), folder / token)
        return {"token": token, "createUrl": f"https://storage.googleapis.com/upload/{token}"}

    def put(self, token: str, content_range: str, content: bytes) -> tuple[int, dict[str, str]]:
        """Take bytes as Google's storage does: 200 once the file is whole, 308 with what has come before."""
        upload = self.uploads.get(token)
        if upload is None:
            return 404, {}
        if match := re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", content_range):
            if int(match[1]) != upload.received:
                return 400, {}
        elif not content_range and content:
            upload.path.write_bytes(b"")  # an upload from the beginning
        with open(upload.path, "ab") as file:
            file.write(content)
        if upload.received == upload.size:
            return 200, {}
        return 308, {"Range": f"bytes=0-{upload.received - 1}"} if upload.received else {}

    def create(self, body: Json) -> Json:
        slug, title = body.get("slug", ""), body.get("title", "")
        if body.get("ownerSlug") != self._owner:
            raise ApiError(403, "Permission 'datasets.create' was denied")
        if not 6 <= len(slug) <= 50 or not 6 <= len(title) <= 50:
            return {"status": "error", "error": "The dataset slug must be between 6 and 50 characters"}
        if slug in self.datasets:
            text = f'The requested title "{title}" is already in use by a dataset. Please choose another title.'
            return {"status": "error", "error": text}
        uploads = [self.uploads.get(file.get("token", "")) for file in body.get("files", [])]
        if not uploads or any(upload is None or upload.received != upload.size for upload in uploads):
            return {"status": "error", "error": "Some of the uploaded files are missing"}
        folder = self._folder / "datasets" / slug
        folder.mkdir(parents=True)
        for upload in uploads:
            assert upload is not None
            self._place(upload, folder)
        files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        ready_at_s = time.monotonic() + self._rules.ready_s
        self.datasets[slug] = Dataset(slug, folder, ready_at_s, files, bool(body.get("isPrivate")))
        return {
            "ref": f"/{self._owner}/{slug}",
            "url": f"https://www.kaggle.com/datasets/{self._owner}/{slug}",
            "status": "ok",
        }

    def _place(self, upload: Upload, folder: Path) -> None:
        """Archives are unpacked into a folder of their name, as Kaggle does."""
        endings = (".tar.gz", ".tgz", ".tar", ".zip", *([".whl"] if self._rules.unpacks_wheels else []))
        ending = next((ending for ending in endings if upload.name.endswith(ending)), "")
        target = folder / upload.name.removesuffix(ending)
        if not ending:
            shutil.copy(upload.path, target)
        elif ending in (".zip", ".whl"):
            with zipfile.ZipFile(upload.path) as archive:
                archive.extractall(target)
        else:
            with tarfile.open(upload.path) as archive:
                archive.extractall(target, filter="data")

    def _of(self, body: Json) -> Dataset:
        dataset = self.datasets.get(body.get("datasetSlug", "")) if body.get("ownerSlug") == self._owner else None
        if dataset is None:
            raise ApiError(self._rules.absent_status, "Permission 'datasets.get' was denied")
        return dataset

    def status(self, body: Json) -> Json:
        return {"status": self._of(body).status}

    def get(self, body: Json) -> Json:
        dataset = self._of(body)
        return {"ref": f"{self._owner}/{dataset.slug}", "currentVersionNumber": 1, "isPrivate": dataset.is_private}

    def list_files(self, body: Json) -> Json:
        dataset = self._of(body)
        if dataset.status != "READY":
            return {}
        at = int(body.get("pageToken") or 0)
        size = min(int(body.get("pageSize") or 20), self._rules.page)
        names = list(dataset.files)[at : at + size]
        answer: Json = {
            "datasetFiles": [{"name": name, "totalBytes": dataset.files[name].stat().st_size} for name in names]
        }
        return answer | ({"nextPageToken": str(at + size)} if at + size < len(dataset.files) else {})

    def delete(self, body: Json) -> Json:
        shutil.rmtree(self._of(body).folder)
        del self.datasets[body["datasetSlug"]]
        return {}
