"""Text: perplexity from logits and losses, bits per byte, and error rates of transcripts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from everyrank.errors import MetricError, OptionError
from everyrank.metrics.catalogue.text import (
    BitsPerByte,
    CharacterErrorRate,
    Perplexity,
    PerplexityOfLoss,
    WordErrorRate,
    edit_distance,
)
from everyrank.metrics.collection import Collection


def value(metric: Any, *batches: Any) -> float:
    """Give what a metric computes from batches of arguments."""
    for batch in batches:
        metric.update(*batch)
    return float(metric.compute())


def some_logits(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Give logits of the shape, and targets."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, shape[-1], shape[:-1], generator=generator)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 5, 7), (2, 1)])
def test_perplexity_is_that_of_the_cross_entropy(shape: tuple[int, ...]):
    """It is e to the power of what torch has as the loss, for logits of any leading shape."""
    logits, targets = some_logits(*shape)
    loss = cross_entropy(logits.reshape(-1, shape[-1]), targets.reshape(-1))
    assert value(Perplexity(), (logits, targets)) == pytest.approx(math.exp(loss), rel=1e-12)


def test_torchmetrics_has_the_same_perplexity():
    """With padding left out as well."""
    from torchmetrics.functional.text import perplexity

    logits, targets = some_logits(3, 6, 5)
    targets[0, 2:] = -100
    expected = float(perplexity(logits, targets, ignore_index=-100))
    assert value(Perplexity(ignore=-100), (logits, targets)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ignore", [-100, 0, 4, 99, 255])
def test_what_is_ignored_counts_nothing(ignore: int):
    """Padding may be any number, a class or none, and its logits anything, also NaN."""
    logits, targets = some_logits(6, 5)
    targets[targets == ignore] = 1
    expected = value(Perplexity(), (logits[:4], targets[:4]))
    targets[4:] = ignore
    logits[4:] = math.nan
    assert value(Perplexity(ignore=ignore), (logits, targets)) == pytest.approx(expected)
    assert math.isnan(value(Perplexity(ignore=ignore), (logits[4:], targets[4:])))
    if ignore == 255:
        short = (logits[:4], targets[:4].to(torch.uint8))
        assert value(Perplexity(ignore=-100), short) == pytest.approx(expected)


def test_a_target_that_is_no_class_is_nan_or_refused():
    """It never reaches the device as an index; with validate=True the value is named."""
    logits, targets = some_logits(6, 5)
    for wrong in (-100, 5, 2**40):
        targets[3] = wrong
        assert math.isnan(value(Perplexity(), (logits, targets)))
        with pytest.raises(
            MetricError, match=rf"`targets` holds {wrong}, .* from 0 to 4 or ignore=-1"
        ):
            Perplexity(ignore=-1, validate=True).update(logits, targets)
    targets[3] = 2
    assert math.isfinite(value(Perplexity(validate=True), (logits, targets)))


def test_logits_may_be_large_masked_or_halves():
    """Nothing overflows, what is masked has no probability, and halves are summed up in 32 bits."""
    logits, targets = some_logits(40, 500)
    expected = value(Perplexity(), (logits, targets))
    assert value(Perplexity(), (logits + 1e6, targets)) == pytest.approx(expected, rel=1e-6)
    for dtype in (torch.bfloat16, torch.float16):
        halves = logits.to(dtype)
        exactly = value(Perplexity(), (halves.double(), targets))
        assert value(Perplexity(), (halves, targets)) == pytest.approx(exactly, rel=1e-5)
    logits[torch.arange(40), targets] = -math.inf
    assert value(Perplexity(), (logits, targets)) == math.inf
    logits[0] = -math.inf
    assert math.isnan(value(Perplexity(), (logits, targets)))


def test_wrong_logits_and_options_say_what_is_right():
    """Other shapes and dtypes are refused, and so is an ignore that is no target."""
    logits, targets = some_logits(4, 5)
    for wrong in ((logits.T, targets), (logits[0, 0], targets[0]), (logits[:, :0], targets)):
        with pytest.raises(MetricError, match=r"must be \(\.\.\., classes\) and \(\.\.\.\)"):
            Perplexity().update(*wrong)
    for wrong in ((logits, targets.double()), (logits.long(), targets)):
        with pytest.raises(MetricError, match="must be floats and integers"):
            Perplexity().update(*wrong)
    for ignore in (True, 1.5, "pad"):
        with pytest.raises(OptionError, match="ignore="):
            Perplexity(ignore=ignore)  # type: ignore[arg-type]


def test_losses_of_batches_are_weighted_by_their_tokens():
    """Mean losses and token counts give the perplexity of all tokens, and bits for all bytes."""
    logits, targets = some_logits(20, 7)
    parts = [slice(0, 3), slice(3, 20)]
    losses = [(cross_entropy(logits[p], targets[p]), p.stop - p.start) for p in parts]
    whole = value(Perplexity(), (logits, targets))
    assert value(PerplexityOfLoss(), *losses) == pytest.approx(whole, rel=1e-12)
    as_arrays = tuple(
        torch.tensor([float(x) for x in column]) for column in zip(*losses, strict=True)
    )
    assert value(PerplexityOfLoss(), as_arrays) == pytest.approx(whole, rel=1e-6)
    bits = value(BitsPerByte(), *((*pair, 50) for pair in losses))
    assert bits == pytest.approx(20 * math.log2(whole) / 100, rel=1e-12)
    summed = [(loss * tokens, 1, 50) for loss, tokens in losses]
    assert value(BitsPerByte(), *summed) == pytest.approx(bits, rel=1e-12)


def test_a_loss_of_no_tokens_says_nothing():
    """The mean over nothing is NaN, and is left out; another NaN is not."""
    assert value(PerplexityOfLoss(), (1.0, 3), (math.nan, 0)) == pytest.approx(math.e)
    assert value(BitsPerByte(), (math.log(2), 8, 4), (math.nan, 0, 0)) == pytest.approx(2.0)
    assert math.isnan(value(PerplexityOfLoss(), (1.0, 3), (math.nan, 1)))
    assert math.isnan(value(PerplexityOfLoss(), (math.nan, 0)))


def test_losses_need_their_tokens():
    """Losses for each token and one count of them do not go together."""
    with pytest.raises(MetricError, match=r"`loss` has the shape \(8,\), but `tokens` \(\)"):
        PerplexityOfLoss().update(torch.ones(8), 8)


TEXTS = st.text(alphabet="ab c", max_size=12)


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS)
def test_law_edits_are_those_of_the_textbook(a: str, b: str):
    """The distance is that of the recurrence, which is also that of torchmetrics."""
    from torchmetrics.functional.text.helper import _edit_distance

    assert edit_distance(a, b) == edit_distance(b, a) == _edit_distance(list(a), list(b))
    assert edit_distance(a.split(), b.split()) == _edit_distance(a.split(), b.split())


def test_error_rates_are_those_of_torchmetrics():
    """Edits over all texts are divided by the words, or characters, of all references."""
    from torchmetrics.functional.text import char_error_rate, word_error_rate

    predictions = ["this is the prediction", "there is an other sample", "", "two  spaces\nhere"]
    references = ["this is the reference", "there is another one", "all of it", "two spaces here"]
    for metric, reference in (
        (WordErrorRate(), word_error_rate),
        (CharacterErrorRate(), char_error_rate),
    ):
        metric.update(predictions[0], references[0])
        metric.update(predictions[1:], tuple(references[1:]))
        expected = float(reference(predictions, references))
        assert float(metric.compute()) == pytest.approx(expected, rel=1e-6)


def test_empty_references_have_no_rate_of_their_own():
    """Words for nothing are errors without a length, and nothing for nothing is NaN."""
    assert value(WordErrorRate(), (["a b"], [""])) == math.inf
    assert value(WordErrorRate(), (["a b", "c"], ["", "c d"])) == 1.5
    assert math.isnan(value(WordErrorRate(), (["", ""], ["", " "])))
    assert math.isnan(value(CharacterErrorRate(), ([], [])))


def test_long_texts_are_compared_by_rows():
    """A thousand words that were shifted by one are two edits."""
    words = [str(i) for i in range(1000)]
    assert value(WordErrorRate(), (" ".join(words[1:]), " ".join(words[:-1]))) == 2 / 999
    assert value(CharacterErrorRate(), ("äöü" * 300, "äöu" * 300)) == 1 / 3


def test_texts_may_come_through_a_collection():
    """A pair of lists of texts, or of texts, reaches its metric by name."""
    metrics = Collection(words=WordErrorRate(), characters=CharacterErrorRate())
    metrics.update({"words": (["a b", "c"], ["a c", "c"]), "characters": ("ab", "ac")})
    assert metrics.read() == {"words": pytest.approx(1 / 3), "characters": 0.5}


def test_what_is_no_text_is_refused():
    """Token ids, and unequal numbers of texts, say what to pass."""
    for wrong in ([1, 2], torch.ones(2), None, [["a"]]):
        with pytest.raises(MetricError, match=r"`references` is .*, but must be a text or a list"):
            WordErrorRate().update("a", wrong)
    with pytest.raises(MetricError, match=r"`predictions` has 2 texts, but `references` 1"):
        WordErrorRate().update(["a", "b"], "a")
    assert value(CharacterErrorRate(), (np.array(["ab"]).tolist(), ["ab"])) == 0.0
