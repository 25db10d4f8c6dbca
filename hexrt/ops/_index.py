"""The work of `index.*` and `search.vector`: faiss on top of the generations of `_index_store`.

A generation that was read is kept in the process and never changed: an addition works on a copy of its own, so that searches and
additions need no lock between them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hexrt.errors import BadRequest, InvariantViolation, OutOfMemory, Unavailable
from hexrt.ops._index_store import TRIES, IndexFolder, Manifest, read_generation
from hexrt.ops._settings import read_settings
from hexrt.ops.spec import StepContext
from hexrt.values import decode, encode

MAX_DIMENSION = 65_536


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[ops."index.build"]` and `[ops."index.add"]` of the config."""

    max_vectors: int = 1_000_000  # of one index
    max_indexes: int = 1_000  # of one user


@dataclass(frozen=True, slots=True)
class Layout:
    kind: str
    metric: str
    m: int
    ef_construction: int


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    manifest: Manifest
    index: Any
    documents: list[Any]


@lru_cache(maxsize=1)
def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise Unavailable("faiss is not installed: install hexrt with one of its extras cpu, cuda12, cuda13") from error
    faiss.omp_set_num_threads(1)
    return faiss


def _vectors(context: StepContext, value: Any, metric: str | None, dimension: int | None) -> np.ndarray:
    """float32 [n, d], a copy where it is normalised. Raises BadRequest about shape, dtype, NaN and a wrong dimension."""
    where = f"{context.step}.inputs.vectors"
    try:
        given = np.asarray(value)
    except ValueError:
        raise BadRequest("has rows of different lengths", where) from None
    if given.ndim == 1:
        given = given[None]
    if given.ndim != 2 or given.dtype.kind not in "iuf":
        raise BadRequest(f"is {given.dtype}{list(given.shape)}; needed are numbers of shape [n, d]", where)
    if not given.shape[0] or not 1 <= given.shape[1] <= MAX_DIMENSION:
        raise BadRequest(
            f"has the shape {list(given.shape)}; at least one vector of 1 to {MAX_DIMENSION} numbers is needed", where
        )
    if dimension is not None and given.shape[1] != dimension:
        raise BadRequest(f"has vectors of {given.shape[1]} numbers, and those of the index have {dimension}", where)
    with np.errstate(over="ignore"):
        array = np.array(given, np.float32, order="C")
    bad = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if bad.size:
        raise BadRequest(f"vector {bad[0]} has a number that is NaN, infinite or too large for float32", where)
    if metric == "cosine":
        array /= np.maximum(np.linalg.norm(array.astype(np.float64), axis=1, keepdims=True), 1e-12)
    return array


def _documents(context: StepContext, documents: list[Any] | None, count: int) -> list[Any]:
    if documents is None:
        return [None] * count
    if len(documents) != count:
        raise BadRequest(
            f"has {len(documents)} entries for {count} vectors; there must be as many",
            f"{context.step}.inputs.documents",
        )
    return documents


def _decode_index(data: bytes) -> Any:
    return _faiss().deserialize_index(np.frombuffer(data, np.uint8))


@lru_cache(maxsize=8)
def _load(path: Path, manifest: Manifest) -> Loaded:
    index, documents = read_generation(path, manifest)
    return Loaded(manifest, _decode_index(index), decode(documents))


def _current(folder: IndexFolder) -> Loaded:
    for _ in range(TRIES):
        manifest = folder.require()
        try:
            return _load(folder.path, manifest)
        except FileNotFoundError:
            continue  # two writers were faster than this reader
    raise InvariantViolation(f"index {folder.name!r} names files that are not there")


def _write(folder: IndexFolder, manifest: Manifest, index: Any, documents: list[Any]) -> Manifest:
    return folder.write(manifest, memoryview(_faiss().serialize_index(index)), encode(documents))


def _describe(name: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "index": name,
        "count": manifest.count,
        "dimension": manifest.dimension,
        "metric": manifest.metric,
        "kind": manifest.kind,
        "generation": manifest.generation,
    }


def build_index(
    context: StepContext, name: str, layout: Layout, vectors: Any, documents: list[Any] | None
) -> dict[str, Any]:
    """Replaces the index of that name, whole. Raises BadRequest for what does not fit together, OutOfMemory above the limits."""
    settings = read_settings(context, "index.build", Settings)
    folder = IndexFolder(context, name, f"{context.step}.params.name")
    rows = _vectors(context, vectors, layout.metric, None)
    kept = _documents(context, documents, len(rows))
    _check_count(context, len(rows), settings)
    faiss = _faiss()
    metric = faiss.METRIC_L2 if layout.metric == "l2" else faiss.METRIC_INNER_PRODUCT
    if layout.kind == "hnsw":
        index = faiss.IndexHNSWFlat(rows.shape[1], layout.m, metric)
        index.hnsw.efConstruction = layout.ef_construction
    else:
        index = faiss.IndexFlat(rows.shape[1], metric)
    index.add(rows)
    manifest = Manifest(
        "", layout.kind, layout.metric, layout.m, layout.ef_construction, rows.shape[1], len(rows), "", ""
    )  # fmt: skip
    with folder.writing():
        if not folder.path.exists() and folder.names() >= settings.max_indexes:
            raise OutOfMemory(
                f"you have {folder.names()} indexes, the most allowed: drop one with index.drop", folder.where
            )
        return _describe(name, _write(folder, manifest, index, kept))


def _check_count(context: StepContext, count: int, settings: Settings) -> None:
    if count > settings.max_vectors:
        raise OutOfMemory(
            f"the index would hold {count} vectors, and {settings.max_vectors} are allowed",
            f"{context.step}.inputs.vectors",
        )


def add_to_index(context: StepContext, name: str, vectors: Any, documents: list[Any] | None) -> dict[str, Any]:
    """Appends. Items are known by run, step and content, so that an attempt after a crash does not add them twice."""
    settings = read_settings(context, "index.add", Settings)
    folder = IndexFolder(context, name, f"{context.step}.params.name")
    with folder.writing():
        before = folder.require()
        rows = _vectors(context, vectors, before.metric, before.dimension)
        kept = _documents(context, documents, len(rows))
        content = hashlib.blake2b(rows.tobytes() + encode(kept), digest_size=16).hexdigest()
        key = f"{context.run.hex()}/{context.step}/{content}"
        if key in before.additions:
            return {**_describe(name, before), "first": before.additions[key]}
        _check_count(context, before.count + len(rows), settings)
        index_bytes, document_bytes = read_generation(folder.path, before)
        index = _decode_index(index_bytes)
        if before.kind == "hnsw":
            index.hnsw.efConstruction = before.ef_construction
        index.add(rows)
        manifest = msgspec.structs.replace(
            before, count=before.count + len(rows), additions={**before.additions, key: before.count}
        )
        manifest = _write(folder, manifest, index, [*decode(document_bytes), *kept])
    return {**_describe(name, manifest), "first": before.count}


def drop_index(context: StepContext, name: str) -> bool:
    folder = IndexFolder(context, name, f"{context.step}.params.name")
    with folder.writing():
        return folder.drop()


def search_index(context: StepContext, name: Any, vectors: Any, k: int, ef: int) -> dict[str, Any]:
    """Raises BadRequest where k exceeds the vectors there are or dimensions differ, NotFound where there is no such index."""
    where = f"{context.step}.inputs.index"
    if not isinstance(name, str):
        raise BadRequest("names no index: give what index.build returned, or a name", where)
    loaded = _current(IndexFolder(context, name, where))
    manifest = loaded.manifest
    queries = _vectors(context, vectors, manifest.metric, manifest.dimension)
    if k > manifest.count:
        raise BadRequest(f"{k} is more than the {manifest.count} vectors in the index", f"{context.step}.params.k")
    scores, ids = _nearest(loaded.index, manifest, queries, k, max(ef, k))
    if (
        manifest.kind == "hnsw" and (ids < 0).any()
    ):  # the links did not lead to k vectors (many equal ones): look at all
        scores, ids = _nearest(loaded.index, manifest, queries, k, manifest.count)
    documents = [[None if i < 0 else loaded.documents[i] for i in row] for row in ids]
    return {"ids": ids, "scores": scores, "documents": documents, "metric": manifest.metric}


def _nearest(index: Any, manifest: Manifest, queries: np.ndarray, k: int, ef: int) -> tuple[np.ndarray, np.ndarray]:
    if manifest.kind == "flat":
        found: tuple[np.ndarray, np.ndarray] = index.search(queries, k)
        return found
    found = index.search(queries, k, params=_faiss().SearchParametersHNSW(efSearch=ef))
    return found
