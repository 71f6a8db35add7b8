"""A person's taste, as `retouch reward fit` has learned it from their votes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from retouch.config.base import Text
from retouch.errors import ConfigError, installed
from retouch.rewards.base import PixelScorer, RewardEntry
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.weights import expanded, named_file
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor

    from retouch.config.run import RunConfig


class TasteReward(RewardEntry):
    """Probability that the voter accepts the image, by a head that `retouch reward fit` fitted to their votes."""

    licence = "of the encoder"
    differentiable = True
    unscored = frozenset({"path", "extractor"})  # the revision has the digests of both

    scorer: Literal["taste"] = "taste"
    path: str
    """File of `retouch reward fit`; it names its image encoder."""
    extractor: Text | None = None
    """Hub id or folder with the same weights, if the encoder is elsewhere than it was for the fit."""
    cautious: bool = False
    """Lower the values of images that are unlike those that were voted on, in colour, contrast and share of ink: no
    vote is on such images. For `role: gold`, which then falls when a run leaves these images."""

    def check_trainable(self, run: RunConfig, key: str = "") -> None:
        super().check_trainable(run, key)
        if self.crop != "none":
            raise ValueError(f"{key}.crop: given {self.crop!r}, but a taste is fitted to whole images; leave it out")
        file = expanded(self.path)
        if not (self.is_made_here and file.is_file()):
            return
        from retouch.taste.head import read_taste

        fitted, own = read_taste(file, f"{key}.path"), run.evaluation.data
        # a gold taste scores evaluations alone, whose images may have other sizes than those of training
        scored = {"data": run.data} if self.role == "train" or own is None else {}
        for name, data in (scored | ({} if own is None else {"evaluation.data": own})).items():
            sizes = {*data.sizes}
            if {*fitted.sizes} <= sizes and fitted.fit in (None, data.image_options.fit):
                continue
            height, width = next(iter({*fitted.sizes} - sizes), fitted.sizes[0])
            raise ValueError(
                f"{key}.path: given {self.path!r}, which was fitted to images of {height} x {width} (height x width)"
                f"{'' if fitted.fit is None else f' with data.fit={fitted.fit}'}, but the run scores images of {name} "
                f"of {' and '.join(f'{h} x {w}' for h, w in sorted(sizes)[:3])}; fit it with "
                "`retouch reward fit VOTES --config RUN.yaml`, which reads them as `data` is read, and give "
                "evaluation.data the same resolution and fit"
            )

    def make(self) -> TasteScorer:
        return TasteScorer(self)


class TasteScorer(PixelScorer[TasteReward]):
    """sigmoid(<weights, features> - threshold); cautious: + the logarithm of how much rarer such an image is among the
    voted ones than one at their reach (`Votable`), by a normal distribution."""

    def load(self, device: str) -> None:
        """Load the head and its encoder.

        Raises:
            ConfigError: no such head, or an encoder with other weights than the one it was fitted on.
        """
        with installed("a taste"):
            import torch

            from retouch.taste.extractor import Extractor
        from retouch.taste.head import read_taste

        taste = read_taste(named_file("path", self.options.path))
        self._extract = Extractor(self.options.extractor or taste.extractor, device)
        found, fitted = (name.rpartition(" ")[2] for name in (self._extract.revision, taste.extractor_revision))
        if found != fitted:
            raise ConfigError(
                f"path: given {self.options.path!r}, which was fitted on the features of {taste.extractor} with the "
                f"weights {fitted}; those of {self._extract.name} are {found}; set extractor to the same weights, or "
                "fit again"
            )
        near = taste.votable
        self._weights, self._center, self._whitening = (
            torch.tensor(values, dtype=torch.float32, device=device)
            for values in (taste.weights, near.center, near.whitening)
        )
        self._threshold, self._reach, self._masked = taste.threshold, near.reach, taste.masked
        self.set_revision(f"{taste.digest} {fitted}")

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        import torch

        with torch.no_grad():
            images = [torch.from_numpy(item.image).permute(2, 0, 1) / 255 for item in items]
            found = [self._value(image, item) for image, item in zip(images, items, strict=True)]
        return [one if isinstance(one, Failure) else Score(float(one)) for one in found]

    def _value(self, image: Tensor, item: RewardItem) -> Tensor | Failure:
        features = self._extract(image, item.mask if self._masked else None)
        logit = (features * self._weights).sum() - self._threshold
        if self.options.cautious:
            squared = ((features[-len(self._center) :] - self._center) @ self._whitening).square().sum()
            logit = logit - (squared - self._reach**2).clamp(min=0) / 2
        return logit.sigmoid()
