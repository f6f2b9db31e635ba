"""Errors of a request, in OpenAI's form. A message names what came by its key, and never repeats a text of the user."""

import json
from typing import Any

from starlette.responses import Response

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is refused. status: of HTTP. param: the key of the body that is wrong, if one is."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def to_json(value: Any) -> str:
    """ASCII alone, so that half of a surrogate pair in a key cannot break the answer. Raises ValueError for NaN."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")
