"""A place in a part of a corpus, and the samples from there on, by arithmetic alone."""

from typing import NamedTuple


class Reading(NamedTuple):
    """A place in a part of a corpus.

    stream: that of its order.  tokens: those of the part.  length: inputs of the samples into which the epoch was cut.
    epoch, taken: the epoch, and how many of its samples are taken.  offset: tokens that are taken of those
    behind, by samples of other lengths.
    """

    stream: int
    tokens: int
    length: int
    epoch: int = 0
    taken: int = 0
    offset: int = 0

    def epoch_size(self, length: int) -> int:
        """Return the samples of an epoch that is cut into samples of `length` inputs."""
        return max(0, self.tokens - 1) // length

    def rest(self, length: int) -> int:
        """Return how many samples of `length` come from an epoch that was cut into samples of another length."""
        if not self.offset and (self.length == length or not self.taken):
            return 0
        return max(0, (self.epoch_size(self.length) - self.taken) * self.length - self.offset) // length

    def first(self, length: int) -> int:
        """Return the number of the first sample behind `rest`, counted over epochs of samples of `length`."""
        if not self.offset and (self.length == length or not self.taken):
            return self.epoch * self.epoch_size(length) + self.taken
        return (self.epoch + 1) * self.epoch_size(length)

    def after(self, count: int, length: int) -> "Reading":
        """Return the place behind the next `count` samples of `length` inputs."""
        rest = self.rest(length)
        if count < rest or not count:
            return self._replace(offset=self.offset + count * length)
        epoch, taken = divmod(self.first(length) + count - rest, self.epoch_size(length))
        return Reading(self.stream, self.tokens, length, epoch, taken)
