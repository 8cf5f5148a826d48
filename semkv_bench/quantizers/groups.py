"""Which values share metadata."""

from dataclasses import dataclass

from torch import Tensor

from semkv_bench.errors import UsageError

__all__ = ["Group"]

_AXES, _HEADS = ("token", "channel"), ("each", "all")
CLASS = "class"


@dataclass(frozen=True)
class Group:
    """Values that are coded with one range.

    axis ``token``: ``channels`` neighbouring channels of one token (None: all of the head), of each head or, with
    ``heads: all``, of the heads' vectors one behind the other. axis ``channel``: ``tokens`` neighbouring tokens of one
    channel; ``class``: all tokens of the piece that have the same number of levels.
    """

    axis: str = "token"
    channels: int | None = None
    tokens: int | str | None = None
    heads: str = "each"

    def __post_init__(self) -> None:
        for name, known in (("axis", _AXES), ("heads", _HEADS)):
            if getattr(self, name) not in known:
                raise UsageError(f"group.{name}={getattr(self, name)} is not known; use {' or '.join(known)}")
        for name in ("channels", "tokens"):
            size = getattr(self, name)
            whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
            if size is not None and not whole and not (name == "tokens" and size == CLASS):
                raise UsageError(f"group.{name}={size} must be a whole number of at least 1")
        if (self.tokens is None) == (self.axis == "channel") or (self.axis == "channel" and self.channels):
            raise UsageError(
                "a group has tokens with axis=channel, and may have channels with axis=token, not both"
            )

    def check(self, head_dim: int, heads: int | None = None) -> None:
        """Raise UsageError if the vectors do not fall into whole groups; heads None: not known yet."""
        joined = self.heads == "all"
        if self.channels is None or (joined and heads is None):
            return
        width = head_dim * heads if joined else head_dim
        if width % self.channels:
            whose = f"the {width} channels of all heads" if joined else f"head_dim {head_dim}"
            legal = [n for n in range(2, width + 1) if width % n == 0]
            raise UsageError(
                f"group.channels={self.channels} does not divide {whose}; legal are {', '.join(map(str, legal))}"
            )

    def members(self, head_dim: int, heads: int, tokens: int | None) -> float:
        """Values in one group; infinite where all tokens share and their number is not known."""
        if self.axis == "channel":
            return self.tokens if isinstance(self.tokens, int) else float("inf") if tokens is None else tokens
        return self.channels or (head_dim * heads if self.heads == "all" else head_dim)

    def split(self, y: Tensor) -> Tensor:
        """y [units, heads, tokens, channels] as [..., groups, members]."""
        if self.axis == "channel":
            lines = y.transpose(2, 3)
            return lines.unflatten(-1, (-1, self.tokens if isinstance(self.tokens, int) else y.shape[2]))
        lines = y.transpose(1, 2).flatten(2) if self.heads == "all" else y
        return lines.unflatten(-1, (-1, self.channels or lines.shape[-1]))

    def join(self, grouped: Tensor, heads: int) -> Tensor:
        """Inverse of ``split``."""
        lines = grouped.flatten(-2)
        if self.axis == "channel":
            return lines.transpose(2, 3)
        return lines.unflatten(-1, (heads, -1)).transpose(1, 2) if self.heads == "all" else lines
