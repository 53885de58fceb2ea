"""uvicorn's HTTP protocol for this service: an offer to upgrade is ignored, and a request can abort its connection."""

from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ABORT: Final = "cloze.abort"  # extension of the scope
OFFER: Final = (b"upgrade", b"http2-settings")  # headers, and what `connection` says of them


class Protocol(HttpToolsProtocol):
    """A server may ignore what `upgrade` offers (RFC 9110, section 7.8); httptools would leave out the body then."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}  # a fresh scope of this request

    def on_headers_complete(self) -> None:
        if not self._offered:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offered:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offered:
                self._begin_again(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    @property
    def _offered(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _begin_again(self, rest: bytes) -> None:
        """Read the request once more, without the offer."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(each for each in value.split(b",") if each.strip().lower() not in OFFER).strip()
            if name not in OFFER and (value or name != b"connection"):
                lines.append(b"%s: %s" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)
