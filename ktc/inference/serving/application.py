"""The server of transformers in front of the engine.

Input: `ServedModels` and `Limits`. Output: the FastAPI application, reduced to the paths that the models support, with
`/ready`, `/metrics` and, for those who have a key, `/updates` added. Every refusal is an error object of OpenAI's API.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState, Modality

from ktc.inference.serving import chat_page, handlers, update_routes
from ktc.inference.serving.answer_grammar import AnswerGrammars
from ktc.inference.serving.answers import Answers
from ktc.inference.serving.disconnect import CancelOnDisconnect
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.guard import Gate, Guard
from ktc.inference.serving.metrics import CONTENT_TYPE, Metrics
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.models import LoadedAdapters, ServedModels
from ktc.inference.serving.refusals import RequestRefused, error_object
from ktc.inference.serving.request import Limits
from ktc.inference.serving.request_images import ImageAllowance
from ktc.inference.serving.request_log import RequestLog
from ktc.inference.serving.update_routes import UpdateAccess
from ktc.inference.serving.updates import Updates

PATHS: Final = frozenset({chat_page.PATH, "/health", "/ready", "/metrics", "/v1/models", "/v1/chat/completions",
                          "/v1/completions", "/v1/responses", "/v1/embeddings"})  # fmt: skip
_SWITCH: Final = 5e-4  # seconds after which the event loop lets the engine run: a step on a GPU takes a few times that
_HANDLERS: Final = ("chat_completion", "completion", "response")


@dataclass(frozen=True, slots=True)
class Application:
    """The ASGI application, and the engine that it asks. `unbatched_reason` is as of `ModelRunner`."""

    app: Any
    engine: Engine
    unbatched_reason: str


def make_application(
    models: ServedModels, limits: Limits, gate: Gate, access: UpdateAccess | None = None,
    log_line: Callable[[str], None] | None = None, images: ImageAllowance | None = None,
) -> Application:  # fmt: skip
    """Return the application with its engine started; the end of the application stops the engine.

    With `access` it has the paths of updates. `log_line` gets a line for each request that has ended.
    """
    opened = models.default.opened
    adapters = LoadedAdapters(opened.model)
    adapters.use(models.default.adapter)
    runner = ModelRunner(opened.model)
    metrics = Metrics()
    requests = RequestLog(log_line)
    answers = Answers(models, metrics, requests, images or ImageAllowance())
    engine = Engine(runner, limits, answers.emit, adapters)
    answers.engine = engine
    metrics.watch(engine)
    metrics.watch_experts(opened.model)
    engine.start()
    if runner.graph_rows() is not None:
        sys.setswitchinterval(_SWITCH)
        engine.capture(models.default.adapter)
    app = _application(models, answers, metrics, gate, requests)
    if access is not None:
        update_routes.add_routes(app, access, Updates(access.root, models, adapters, engine, metrics))
    return Application(app, engine, runner.unbatched_reason)


def _application(
    models: ServedModels, answers: Answers, metrics: Metrics, gate: Gate, requests: RequestLog
) -> Any:  # fmt: skip
    build: Any = build_server
    manager, state = _Models(models, answers), _Generation(answers)
    given: dict[str, Any] = {
        "chat_handler": handlers.Chat(manager, state),
        "completion_handler": handlers.Completion(manager, state),
        "response_handler": handlers.Response(manager, state),
        "transcription_handler": None,
        "systemone_handler": None,
        "generation_state": state,
    }
    grammars = AnswerGrammars()
    for handler in ("chat_handler", "completion_handler", "response_handler"):
        given[handler].grammars, given[handler].images = grammars, answers.images
    for path in _HANDLERS:
        logging.getLogger(f"transformers.cli.serving.{path}").addFilter(_is_more_than_a_request)
    known = inspect.signature(build).parameters  # releases before 5.23 have fewer
    app = build(manager, **{name: value for name, value in given.items() if name in known})

    @app.get("/metrics")
    def read_metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/ready")
    def is_ready() -> Response:  # pyright: ignore[reportUnusedFunction]
        reason = answers.engine.not_ready
        return JSONResponse({"status": reason or "ok"}, 503 if reason else 200)

    @app.post("/v1/embeddings")
    async def refuse_embeddings() -> Response:  # pyright: ignore[reportUnusedFunction]
        message = "embeddings are not computed: the model writes text; use the server of an embedding model"
        raise RequestRefused(501, message)

    chat_page.add_route(app)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in PATHS]
    app.router.redirect_slashes = False

    async def refuse(request: Any, error: Any) -> JSONResponse:
        refusal = error_object(error)
        if (logged := requests.of(getattr(request.state, "request_id", ""))) is not None:
            logged.refused = refusal["error"]["code"]
        return JSONResponse(refusal, error.status_code, error.headers)

    app.add_exception_handler(HTTPException, refuse)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_middleware(CancelOnDisconnect)
    methods = methods_of(app.router.routes)
    app.add_middleware(Guard, gate=gate, requests=requests, methods=methods)  # outside of the others
    return app


def methods_of(routes: Iterable[Any]) -> dict[str, frozenset[str]]:
    """Return the methods of each path, of all of its routes."""
    methods = dict[str, frozenset[str]]()
    for route in routes:
        methods[route.path] = methods.get(route.path, frozenset()) | frozenset(getattr(route, "methods", None) or ())
    return methods


def _is_more_than_a_request(record: logging.LogRecord) -> bool:
    """Leave out the warning that the handlers of transformers log for every request; `/metrics` counts them."""
    return not str(record.msg).startswith("[Request received]")


async def _invalid(_: Any, error: Exception) -> JSONResponse:
    return JSONResponse(error_object(RequestRefused(400, f"the body is not what this path takes: {error}")), 400)


class _Models(ModelManager):
    """A model manager with the loaded model under each of its names."""

    def __init__(self, models: ServedModels, answers: Answers) -> None:
        super().__init__()
        self.default = next(iter(models.names))
        self._models, self._answers, self._since = models, answers, int(time.time())

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, model_id: str, *_: Any, **__: Any) -> Any:
        served = self._models.names.get(model_id)
        if served is None:
            message = f"there is no model `{model_id[:60]}`; /v1/models lists {', '.join(self._models.names)}"
            raise RequestRefused(404, message, "model_not_found", "model")
        return served.opened.model, served.opened.tokenizer

    def processor_of(self, model_id: str) -> Any:
        """Return the processor of a model by its name, None for one that reads text alone."""
        return self._models.names[model_id].opened.processor

    @staticmethod
    def get_model_modality(*_: Any, **__: Any) -> Modality:
        return Modality.LLM

    def get_gen_models(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, *_: Any, **__: Any
    ) -> list[dict[str, Any]]:
        return [
            {"id": name, "object": "model", "created": self._since, "owned_by": "ktc"} for name in self._models.names
        ]

    def shutdown(self) -> None:
        """Stop the engine."""
        self._answers.engine.stop()


class _Generation(GenerationState):
    """One place answers for all paths and models."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def get_manager(self, *_: Any, **__: Any) -> Any:
        return self._answers
