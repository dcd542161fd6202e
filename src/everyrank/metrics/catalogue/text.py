"""Metrics of text: how surprised a language model is, and how far a transcript is off.

    perplexity = Perplexity(ignore=-100)
    perplexity.update(logits, targets)

A loss that is there already need not be computed again:

    perplexity = PerplexityOfLoss()
    perplexity.update(loss, tokens)    # the mean loss of a batch, and of how many tokens

Losses are in nats, as those of all frameworks are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from everyrank.arrays import Arrays, arrays_of
from everyrank.errors import MetricError, OptionError
from everyrank.metrics.declared import DeclaredMetric
from everyrank.metrics.states import State


class _PerToken(DeclaredMetric):
    """e to the power of the mean loss of a token."""

    nats = State("sum")
    tokens = State("sum")

    def finish(self, nats: Any, tokens: Any) -> Any:
        """Divide, and take the exponential."""
        return arrays_of(nats).exp(nats / tokens)


class Perplexity(_PerToken):
    """e to the power of the mean negative log likelihood of the targets, from logits.

    Logits are (..., classes) and targets (...). Targets that are `ignore` are left out. A target that
    is no class makes the result NaN; with `validate=True` it is refused, which waits for the device
    at every update.
    """

    def __init__(self, *, ignore: int | None = None, validate: bool = False) -> None:
        if ignore is not None and (isinstance(ignore, bool) or not isinstance(ignore, int)):
            raise OptionError(
                f"ignore={ignore!r} must be a target to leave out, such as -100, or None."
            )
        self.ignore = ignore
        self.validate = validate

    def batch(self, logits: Any, targets: Any) -> Mapping[str, Any]:
        """Take in logits (..., classes) and targets (...)."""
        xp = arrays_of(logits)
        _check_logits(xp, logits, targets)
        classes, targets = logits.shape[-1], xp.whole(targets)
        kept = targets != self.ignore if self.ignore is not None else targets == targets
        known = (targets >= 0) & (targets < classes)
        if self.validate and (kept & ~known).any():
            raise MetricError(
                f"`targets` holds {targets[kept & ~known][0]}, but must be from 0 to {classes - 1}"
                + ("" if self.ignore is None else f" or ignore={self.ignore}")
                + ". Set ignore= to what marks padding."
            )
        # What is no class must not reach the device as an index.
        index = xp.clip(targets, 0, classes - 1)[..., None]
        chosen = xp.take(logits, index, axis=-1)[..., 0]
        nats = xp.wide(xp.logsumexp(logits)) - xp.wide(chosen)
        nats = xp.where(kept, xp.where(known, nats, math.nan), 0.0)
        return {"nats": xp.total(nats), "tokens": xp.total(kept)}


class PerplexityOfLoss(_PerToken):
    """e to the power of the mean loss of a token, from losses.

    `update` takes the mean loss, and of how many tokens it is the mean; both may also be arrays, such
    as one for each sequence. A loss of no tokens is left out, also if it is NaN.
    """

    def batch(self, loss: Any, tokens: Any) -> Mapping[str, Any]:
        """Take in mean losses, and how many tokens each is of."""
        nats, tokens = _nats(loss, tokens)
        return {"nats": nats, "tokens": tokens}


class BitsPerByte(DeclaredMetric):
    """The loss in bits for each byte of the text, which does not depend on how it is tokenized.

    `update` takes the mean loss, of how many tokens it is the mean, and how many bytes of text these
    are. Of a loss that is summed up over the tokens, tokens is 1. All may also be arrays, such as one
    for each sequence. A loss of no tokens is left out, also if it is NaN.
    """

    nats = State("sum")
    bytes = State("sum")

    def batch(self, loss: Any, tokens: Any, bytes: Any) -> Mapping[str, Any]:
        """Take in mean losses, and how many tokens and bytes each is of."""
        xp = arrays_of(loss)
        return {"nats": _nats(loss, tokens)[0], "bytes": xp.total(xp.array(bytes))}

    def finish(self, nats: Any, bytes: Any) -> Any:
        """Divide."""
        return nats / (bytes * math.log(2))


class _ErrorRate(DeclaredMetric):
    """The edits that make a reference of a prediction, as a share of the length of the references."""

    edits = State("sum")
    length = State("sum")

    texts = True

    def batch(self, predictions: Any, references: Any) -> Mapping[str, Any]:
        """Compare texts one by one, or those of a list of each; works on the host."""
        predictions = _texts("predictions", predictions)
        references = _texts("references", references)
        if len(predictions) != len(references):
            raise MetricError(
                f"`predictions` has {len(predictions)} texts, but `references` {len(references)}. Pass "
                "one reference for each prediction."
            )
        parts = [
            (self._parts(p), self._parts(r)) for p, r in zip(predictions, references, strict=True)
        ]
        edits = sum(edit_distance(p, r) for p, r in parts)
        return {"edits": edits, "length": sum(len(r) for _, r in parts)}

    def finish(self, edits: Any, length: Any) -> Any:
        """Divide."""
        return edits / length

    def _parts(self, text: str) -> Sequence[str]:
        raise NotImplementedError


class WordErrorRate(_ErrorRate):
    """How many words were inserted, left out or replaced, for each word of the references.

    Words are what whitespace separates; their case and punctuation count. Texts are compared on the
    host, of any length: two of 1,000 words take some 10 ms.
    """

    def _parts(self, text: str) -> Sequence[str]:
        return text.split()


class CharacterErrorRate(_ErrorRate):
    """How many characters were inserted, left out or replaced, for each character of the references.

    Characters are code points, spaces among them.
    """

    def _parts(self, text: str) -> Sequence[str]:
        return text


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Give the least number of insertions, deletions and replacements that make `b` of `a`."""
    if len(a) < len(b):
        a, b = b, a
    numbers: dict[Hashable, int] = {}
    row_of, column_of = (
        np.array([numbers.setdefault(part, len(numbers)) for part in parts], np.int64)
        for parts in (a, b)
    )
    places = np.arange(len(b) + 1)
    row = places.copy()
    for part in row_of:
        # Without insertions each place depends on the row before alone. Insertions go along the row
        # at a cost of one each: where that is taken out, it is a running minimum.
        above = row + 1
        np.minimum(above[1:], row[:-1] + (column_of != part), out=above[1:])
        row = np.minimum.accumulate(above - places) + places
    return int(row[-1])


def _nats(loss: Any, tokens: Any) -> tuple[Any, Any]:
    """Give the summed loss, and how many tokens it is of."""
    xp = arrays_of(loss)
    loss, tokens = xp.wide(xp.array(loss)), xp.wide(xp.array(tokens))
    if loss.shape != tokens.shape:
        raise MetricError(
            f"`loss` has the shape {tuple(loss.shape)}, but `tokens` {tuple(tokens.shape)}. Pass the "
            "number of tokens that each loss is the mean of, for example loss.mean() and their number."
        )
    return xp.total(xp.where(tokens == 0, 0.0, loss * tokens)), xp.total(tokens)


def _check_logits(xp: Arrays, logits: Any, targets: Any) -> None:
    if logits.shape[:-1] != targets.shape or not logits.ndim or not logits.shape[-1]:
        raise MetricError(
            f"`logits` has the shape {tuple(logits.shape)} and `targets` {tuple(targets.shape)}, but "
            "they must be (..., classes) and (...). Move the axis of classes to the end."
        )
    if not xp.is_float(logits) or xp.is_float(targets):
        raise MetricError(
            f"`logits` is of {logits.dtype} and `targets` of {targets.dtype}, but they must be floats "
            "and integers. Pass class numbers as targets, for example one_hot.argmax(-1)."
        )


def _texts(name: str, texts: Any) -> tuple[str, ...]:
    """Take one text or several as a tuple, which no framework takes for an array."""
    texts = (texts,) if isinstance(texts, str) else texts
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise MetricError(f"`{name}` is {texts!r:.80}, but must be a text or a list of texts.")
    return tuple(texts)
