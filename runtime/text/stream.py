"""The text of an output that grows token by token."""

from collections.abc import Sequence

from dspark.runtime.text.tokenizer import TextProcessor

__all__ = ["TextStream"]

_REPLACEMENT = "\ufffd"  # stands in decoded text where bytes are no character (yet)


class TextStream:
    """The text of one output while its tokens arrive, up to the first stop string.

    Text is *decided* when no later token can change it. Two things keep it open: a character whose bytes are still
    incomplete, and a run of byte-fallback tokens, all of which turn into U+FFFD if the whole run is not valid UTF-8.
    A stop string counts as soon as the tokens so far spell it, open or not; the search goes token by token, and among
    stop strings that one token completes the one that begins first wins.

    Args:
        processor: Decodes the tokens.
        stop: Non-empty strings that end the text.

    Attributes:
        text: The decided text; after ``finish`` all of it, without the stop string.
        stopped: Whether a stop string ended the text.
        kept: How many tokens of the last push belong to the output. The last of them completed the stop string if one
            was found.
    """

    def __init__(self, processor: TextProcessor, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self.kept = 0
        self._processor = processor
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._returned = 0  # characters of ``text`` that pushes have returned
        # Decoding all tokens anew at every push would take quadratic time. Only the window is decoded; its first token
        # is there because a decoder treats a first token differently: the window's first ``_overlap`` characters are
        # its text, and so are the last ones of the first ``_before`` characters of ``text``.
        self._window: list[int] = []
        self._overlap = 0
        self._before = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that they decide beyond what was returned before.

        Text that may be the beginning of a stop string is returned once it is known not to be. Tokens after the one
        that completed a stop string are ignored.
        """
        self.kept = 0
        for token in token_ids:
            if self.stopped:
                break
            self.kept += 1
            if not self._processor.is_silent(token):
                self._read(token)
        return self._return_up_to(len(self.text) - self._undecided())

    def finish(self) -> str:
        """Ends the output and returns the rest of its text."""
        if not self.stopped and not self._stops_in(spelled := self._spelled()):
            self.text = spelled
        return self._return_up_to(len(self.text))

    def _read(self, token: int) -> None:
        self._window.append(token)
        spelled = self._spelled()
        whole = spelled.rstrip(_REPLACEMENT)
        if self._stops_in(whole) or token in self._processor.byte_ids:
            return
        self.text = whole
        if whole == spelled:
            self._move_window(token)

    def _spelled(self) -> str:
        """All text so far as the tokenizer would decode it now."""
        return self.text[: self._before] + self._processor.decode(self._window)[self._overlap :]

    def _stops_in(self, text: str) -> bool:
        """Whether ``text``, the decided text and more, holds a stop string; if so, the output ends there."""
        found = [at for stop in self._stop if (at := text.find(stop, max(0, len(self.text) - len(stop) + 1))) >= 0]
        if found:
            self.text = text[: min(found)]
            self.stopped = True
        return self.stopped

    def _move_window(self, token: int) -> None:
        """Begins the window at its last token."""
        alone = self._processor.decode([token])
        if alone.strip():  # else what a decoder strips from the beginning would reach into the next token
            self._window = [token]
            self._overlap = len(alone)
            self._before = len(self.text)

    def _undecided(self) -> int:
        """Length of the longest end of ``text`` with which a stop string begins."""
        if self.stopped:
            return 0
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0

    def _return_up_to(self, end: int) -> str:
        fresh = self.text[self._returned : end]
        self._returned = end
        return fresh
