"""The scorers that come with the package, by name. Each file imports its own library only when it loads."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from retouch.config.errors import ConfigError, nearest

if TYPE_CHECKING:
    from retouch.rewards.protocol import Scorer

SCORERS = {
    "aesthetic": "retouch.rewards.scorers.imscore:AestheticScorer",
    "clip": "retouch.rewards.scorers.clip:ClipScorer",
    "completion_quality": "retouch.rewards.scorers.completion:CompletionQualityScorer",
    "complex_edit": "retouch.rewards.scorers.complex_edit:ComplexEditScorer",
    "fn": "retouch.rewards.scorers.fn:FnScorer",
    "hpsv2": "retouch.rewards.scorers.imscore:HpsV2Scorer",
    "imagereward": "retouch.rewards.scorers.imscore:ImageRewardScorer",
    "jpeg_size": "retouch.rewards.scorers.jpeg_size:JpegSizeScorer",
    "mask_composite": "retouch.rewards.scorers.mask_composite:MaskCompositeScorer",
    "mmmg": "retouch.rewards.scorers.mmmg:MmmgScorer",
    "ocr": "retouch.rewards.scorers.ocr:OcrScorer",
    "openai_judge": "retouch.rewards.scorers.openai_judge:OpenAIJudgeScorer",
    "pickscore": "retouch.rewards.scorers.clip:PickScorer",
    "preservation": "retouch.rewards.scorers.preservation:PreservationScorer",
    "seam": "retouch.rewards.scorers.seam:SeamScorer",
    "style": "retouch.rewards.scorers.style:StyleScorer",
    "think_format": "retouch.rewards.scorers.completion:ThinkFormatScorer",
    "vlm": "retouch.rewards.scorers.vlm:VlmScorer",
}
"""Scorer name -> module:class."""


def make_scorer(name: str, options: Mapping[str, Any] | None = None) -> Scorer:
    """A scorer with its options, not loaded yet.

    Raises:
        ConfigError: no scorer of that name, or an option it does not have.
    """
    if name not in SCORERS:
        raise ConfigError(f"reward {name!r}: no such scorer; {nearest(name, SCORERS)}")
    module, _, attribute = SCORERS[name].partition(":")
    made: type[Scorer] = getattr(importlib.import_module(module), attribute)
    return made(**_checked(f"reward {name!r}", made, options or {}))


def _checked(label: str, made: type[Scorer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options against the annotations of the scorer's constructor: they come from a command line, too."""
    hints = {k: v for k, v in get_type_hints(made.__init__, include_extras=True).items() if k != "return"}
    for option, value in options.items():
        if option not in hints:
            known = nearest(option, hints) if hints else "it has none"
            raise ConfigError(f"{label}: no such option {option!r}; {known}")
        try:
            TypeAdapter(hints[option]).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ConfigError(f"{label}: {option}: given {value!r}; {problem[0].lower()}{problem[1:]}") from None
    return dict(options)
