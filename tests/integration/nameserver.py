"""A name server on loopback whose answers a test changes."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

UDP_SIZE = 512


class NameServer:
    """Answers over UDP from `hosts`, and over TCP what does not fit; a context manager.

    Names have no dot at the end. One that is not in `hosts` does not exist; one that has no
    address of the kind that is asked for is answered with none. `mode` is `ok`, `servfail` or
    `silent`.
    """

    def __init__(self, hosts: dict[str, list[str]] | None = None) -> None:
        self.hosts = hosts or {}
        self.mode = "ok"
        self.num_asked = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._listener = socket.create_server(self._socket.getsockname())
        self._threads = [
            threading.Thread(target=serve, daemon=True)
            for serve in (self._serve, self._serve_streams)
        ]

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()
        return f"{host}:{port}"

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ending:
            ending.sendto(b"", self._socket.getsockname())
        socket.create_connection(self._listener.getsockname()).close()
        for thread in self._threads:
            thread.join(timeout=5)
        self._socket.close()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            packet, sender = self._socket.recvfrom(4096)
            if not packet:
                return
            self.num_asked += 1
            if self.mode != "silent":
                answer = self._answer(dns.message.from_wire(packet))
                if len(answer.to_wire()) > UDP_SIZE:
                    answer.answer.clear()
                    answer.flags |= dns.flags.TC
                self._socket.sendto(answer.to_wire(), sender)

    def _serve_streams(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rwb") as stream:
                if not (size := stream.read(2)):
                    return
                query = dns.message.from_wire(stream.read(int.from_bytes(size, "big")))
                answer = self._answer(query).to_wire()
                stream.write(len(answer).to_bytes(2, "big") + answer)

    def _answer(self, query: dns.message.Message) -> dns.message.Message:
        answer = dns.message.make_response(query, recursion_available=True)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        if self.mode == "servfail":
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif name not in self.hosts:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        else:
            v6 = question.rdtype == dns.rdatatype.AAAA
            found = [address for address in self.hosts[name] if (":" in address) == v6]
            if found:
                rrset = dns.rrset.from_text_list(
                    question.name, 5, question.rdclass, question.rdtype, found
                )
                answer.answer.append(rrset)
        return answer
