"""Keeps the chunks of requests until their stream, or `step`, fetches them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specjax.api.results import Chunk, ChunkWriter
from specjax.engine.request import Request


class Outbox:
    """The open requests of an engine, and the chunks that were not fetched yet.

    A request is a group of n samples with one id. It is over once the last chunk of each
    sample was handed out: several may end in one step, and are handed out one by one.

    Not thread-safe.
    """

    def __init__(self):
        self._writer = ChunkWriter()
        self._samples: dict[int, list[Request]] = {}
        # The samples of each request whose last chunk was not handed out.
        self._unended: dict[int, set[Request]] = {}
        self._mail: dict[int, list[Chunk]] = {}  # chunks of streamed requests
        self._left: set[int] = set()  # open requests whose streams are no longer read
        self._unclaimed: list[Chunk] = []

    @property
    def has_work(self) -> bool:
        """Whether a request is not over, or a chunk is left for `take_unclaimed`."""
        return bool(self._samples or self._unclaimed)

    def open(self, request_id: int, samples: list[Request], *, is_streamed: bool) -> None:
        """Adds the samples of a new request."""
        self._samples[request_id] = samples
        self._unended[request_id] = set(samples)
        if is_streamed:
            self._mail[request_id] = []

    def ids(self) -> list[int]:
        """Returns the ids of requests that are not over."""
        return list(self._samples)

    def samples(self, request_id: int) -> list[Request]:
        """Returns the samples of a request that is not over; [] for any other."""
        return self._samples.get(request_id, [])

    def unended(self) -> Iterator[Request]:
        """Yields the samples whose last chunk was not handed out."""
        for samples in list(self._unended.values()):
            yield from list(samples)

    def hand_out(self, moved: Iterable[Request]) -> list[list[Request]]:
        """Makes chunks of the samples' new text, except for samples that had their last chunk.

        Returns:
          The samples of each request that is over now.
        """
        over = []
        for request in moved:
            request_id = request.prompt_index
            unended = self._unended.get(request_id)
            if unended is None or request not in unended:
                continue
            chunk = self._writer.chunk(request)
            if request_id not in self._left:
                self._mail.get(request_id, self._unclaimed).append(chunk)
            if request.is_finished:
                unended.discard(request)
            if not unended:
                over.append(self._samples.pop(request_id))
                del self._unended[request_id]
                self._left.discard(request_id)
        return over

    def take_unclaimed(self) -> list[Chunk]:
        """Returns the chunks of requests that are not streamed."""
        chunks, self._unclaimed = self._unclaimed, []
        return chunks

    def take_mail(self, request_id: int) -> tuple[list[Chunk], bool]:
        """Returns the chunks of a streamed request, and whether they are its last."""
        chunks, self._mail[request_id] = self._mail[request_id], []
        return chunks, request_id not in self._samples

    def has_news(self, request_id: int) -> bool:
        """Returns whether a streamed request has chunks, or is over."""
        return bool(self._mail.get(request_id)) or request_id not in self._samples

    def leave(self, request_id: int) -> None:
        """Drops the chunks of a stream that is no longer read, present and future ones."""
        self._mail.pop(request_id, None)
        if request_id in self._samples:
            self._left.add(request_id)

    def check_is_empty(self) -> None:
        """Asserts that it is empty, as when every request is over and every chunk fetched."""
        for name, table in vars(self).items():
            assert name == "_writer" or not table, f"{name} holds {table!r}"
        assert not self._writer.num_open, "a chunk writer remembers requests"
