"""Threads that take turns at something that serves them all."""

from threading import Condition

__all__ = ["Turns"]


class Turns:
    """One thread has the turn; whoever comes meanwhile waits for its end, instead of for a turn of its own.

    A lock would not do: the thread that has just released it mostly gets it again, and the others would not see for a
    long time what has been done for them.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._taken = False
        self._ended = 0

    def take(self) -> bool:
        """Takes the turn, if nobody has it; returns whether that was so."""
        with self._changed:
            free, self._taken = not self._taken, True
            return free

    def take_or_wait(self) -> bool:
        """Takes the turn, or waits until the one under way ends; returns whether it was taken."""
        with self._changed:
            ended = self._ended
            if self.take():
                return True
            self._changed.wait_for(lambda: self._ended != ended)
            return False

    def end(self) -> None:
        """Ends the turn."""
        with self._changed:
            self._taken = False
            self._ended += 1
            self._changed.notify_all()
