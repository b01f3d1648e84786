"""The HTTP service: routes, their documents, and the page."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, BeforeValidator, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from seps import __version__
from seps.data.text import MOST_WORDS
from seps.gallery import Gallery
from seps.web.guard import Guard, answer
from seps.web.limits import Limits, Refusal
from seps.web.metrics import CONTENT_TYPE, Metrics
from seps.web.schemas import (
    PICTURE_ID,
    About,
    Addition,
    Filters,
    Found,
    Health,
    Listing,
    PictureQuery,
    Problem,
    Result,
    Shown,
    Stored,
    TextQuery,
    form_schema,
)
from seps.web.service import File, Service, condition

STATIC = Path(__file__).parent / "static"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

Known = TypeVar("Known", bound=BaseModel)
PictureId = Annotated[str, InPath(pattern=PICTURE_ID, description="A picture's id, as a search gives it.")]
# `?thumbnail` alone means yes.
Yes = Annotated[bool, BeforeValidator(lambda value: True if value == "" else value)]

SENTENCES = {
    400: "The request cannot be read.",
    401: "The token is missing or wrong.",
    403: "It is not allowed here.",
    404: "There is no such picture.",
    413: "The body is too large.",
    415: "The body is of another type.",
    422: "A value is not as expected.",
    429: "Too many requests of one client.",
    503: "There is more to do than is taken on.",
}


Documents = dict[int | str, dict[str, Any]]


def problems(*more: int) -> Documents:
    """The documents of what a route refuses."""
    codes = sorted({400, 401, 403, 413, 429, 503, *more})
    return {code: {"model": Problem, "description": SENTENCES[code]} for code in codes}


api = APIRouter()


@api.post(
    "/search",
    response_model=Found,
    responses=problems(415, 422),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": TextQuery.model_json_schema()},
                "multipart/form-data": {"schema": form_schema(PictureQuery)},
            },
        }
    },
)
async def search(request: Request) -> Found:
    """The pictures that fit a text, sent as JSON, or that are most like a picture, sent as a form."""
    service = service_of(request)
    began = time.perf_counter()
    kind = content_type(request)
    if kind == "application/json":
        query = checked(TextQuery, await read_json(request))
        hits = await service.find_by_text(query.text, query.k, where_of(query))
    elif kind == "multipart/form-data":
        async with service.uploads.enter(), request.form(max_files=1, max_fields=32) as form:
            given = checked(PictureQuery, fields_of(form))
            data, _ = await uploaded(form, service.limits)
        hits = await service.find_by_picture(data, given.k, where_of(given))
    else:
        raise Refusal(415, "expected application/json or multipart/form-data, found another content type")
    milliseconds = round(1000 * (time.perf_counter() - began), 1)
    return Found(results=[Result.found(hit) for hit in hits], milliseconds=milliseconds)


@api.get("/images", response_model=Listing, responses=problems(422))
async def list_images(request: Request, count: Annotated[int, Query(ge=1, le=100)] = 24) -> Listing:
    """Some pictures to begin with, in no particular order."""
    return Listing(pictures=[Shown.of(entry) for entry in await service_of(request).some(count)])


@api.post(
    "/images",
    response_model=Stored,
    status_code=201,
    responses={
        200: {"model": Stored, "description": "The gallery had it already."},
        **problems(415, 422),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"multipart/form-data": {"schema": form_schema(Addition)}},
        }
    },
)
async def add_image(request: Request, response: Response) -> Stored:
    """Add a picture to the gallery; it can be found as soon as the answer is there."""
    service = service_of(request)
    if request.app.state.read_only:
        raise Refusal(403, "this service takes no pictures")
    if content_type(request) != "multipart/form-data":
        raise Refusal(415, "expected multipart/form-data, found another content type")
    async with service.uploads.enter(), request.form(max_files=1, max_fields=32) as form:
        known = checked(Addition, fields_of(form))
        data, name = await uploaded(form, service.limits)
    id, old = await service.add(data, name, known.description, known.tags)  # noqa: A001
    response.status_code = 200 if old else 201
    return Stored(id=id, name=name, known=old)


@api.get(
    "/images/{id}",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {}}, "description": "The picture."},
        304: {"description": "The picture has not changed."},
        **problems(404, 422),
    },
)
async def image(request: Request, id: PictureId, thumbnail: Yes = False) -> Response:  # noqa: A002
    """A picture as JPEG, in full or as a thumbnail."""
    service = service_of(request)
    return picture_response(request, await (service.thumbnail(id) if thumbnail else service.picture(id)))


@api.get(
    "/explain",
    response_class=Response,
    responses={
        200: {
            "content": {"application/json": {"schema": {"type": "object"}}, "image/png": {}},
            "description": "Kept patches, words and what adds up to the score; or the figure of it.",
        },
        **problems(404, 422),
    },
)
async def explain(
    request: Request,
    id: Annotated[str, Query(pattern=PICTURE_ID)],  # noqa: A002
    text: Annotated[str, Query(min_length=1)],
    format: Literal["json", "png"] = "json",  # noqa: A002
) -> Response:
    """Why a picture has its score for a text."""
    service = service_of(request)
    if format == "png":
        return Response(await service.explain_as_figure(id, text), media_type="image/png")
    return JSONResponse(await service.explain(id, text))


@api.get("/gallery", response_model=About, responses=problems())
async def gallery(request: Request) -> About:
    """How many pictures there are, and what may be asked."""
    service = service_of(request)
    return About(
        pictures=await service.count(),
        additions=not request.app.state.read_only,
        upload_bytes=service.limits.upload_bytes,
        characters=service.limits.characters,
        words=MOST_WORDS,
        results=service.limits.results,
    )


@api.get("/metrics", response_class=PlainTextResponse, responses=problems())
async def metrics(request: Request) -> PlainTextResponse:
    """Counts, latencies and queues in Prometheus' text format."""
    return PlainTextResponse(service_of(request).metrics.text(), media_type=CONTENT_TYPE)


pages = APIRouter()


@pages.get("/healthz", response_model=Health)
async def health() -> Health:
    """Whether the service answers."""
    return Health(status="ok")


@pages.get("/", include_in_schema=False, response_class=HTMLResponse)
async def page() -> FileResponse:
    """The page."""
    return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})


@pages.get("/docs", include_in_schema=False, response_class=HTMLResponse)
async def documents() -> FileResponse:
    """The description of the API, to read and to try."""
    return FileResponse(STATIC / "docs.html", headers={"Cache-Control": "no-cache"})


@pages.get("/favicon.ico", include_in_schema=False)
async def icon() -> FileResponse:
    """The sign in a browser's tab."""
    return FileResponse(STATIC / "icon.svg", media_type="image/svg+xml")


def make_app(
    gallery: Gallery,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    token: str | None = None,
    read_only: bool = False,
    hosts: frozenset[str] = LOOPBACK,
) -> FastAPI:
    """The service of a gallery.

    token: what a client must bring; read_only: pictures are not taken; hosts: the names it may be called by,
    any if empty.
    """
    measured = Metrics()
    service = Service(gallery, limits, measured)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="seps",
        summary="Finds pictures by what is in them, and shows why.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        separate_input_output_schemas=False,
    )
    app.state.service = service
    app.state.read_only = read_only
    bearer = [] if token is None else [HTTPBearer(auto_error=False)]
    app.include_router(api, dependencies=[depends(each) for each in bearer])
    app.include_router(pages)
    app.mount("/static", StaticFiles(directory=STATIC))
    app.mount("/docs/assets", StaticFiles(directory=str(files("fastapi_offline") / "static")))
    app.add_exception_handler(Refusal, refuse)
    app.add_exception_handler(HTTPException, refuse_http)
    app.add_exception_handler(RequestValidationError, refuse_values)
    app.add_middleware(Guard, limits=limits, metrics=measured, token=token, hosts=hosts)
    return app


def depends(security: HTTPBearer) -> Any:
    """A dependency that only shows in the API's description: the guard does the checking."""
    from fastapi import Security

    return Security(security)


def service_of(request: Request) -> Service:
    """The service behind a request."""
    service: Service = request.app.state.service
    return service


def content_type(request: Request) -> str:
    """The type of the body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(request: Request) -> Any:
    """The body as JSON."""
    body = await request.body()
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "expected JSON, found something that is none") from None


def checked(kind: type[Known], values: Any) -> Known:
    """Values as a model of the wire; Refusal names the first that is not as expected."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise Refusal(422, sentence_of(list(error.errors()))) from None


def sentence_of(errors: list[Any]) -> str:
    """The first of some validation errors as a sentence."""
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path")) or "body"
    message = str(first["msg"])
    return f"{place}: {message[:1].lower()}{message[1:]}"


def fields_of(form: FormData) -> dict[str, Any]:
    """The texts of a form; tags may come several times."""
    values: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name == "picture" or isinstance(value, UploadFile):
            continue
        if name == "tags":
            values.setdefault("tags", []).append(value)
        else:
            values[name] = value
    return values


async def uploaded(form: FormData, limits: Limits) -> tuple[bytes, str]:
    """The picture of a form, and the file's name without any folder."""
    file = form.get("picture")
    if not isinstance(file, UploadFile):
        raise Refusal(422, "picture: expected a file, found none")
    if (file.size or 0) > limits.upload_bytes:
        raise Refusal(413, f"picture: expected at most {limits.upload_bytes:,} bytes, found {file.size:,}")
    data = await file.read()
    if not data:
        raise Refusal(422, "picture: expected a file, found an empty one")
    name = (file.filename or "").replace("\\", "/").rpartition("/")[2]
    return data, "".join(letter for letter in name if letter.isprintable())[:200]


def where_of(filters: Filters) -> str | None:
    """The gallery's condition for a client's filters."""
    if filters.since and filters.until and filters.since > filters.until:
        raise Refusal(422, f"since: expected {filters.until} or earlier, found {filters.since}")
    return condition(filters.tags, filters.since, filters.until)


def picture_response(request: Request, file: File) -> Response:
    """A picture, or word that the client's copy is still good."""
    headers = {"ETag": file.mark, "Cache-Control": "private, no-cache"}
    if file.mark in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.data, media_type="image/jpeg", headers=headers)


async def refuse(request: Request, refusal: Exception) -> Response:
    """A refusal as JSON."""
    del request
    return answer(refusal if isinstance(refusal, Refusal) else Refusal(500, "something went wrong"))


async def refuse_http(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown addresses and methods, broken forms."""
    status = getattr(error, "status_code", 500)
    sentence = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.method} is not what {request.url.path} is for",
    }.get(status, str(getattr(error, "detail", "the request cannot be served")))
    refusal = Refusal(status, sentence)
    refusal.headers |= dict(getattr(error, "headers", None) or {})
    return answer(refusal)


async def refuse_values(request: Request, error: Exception) -> Response:
    """A value that is not as the API's description says."""
    del request
    errors = list(error.errors()) if isinstance(error, RequestValidationError) else []
    return answer(Refusal(422, sentence_of(errors) if errors else "a value is not as expected"))
